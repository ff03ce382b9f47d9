"""PPO: one update of the policy from one rollout (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from envs.base import NullClock
from trainer import distributed, losses, schedules
from trainer.config import PPOConfig
from trainer.estimator import Estimate, Estimator
from trainer.graphs import GraphedStep
from trainer.normalize import ValueNormalizer
from trainer.policy import ActorCritic
from trainer.rollout import Rollout
from trainer.timing import PhaseClock

#: What one minibatch reports, in this order.
_REPORTED = (
    "loss/total",
    "loss/policy",
    "loss/value",
    "loss/entropy",
    "loss/approx_kl",
    "loss/clip_fraction",
    "grad_norm",
)


#: Named ``[batch, ...]`` tensors gathered from a rollout.
Minibatch = dict[str, Tensor]


class _Totals(NamedTuple):
    """What an update accumulates on the device, minibatch by minibatch."""

    skipped: Tensor  #: scalar: minibatches that were not finite, or came after one
    stopped: Tensor  #: scalar: minibatches above ``target_kl``, or after one
    reported: Tensor  #: scalar: minibatches in ``sums``
    sums: Tensor  #: ``[len(_REPORTED)]``


class PPO:
    """Clipped-surrogate updates; nothing in it reads the device from the host.

    Advantages are normalized over all valid rows of the rollout (population standard deviation, over all ranks). Every
    row of the rollout is in exactly one minibatch per epoch; minibatch sizes differ by one at most. A minibatch whose
    loss or gradient is not finite is not applied, nor is any that follows it in the same update; the optimizer's step
    count stays, too.

    With ``cuda_graphs`` the whole minibatch step (gather, forward, backward, clip, optimizer) is one graph; its parts
    are then not timed apart.
    """

    def __init__(
        self,
        policy: ActorCritic,
        value_normalizer: ValueNormalizer | None,
        estimator: Estimator,
        config: PPOConfig,
        clock: PhaseClock,
        compile_loss: bool = False,
        cuda_graphs: bool = False,
    ):
        self.policy, self.value_normalizer, self.config = policy, value_normalizer, config
        self.clock, self._estimator = clock, estimator
        self.max_skipped_updates = config.max_skipped_updates
        self.minibatches_per_update = config.update_epochs * config.num_minibatches
        device = next(policy.parameters()).device
        #: a tensor, so that schedules and KL adaptation never stop the device
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = torch.optim.Adam(
            policy.parameters(),
            lr=self.learning_rate,
            eps=config.adam_eps,
            fused=True,
            capturable=device.type == "cuda",
        )
        self._loss: Callable[[Minibatch, Tensor], tuple[Tensor, Tensor]] = self._minibatch_loss
        if compile_loss:
            self._loss = torch.compile(self._minibatch_loss, dynamic=False)
        skipped, stopped, reported = torch.zeros(3, device=device).unbind()
        self._totals = _Totals(skipped, stopped, reported, torch.zeros(len(_REPORTED), device=device))
        self._batch: Minibatch = {}
        self._indices = torch.empty(0, dtype=torch.int64, device=device)
        self._graph = GraphedStep(self._step_on_indices) if cuda_graphs else None

    def update(self, rollout: Rollout, rewards: Tensor, progress: float) -> dict[str, Tensor]:
        """Assign credit and improve the policy on one rollout, in place.

        Args:
            rollout: ``[T, N]``; its observations are normalized already. What its filler rows hold is zeroed.
            rewards: ``[T, N]``, the rollout's own or normalized ones.
            progress: env steps done over ``total_steps``, for the linear schedule.

        Returns:
            Scalar tensors on the device: means over the minibatches up to the end or the halt (one that exceeds
            ``target_kl`` included, one that is not finite not), ``skipped_minibatches`` (not finite, or after one that
            was not), ``stopped_minibatches`` (above ``target_kl``, or after), and ``learning_rate``.
        """
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(schedules.linear(self.config.learning_rate, progress))
        with self.clock.phase("credit"):
            estimate = self._estimator(rollout, rewards)
        with self.clock.phase("update"):
            return self._update(rollout, estimate)

    def _update(self, rollout: Rollout, estimate: Estimate) -> dict[str, Tensor]:
        for total in self._totals:
            total.zero_()
        self._load(self._prepare(rollout, estimate))
        for indices in self._minibatch_indices(rollout.rewards.numel()):
            if self._graph is None:
                self._step(indices, self.clock.phase)
            else:
                self._indices.copy_(indices)
                self._graph()
        skipped, stopped, reported, sums = self._totals
        means = sums / reported.clamp(min=1.0)
        return {
            **dict(zip(_REPORTED, means.unbind(), strict=True)),
            "skipped_minibatches": skipped.clone(),
            "stopped_minibatches": stopped.clone(),
            "learning_rate": self.learning_rate.clone(),
            "explained_variance": losses.explained_variance(rollout.values[:-1], estimate.value_targets, rollout.valid),
        }

    def _step_on_indices(self) -> None:
        self._step(self._indices, NullClock().phase)

    def _step(self, indices: Tensor, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        """One minibatch: gather, forward, backward, and an optimizer step unless it must be withheld."""
        skipped, stopped, reported, sums = self._totals
        with phase("forward"):
            minibatch = {name: tensor.index_select(0, indices) for name, tensor in self._batch.items()}
            count = distributed.sum_(minibatch["valid"].sum(dtype=torch.float32))
            loss, report = self._loss(minibatch, count)
        with phase("backward"):
            loss.backward()
            distributed.sum_gradients_(self.policy.parameters())
            grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        with phase("optimizer"):
            report = distributed.sum_(torch.cat([report, torch.zeros_like(report[:1])]))
            report[-1] = grad_norm
            skipping = (skipped > 0) | ((stopped == 0) & ~torch.isfinite(report).all())
            stopping = ~skipping & ((stopped > 0) | self._above_target_kl(report))
            live = ~skipping & (stopped == 0) & (count > 0)
            self._apply(withheld=(~live | stopping).float())
            skipped += skipping
            stopped += stopping
            reported += live
            sums += torch.where(live, report, 0.0)
            if self.config.lr_schedule == "adaptive":
                self._adapt_learning_rate(report, live)

    def _load(self, batch: Minibatch) -> None:
        """Set the rows that minibatches are gathered from; a graph needs them in the same memory every time."""
        if self._graph is None:
            self._batch = batch
            return
        shapes = {name: tensor.shape for name, tensor in batch.items()}
        if {name: tensor.shape for name, tensor in self._batch.items()} != shapes:
            self._batch = {name: torch.empty_like(tensor) for name, tensor in batch.items()}
            self._indices = self._indices.new_empty(len(batch["valid"]) // self.config.num_minibatches)
            self._graph.reset()
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor)

    def _prepare(self, rollout: Rollout, estimate: Estimate) -> Minibatch:
        """The whole rollout as one flat batch, advantages normalized, values in the critic's units."""
        rollout.clear_filler_()
        advantages, targets, values = estimate.advantages, estimate.value_targets, rollout.values[:-1]
        if self.config.normalize_advantages:
            advantages = losses.standardize(advantages, distributed.merge_moments(estimate.advantage_moments))
        if self.value_normalizer is not None:
            self.value_normalizer.update(targets, rollout.valid, self.policy.value_head)
            targets, values = self.value_normalizer.normalize(targets), self.value_normalizer.normalize(values)
        fields = {
            "observations": rollout.observations[:-1],
            "actions": rollout.actions,
            "log_probs": rollout.log_probs,
            "advantages": advantages,
            "value_targets": targets,
            "values": values,
            "valid": rollout.valid,
        }
        return {name: tensor.flatten(0, 1) for name, tensor in fields.items()}

    def _minibatch_indices(self, rows: int) -> Iterator[Tensor]:
        """Every row once per epoch, in a new order each time."""
        for _ in range(self.config.update_epochs):
            yield from torch.randperm(rows, device=self.learning_rate.device).tensor_split(self.config.num_minibatches)

    def _minibatch_loss(self, minibatch: Minibatch, count: Tensor) -> tuple[Tensor, Tensor]:
        """The scalar to descend, and this rank's share of the reported values but the gradient norm."""
        config, valid = self.config, minibatch["valid"]
        present = self.policy.evaluate(minibatch["observations"], minibatch["actions"])
        surrogate = losses.clipped_surrogate(
            present.log_probs, minibatch["log_probs"], minibatch["advantages"], valid, count, config.clip_range
        )
        value = losses.value_loss(
            present.values, minibatch["values"], minibatch["value_targets"], valid, count, config.value_clip_range
        )
        entropy = losses.entropy_bonus(present.entropies, valid, count)
        total = surrogate.loss + config.value_coef * value - config.entropy_coef * entropy
        report = torch.stack([total, surrogate.loss, value, entropy, surrogate.approx_kl, surrogate.clip_fraction])
        return total, report.detach()

    def _above_target_kl(self, report: Tensor) -> Tensor:
        kl = report[_REPORTED.index("loss/approx_kl")]
        if self.config.target_kl is None:
            return torch.zeros_like(kl, dtype=torch.bool)
        return kl > self.config.target_kl

    def _apply(self, withheld: Tensor) -> None:
        """One optimizer step, unless ``withheld`` is 1: then parameters, moments and step count stay bit for bit."""
        # the fused optimizer's own overflow switch: decided on the device, without a host synchronization
        self.optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.found_inf = withheld  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self.policy.clamp_log_std_()
        self.optimizer.zero_grad(set_to_none=True)

    def _adapt_learning_rate(self, report: Tensor, live: Tensor) -> None:
        kl = torch.where(live, report[_REPORTED.index("loss/approx_kl")], torch.nan)  # a NaN changes nothing
        config = self.config
        schedules.adapt_to_kl_(
            self.learning_rate, kl, config.desired_kl, config.min_learning_rate, config.max_learning_rate
        )

    def state_dict(self) -> dict[str, object]:
        """Optimizer and learning rate."""
        return {"optimizer": self.optimizer.state_dict(), "learning_rate": self.learning_rate.clone()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what `state_dict` gave, under this configuration's settings and on this device."""
        optimizer, learning_rate = state["optimizer"], state["learning_rate"]
        if not isinstance(optimizer, dict) or not isinstance(learning_rate, Tensor):
            raise TypeError("the optimizer's state is not a dictionary with a learning rate beside it")
        self.optimizer.load_state_dict(optimizer)
        if self.config.lr_schedule == "adaptive":  # the other schedules follow from the configuration and the counter
            bounds = self.config.min_learning_rate, self.config.max_learning_rate
            self.learning_rate.copy_(learning_rate.clamp(*bounds))
        capturable = self.learning_rate.is_cuda
        for group in self.optimizer.param_groups:  # loading replaced the settings by those of the checkpoint
            group.update(lr=self.learning_rate, eps=self.config.adam_eps, capturable=capturable)
        if self._graph is not None:
            self._graph.reset()
