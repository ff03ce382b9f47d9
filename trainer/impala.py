"""IMPALA's learner: off-policy actor-critic updates from the rollouts of older policies (Espeholt et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainer import distributed, losses, schedules
from trainer.checkpoint import CheckpointError
from trainer.config import ImpalaConfig
from trainer.graphs import GraphedStep, Graphs, Part
from trainer.impala_objective import REPORTED, Learned, Objective
from trainer.normalize import ObservationNormalizer, Scaling, ValueNormalizer
from trainer.off_policy import OffPolicyCredit, OffPolicyEstimator, Present, Window
from trainer.policy import ActorCritic
from trainer.rmsprop import RMSProp
from trainer.rollout import Rollout

#: What an update returns, in this order.
_RESULTS = (*REPORTED, "grad_norm", "skipped_minibatches", "learning_rate", "explained_variance")

Columns = Tensor | slice  #: some envs of a batch, by number or all as they lie


class _Batch(NamedTuple):
    """One memory that rollouts come in, and the step that learns from what lies there."""

    rollout: Rollout
    rewards: Tensor  #: ``[T, N]``, a copy: those of the caller may lie elsewhere every time
    learn: GraphedStep


class _Evaluated(NamedTuple):
    """A minibatch under the present policy."""

    window: Window
    present: Present
    assign_credit: Callable[[], OffPolicyCredit]


class Impala:
    """Policy gradient, value and entropy losses on off-policy credit; nothing in it reads the device from the host.

    A minibatch is the whole window of some envs. In the first pass over a batch each minibatch is evaluated under the
    present policy, gets its credit from that evaluation, and its policy loss has the gradient ``-A * grad log pi``.
    Further passes keep that credit and clip the ratio to the first pass's policy, as PPO does (APPO).

    Observations are scaled as the actor scaled them, so that the ratio is that of two policies over the same inputs.
    The normalizers' statistics move once per update, after it. A minibatch whose loss or gradient is not finite is not
    applied, nor is any that follows it in the same update.

    With CUDA graphs the whole update is replayed, cut only where credit begins and ends. Graphs belong to a rollout's
    memory, so rollouts must come in a few memories, again and again.
    """

    _columns: Columns  #: of the minibatch under way
    _count: Tensor  #: scalar: its valid rows, over all ranks
    _evaluated: _Evaluated  #: until the backward pass
    _loss: Tensor  #: until the backward pass
    _report: Tensor  #: ``[len(REPORTED)]``, this rank's share
    _grad_norm: Tensor
    _learned: Learned  #: ``[T, N]``, of the batch
    _orders: Tensor  #: ``[epochs, N]`` int64: the order of the envs in every pass

    def __init__(
        self,
        policy: ActorCritic,
        observation_normalizer: ObservationNormalizer | None,
        value_normalizer: ValueNormalizer | None,
        estimator: OffPolicyEstimator,
        config: ImpalaConfig,
        graphs: Graphs,
        loss_backend: Literal["torch", "triton"] = "torch",
    ):
        self.policy, self.config, self._graphs, self._estimator = policy, config, graphs, estimator
        self._observation_normalizer, self._value_normalizer = observation_normalizer, value_normalizer
        self.max_skipped_updates = config.max_skipped_updates
        self.minibatches_per_update = config.update_epochs * config.num_minibatches
        device = next(policy.parameters()).device
        #: a tensor, so that the schedule never stops the device
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = _make_optimizer(config, policy, self.learning_rate)
        self._objective = Objective(policy.head, config, device, loss_backend)
        self._skipped = torch.zeros((), device=device)
        self._sums = torch.zeros(len(REPORTED) + 1, device=device)  #: of what is reported, and the gradient norm
        self._results = torch.zeros(len(_RESULTS), device=device)
        self._batches: dict[int, _Batch] = {}  #: by the address of their memory, which they keep alive

    def update(self, rollout: Rollout, rewards: Tensor, progress: float) -> dict[str, Tensor]:
        """Assign credit and improve the policy on one batch of rollouts, in place.

        Args:
            rollout: ``[T, N]``, the same N every time; its observations are raw. What its unread rows hold is zeroed.
            rewards: ``[T, N]``, the rollout's own or normalized ones.
            progress: env steps done over ``total_steps``, for the linear schedule.

        Returns:
            Scalar tensors on the device: means over the minibatches that were applied, ``skipped_minibatches`` (not
            finite, or after one that was not), ``learning_rate``, and ``explained_variance`` of the first pass.
            ``loss/approx_kl`` is that of the present policy from the one that acted, ``0.5 * mean(log ratio^2)``.
        """
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(schedules.linear(self.config.learning_rate, progress))
        with self._graphs.clock.phase("update"):
            batch = self._batches.get(rollout.valid.data_ptr()) or self._bind(rollout)
            batch.rewards.copy_(rewards)
            batch.learn()
            return dict(zip(_RESULTS, self._results.clone().unbind(), strict=True))

    def _bind(self, rollout: Rollout) -> _Batch:
        """Make the step that learns from a rollout's memory."""
        if not self._batches:
            shape, device = rollout.rewards.shape, rollout.rewards.device
            self._learned = Learned(*torch.zeros(4, *shape, device=device).unbind())
            self._orders = torch.zeros(self.config.update_epochs, shape[1], dtype=torch.int64, device=device)
        rewards = torch.empty_like(rollout.rewards)
        step = self._graphs.step("the learner's update", *self._parts(rollout, rewards))
        batch = self._batches[rollout.valid.data_ptr()] = _Batch(rollout, rewards, step)
        return batch

    def _parts(self, rollout: Rollout, rewards: Tensor) -> Iterator[Part]:
        yield Part(None, partial(self._begin, rollout))
        for number in range(self.minibatches_per_update):
            yield Part("forward", partial(self._evaluate, rollout, rewards, number))
            if number < self.config.num_minibatches:
                yield Part("credit", self._learn)
            yield Part("forward", self._lose)
            yield Part("backward", self._backward)
            yield Part("optimizer", self._apply_or_withhold)
        yield Part("normalize", partial(self._learn_statistics, rollout))
        yield Part(None, partial(self._sum_up, rollout))

    def _begin(self, rollout: Rollout) -> None:
        self._skipped.zero_()
        self._sums.zero_()
        rollout.clear_unread_()
        if self.config.num_minibatches > 1:
            for order in self._orders:
                torch.randperm(len(order), out=order)

    def _columns_of(self, number: int) -> Columns:
        """The envs of an update's n-th minibatch: each once per pass; a single minibatch takes them where they lie."""
        epoch, part = divmod(number, self.config.num_minibatches)
        if self.config.num_minibatches == 1:
            return slice(None)
        return self._orders[epoch].tensor_split(self.config.num_minibatches)[part]

    def _window(self, rollout: Rollout, rewards: Tensor, columns: Columns) -> Window:
        observations = rollout.observations[:, columns]
        if self._observation_normalizer is not None:
            scaling = rollout.scaling and Scaling(*(tensor[columns] for tensor in rollout.scaling))
            observations = self._observation_normalizer(observations, scaling)
        fields = (rollout.actions, rollout.log_probs, rewards, rollout.terminated, rollout.truncated, rollout.valid)
        return Window(observations, *(field[:, columns] for field in fields), core_state=rollout.core_state[0, columns])

    def _evaluate(self, rollout: Rollout, rewards: Tensor, number: int) -> None:
        """A minibatch under the present policy, with gradients."""
        self._columns = self._columns_of(number)
        window = self._window(rollout, rewards, self._columns)
        self._count = distributed.sum_(window.valid.sum(dtype=torch.float32))
        self._evaluated = _Evaluated(window, *self._estimator(window))

    def _learn(self) -> None:
        """Keep what the first pass finds of a minibatch: its credit, and what it was assigned by."""
        present, credit = self._evaluated.present, self._evaluated.assign_credit()
        advantages = credit.advantages
        if self.config.normalize_advantages:
            advantages = losses.standardize(advantages, distributed.merge_moments(credit.advantage_moments))
        predictions = present.predictions.detach()
        if self._value_normalizer is not None:
            predictions = self._value_normalizer.denormalize(predictions)
        found = (present.log_probs, predictions, advantages, credit.targets)
        for field, values in zip(self._learned, found, strict=True):
            field[:, self._columns] = values

    def _lose(self) -> None:
        """The loss on what was evaluated and learned."""
        window, present, _ = self._evaluated
        own = Learned(*(field[:, self._columns] for field in self._learned))
        targets = own.targets if self._value_normalizer is None else self._value_normalizer.normalize(own.targets)
        self._loss, self._report = self._objective(window, present, own, targets, self._count)

    def _backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._loss.backward()
        # an autograd graph that lives on ties the parameters to this call's stream, which a capture could not leave
        del self._loss, self._evaluated
        distributed.sum_gradients_(self.policy.parameters())
        self._grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)

    def _apply_or_withhold(self) -> None:
        """Step the optimizer, or leave parameters, moments and step count as they are, bit for bit."""
        report = torch.cat([distributed.sum_(self._report), self._grad_norm[None]])
        skipping = (self._skipped > 0) | ~torch.isfinite(report).all()
        self._skipped += skipping
        self._sums += torch.where(skipping, 0.0, report)
        # the fused optimizer's own overflow switch: decided on the device, without a host synchronization
        self.optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.found_inf = (skipping | (self._count == 0)).float()  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self.policy.clamp_log_std_()

    def _learn_statistics(self, rollout: Rollout) -> None:
        """Let the normalizers see the batch, once it was learned from under the statistics before it."""
        if self._value_normalizer is not None:
            self._value_normalizer.update(self._learned.targets, rollout.valid, self.policy.value_head)
        if self._observation_normalizer is not None:
            self._observation_normalizer.update(rollout.observations[:-1], rollout.valid)

    def _sum_up(self, rollout: Rollout) -> None:
        means = self._sums / (self.minibatches_per_update - self._skipped).clamp(min=1.0)
        explained = losses.explained_variance(self._learned.predictions, self._learned.targets, rollout.valid)
        self._results.copy_(torch.cat([means, torch.stack([self._skipped, self.learning_rate, explained])]))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's; the learning rate follows from the progress."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, under this configuration's settings and on this device.

        Raises:
            CheckpointError: the state is that of the other optimizer.
        """
        saved = "rmsprop" if "decay" in state["optimizer"]["param_groups"][0] else "adam"
        if saved != self.config.optimizer:
            raise CheckpointError(f"impala.optimizer={self.config.optimizer}, but the checkpoint is of {saved}")
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        for batch in self._batches.values():
            batch.learn.reset()


def _make_optimizer(config: ImpalaConfig, policy: ActorCritic, learning_rate: Tensor) -> torch.optim.Optimizer:
    if config.optimizer == "rmsprop":
        return RMSProp(policy.parameters(), learning_rate, config.rmsprop_decay, config.rmsprop_eps)
    return torch.optim.Adam(
        policy.parameters(), learning_rate, eps=config.adam_eps, fused=True, capturable=learning_rate.is_cuda
    )
