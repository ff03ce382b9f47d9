"""IMPALA's learner: off-policy actor-critic updates from the rollouts of older policies (Espeholt et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer import distributed, losses, schedules
from trainer.checkpoint import CheckpointError
from trainer.config import ImpalaConfig
from trainer.graphs import Graphs
from trainer.impala_objective import REPORTED, Learned, Objective
from trainer.normalize import ObservationNormalizer, Scaling, ValueNormalizer
from trainer.off_policy import OffPolicyCredit, OffPolicyEstimator, Present, Window
from trainer.policy import ActorCritic
from trainer.rmsprop import RMSProp
from trainer.rollout import Rollout

Columns = Tensor | slice  #: some envs of a batch, by number or all as they lie


class Impala:
    """Policy gradient, value and entropy losses on off-policy credit; nothing in it reads the device from the host.

    A minibatch is the whole window of some envs. In the first pass over a batch each minibatch is evaluated under the
    present policy, gets its credit from that evaluation, and its policy loss has the gradient ``-A * grad log pi``.
    Further passes keep that credit and clip the ratio to the first pass's policy, as PPO does (APPO).

    Observations are scaled as the actor scaled them, so that the ratio is that of two policies over the same inputs.
    The normalizers' statistics move once per update, after it. A minibatch whose loss or gradient is not finite is not
    applied, nor is any that follows it in the same update.
    """

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
        self.policy, self.config, self._clock, self._estimator = policy, config, graphs.clock, estimator
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

    def update(self, rollout: Rollout, rewards: Tensor, progress: float) -> dict[str, Tensor]:
        """Assign credit and improve the policy on one batch of rollouts, in place.

        Args:
            rollout: ``[T, N]``; its observations are raw. What its unread rows hold is zeroed.
            rewards: ``[T, N]``, the rollout's own or normalized ones.
            progress: env steps done over ``total_steps``, for the linear schedule.

        Returns:
            Scalar tensors on the device: means over the minibatches that were applied, ``skipped_minibatches`` (not
            finite, or after one that was not), ``learning_rate``, and ``explained_variance`` of the first pass.
            ``loss/approx_kl`` is that of the present policy from the one that acted, ``0.5 * mean(log ratio^2)``.
        """
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(schedules.linear(self.config.learning_rate, progress))
        with self._clock.phase("update"):
            return self._update(rollout, rewards)

    def _update(self, rollout: Rollout, rewards: Tensor) -> dict[str, Tensor]:
        self._skipped.zero_()
        self._sums.zero_()
        rollout.clear_unread_()
        learned = Learned(*torch.zeros(4, *rewards.shape, device=rewards.device).unbind())
        for epoch in range(self.config.update_epochs):
            for columns in self._minibatch_columns(rewards.shape[1]):
                self._step(self._window(rollout, rewards, columns), columns, learned, is_first=epoch == 0)
        with self._clock.phase("normalize"):
            self._learn_statistics(rollout, learned.targets)
        applied = self.minibatches_per_update - self._skipped
        return {
            **dict(zip((*REPORTED, "grad_norm"), (self._sums / applied.clamp(min=1.0)).unbind(), strict=True)),
            "skipped_minibatches": self._skipped.clone(),
            "learning_rate": self.learning_rate.clone(),
            "explained_variance": losses.explained_variance(learned.predictions, learned.targets, rollout.valid),
        }

    def _minibatch_columns(self, envs: int) -> Iterator[Columns]:
        """Every env once, in a new order each time; a single minibatch takes them where they lie."""
        if self.config.num_minibatches == 1:
            yield slice(None)
        else:
            yield from torch.randperm(envs, device=self.learning_rate.device).tensor_split(self.config.num_minibatches)

    def _window(self, rollout: Rollout, rewards: Tensor, columns: Columns) -> Window:
        observations = rollout.observations[:, columns]
        if self._observation_normalizer is not None:
            with self._clock.phase("normalize"):
                scaling = rollout.scaling and Scaling(*(tensor[columns] for tensor in rollout.scaling))
                observations = self._observation_normalizer(observations, scaling)
        fields = (rollout.actions, rollout.log_probs, rewards, rollout.terminated, rollout.truncated, rollout.valid)
        return Window(observations, *(field[:, columns] for field in fields), core_state=rollout.core_state[0, columns])

    def _step(self, window: Window, columns: Columns, learned: Learned, is_first: bool) -> None:
        """One minibatch: forward, credit in the first pass, backward, and an optimizer step unless it is withheld."""
        phase = self._clock.phase
        count = distributed.sum_(window.valid.sum(dtype=torch.float32))
        with phase("forward"):
            present, assign = self._estimator(window)
        if is_first:
            with phase("credit"):
                self._learn(learned, columns, present, assign())
        with phase("forward"):
            own = Learned(*(field[:, columns] for field in learned))
            targets = own.targets if self._value_normalizer is None else self._value_normalizer.normalize(own.targets)
            loss, report = self._objective(window, present, own, targets, count)
        with phase("backward"):
            loss.backward()
            distributed.sum_gradients_(self.policy.parameters())
            grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        with phase("optimizer"):
            report = distributed.sum_(torch.cat([report, torch.zeros_like(report[:1])]))
            report[-1] = grad_norm
            skipping = (self._skipped > 0) | ~torch.isfinite(report).all()
            self._apply(withheld=(skipping | (count == 0)).float())
            self._skipped += skipping
            self._sums += torch.where(skipping, 0.0, report)

    def _learn(self, learned: Learned, columns: Columns, present: Present, credit: OffPolicyCredit) -> None:
        """Keep what the first pass found of a minibatch."""
        advantages = credit.advantages
        if self.config.normalize_advantages:
            advantages = losses.standardize(advantages, distributed.merge_moments(credit.advantage_moments))
        predictions = present.predictions.detach()
        if self._value_normalizer is not None:
            predictions = self._value_normalizer.denormalize(predictions)
        found = (present.log_probs, predictions, advantages, credit.targets)
        for field, values in zip(learned, found, strict=True):
            field[:, columns] = values

    def _apply(self, withheld: Tensor) -> None:
        """One optimizer step, unless ``withheld`` is 1: then parameters, moments and step count stay bit for bit."""
        self.optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.found_inf = withheld  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self.policy.clamp_log_std_()
        self.optimizer.zero_grad(set_to_none=True)

    def _learn_statistics(self, rollout: Rollout, targets: Tensor) -> None:
        """Let the normalizers see the batch, once it was learned from under the statistics before it."""
        if self._value_normalizer is not None:
            self._value_normalizer.update(targets, rollout.valid, self.policy.value_head)
        if self._observation_normalizer is not None:
            self._observation_normalizer.update(rollout.observations[:-1], rollout.valid)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and learning rate."""
        return {"optimizer": self.optimizer.state_dict(), "learning_rate": self.learning_rate.clone()}

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


def _make_optimizer(config: ImpalaConfig, policy: ActorCritic, learning_rate: Tensor) -> torch.optim.Optimizer:
    if config.optimizer == "rmsprop":
        return RMSProp(policy.parameters(), learning_rate, config.rmsprop_decay, config.rmsprop_eps)
    return torch.optim.Adam(
        policy.parameters(), learning_rate, eps=config.adam_eps, fused=True, capturable=learning_rate.is_cuda
    )
