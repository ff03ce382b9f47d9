"""IMPALA's learner: off-policy actor-critic updates from the rollouts of older policies (Espeholt et al. 2018)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernels.shuffle import shuffle_
from trainer import distributed, losses, schedules
from trainer.checkpoint import CheckpointError
from trainer.config import ImpalaConfig
from trainer.graphs import GraphedStep, Graphs, Part
from trainer.impala_objective import REPORTED, Learned, Objective
from trainer.minibatches import sums_of_parts
from trainer.normalize import ObservationNormalizer, ValueNormalizer
from trainer.off_policy import OffPolicyCredit, OffPolicyEstimator, Window
from trainer.policy import ActorCritic
from trainer.rmsprop import RMSProp
from trainer.rollout import Rollout

#: What an update returns, in this order.
_RESULTS = (*REPORTED, "grad_norm", "skipped_minibatches", "learning_rate", "explained_variance")


class _Batch(NamedTuple):
    """One memory that rollouts come in, and the step that learns from what lies there."""

    rollout: Rollout
    rewards: Tensor  #: ``[T, N]``, a copy: those of the caller may lie elsewhere every time
    learn: GraphedStep


class Impala:
    """Policy gradient, value and entropy losses on off-policy credit; nothing in it reads the device from the host.

    A batch gets its credit once, from what the policy with which the update begins says of it. The policy loss has the
    gradient ``-A * grad log pi`` in the first minibatch; in those that follow, and in further passes, it is clipped
    around that policy, as in PPO (APPO). A minibatch is made of rows or, with a recurrent core, of whole windows of
    envs, each from the memory that it was collected with.

    Observations are scaled as the actor scaled them, so that the ratio is that of two policies over the same inputs.
    The normalizers' statistics move once per update, after it. A minibatch whose loss or gradient is not finite is not
    applied, nor is any that follows it in the same update.

    With CUDA graphs the whole update is replayed, cut only where credit begins and ends. Graphs belong to a rollout's
    memory, so rollouts must come in a few memories, again and again.
    """

    _window: Window  #: the batch, with observations of the row after the last
    _evaluation: tuple[Tensor, ...]
    _credit: OffPolicyCredit
    _units: tuple[Window, Learned]  #: rows or whole windows, side by side: what minibatches are made of
    _orders: Tensor  #: ``[epochs, units]`` int64
    _counts: Tensor  #: ``[epochs, minibatches]``: valid rows of each, over all ranks
    _count: Tensor  #: scalar: of the minibatch under way
    _loss: Tensor  #: until its backward pass
    _report: Tensor  #: ``[len(REPORTED)]``, this rank's share, after the backward pass the sum over ranks
    _grad_norm: Tensor

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
            finite, or after one that was not), ``learning_rate``, and ``explained_variance`` before it.
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
        rewards = torch.empty_like(rollout.rewards)
        step = self._graphs.step("the learner's update", *self._parts(rollout, rewards))
        batch = self._batches[rollout.valid.data_ptr()] = _Batch(rollout, rewards, step)
        return batch

    def _parts(self, rollout: Rollout, rewards: Tensor) -> Iterator[Part]:
        yield Part("forward", partial(self._evaluate, rollout, rewards))
        yield Part("credit", self._assign_credit)
        yield Part(None, self._shuffle)
        for number in range(self.minibatches_per_update):
            yield Part("forward", partial(self._forward, number))
            yield Part("backward", self._backward)
            yield Part("optimizer", self._apply_or_withhold)
        if self._value_normalizer is not None or self._observation_normalizer is not None:
            yield Part("normalize", partial(self._learn_statistics, rollout))
        yield Part(None, self._sum_up)

    def _evaluate(self, rollout: Rollout, rewards: Tensor) -> None:
        """The batch as the actor's policy saw it, and what the present one says of it, some envs at a time."""
        rollout.clear_unread_()
        observations = rollout.observations
        if self._observation_normalizer is not None:
            observations = self._observation_normalizer(observations, rollout.scaling)
        fields = (rollout.actions, rollout.log_probs, rewards, rollout.terminated, rollout.truncated, rollout.valid)
        self._window = Window(observations, *fields, rollout.core_state)
        num_envs = rewards.shape[1]
        num_parts = min(self.config.num_minibatches, num_envs)
        bounds = [num_envs * n // num_parts for n in range(num_parts + 1)]
        parts = [self._estimator.evaluate(self._window.narrow(slice(*ends))) for ends in itertools.pairwise(bounds)]
        self._evaluation = tuple(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))

    def _assign_credit(self) -> None:
        self._credit = self._estimator.assign(self._window, *self._evaluation)

    def _shuffle(self) -> None:
        """What minibatches are made of, and their order in every pass."""
        self._skipped.zero_()
        self._sums.zero_()
        log_probs, _, advantages, weights, targets = self._credit
        if self.config.normalize_advantages:
            advantages = standardized(advantages, weights, self._window.valid)
        if self._value_normalizer is not None:
            targets = self._value_normalizer.normalize(targets)
        window, learned = self._window, Learned(log_probs, advantages, targets)
        if self.policy.state_size:
            window = window._replace(observations=window.observations[:-1])
        else:
            window, learned = window.rows(), Learned(*(tensor.reshape(1, -1) for tensor in learned))
        self._units = window, learned
        shape = self.config.update_epochs, window.valid.shape[1]
        self._orders = shuffle_(torch.empty(shape, dtype=torch.int64, device=targets.device))
        counts = sums_of_parts(window.valid.sum(0), self._orders, self.config.num_minibatches)
        self._counts = distributed.sum_(counts)

    def _forward(self, number: int) -> None:
        """The loss of an update's n-th minibatch."""
        window, learned = self._units
        epoch, part = divmod(number, self.config.num_minibatches)
        if self.config.num_minibatches > 1:
            units = self._orders[epoch].tensor_split(self.config.num_minibatches)[part]
            window, learned = window.narrow(units), learned.narrow(units)
        self._count = self._counts[epoch, part]
        self._loss, self._report = self._objective(window, self._estimator.present(window), learned, self._count)

    def _backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._loss.backward()
        # an autograd graph that lives on ties the parameters to this call's stream, which a capture could not leave
        del self._loss
        distributed.sum_gradients_(self.policy.parameters(), self._report)
        self._grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)

    def _apply_or_withhold(self) -> None:
        """Step the optimizer, or leave parameters, moments and step count as they are, bit for bit."""
        report = torch.cat([self._report, self._grad_norm[None]])
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
            self._value_normalizer.update(self._credit.targets, rollout.valid, self.policy.value_head)
        if self._observation_normalizer is not None:
            self._observation_normalizer.update(rollout.observations[:-1], rollout.valid)

    def _sum_up(self) -> None:
        means = self._sums / (self.minibatches_per_update - self._skipped).clamp(min=1.0)
        explained = losses.explained_variance(self._credit.predictions, self._credit.targets, self._window.valid)
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


def standardized(advantages: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    """``w * (A - b) / rms`` with ``b = sum(w * A) / sum(w)``, over all valid rows of all ranks.

    Under the present policy the mean is then 0, and a row of weight 0, which it would never have come to, keeps none.
    Where the A do not vary, the result is 0.

    Args:
        advantages: ``w * A``, ``[T, N]``, 0 in filler rows, as is the result.
        weights: the importance weights ``w``, ``[T, N]``, 0 in filler rows.
        valid: ``[T, N]`` bool.
    """
    totals = torch.stack([advantages.sum(dtype=torch.float64), weights.sum(dtype=torch.float64)])
    weighted, weight = distributed.sum_(totals).unbind()
    mean = (weighted / weight.clamp(min=1e-8)).to(advantages.dtype)
    centred = advantages - weights * mean
    squares, count = distributed.sum_(torch.stack([centred.square().sum(), valid.sum()])).unbind()
    rms = (squares / count.clamp(min=1.0)).sqrt()
    # equal advantages leave a spread of roundings; a NaN is none: it goes on, to be seen
    return torch.where(rms <= 1e-6 * mean.abs(), 0.0, centred / (rms + 1e-8))


def _make_optimizer(config: ImpalaConfig, policy: ActorCritic, learning_rate: Tensor) -> torch.optim.Optimizer:
    if config.optimizer == "rmsprop":
        return RMSProp(policy.parameters(), learning_rate, config.rmsprop_decay, config.rmsprop_eps)
    return torch.optim.Adam(
        policy.parameters(), learning_rate, eps=config.adam_eps, fused=True, capturable=learning_rate.is_cuda
    )
