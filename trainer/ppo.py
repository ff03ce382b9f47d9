"""PPO: one update of the policy from one rollout (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from trainer import distributed, losses, schedules
from trainer.config import PPOConfig
from trainer.estimator import Estimate
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


class PPO:
    """Clipped-surrogate updates; nothing in it reads the device from the host.

    Advantages are normalized over all valid rows of the rollout (population standard deviation, over all ranks).
    Every row of the rollout is in exactly one minibatch per epoch; minibatch sizes differ by one at most. A minibatch
    whose loss or gradient is not finite, or whose KL exceeds ``target_kl``, is not applied, nor is any that follows it
    in the same update; one without a valid row is not applied either. The optimizer's step count stays, too.
    """

    def __init__(
        self,
        policy: ActorCritic,
        value_normalizer: ValueNormalizer | None,
        config: PPOConfig,
        clock: PhaseClock,
        compile_loss: bool = False,
    ):
        self.policy, self.value_normalizer, self.config, self.clock = policy, value_normalizer, config, clock
        device = next(policy.parameters()).device
        #: a tensor, so that schedules and KL adaptation never stop the device
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=self.learning_rate, eps=config.adam_eps, fused=True)
        self._loss: Callable[[Minibatch, Tensor], tuple[Tensor, Tensor]] = self._minibatch_loss
        if compile_loss:
            self._loss = torch.compile(self._minibatch_loss, dynamic=False)

    def update(self, rollout: Rollout, estimate: Estimate, progress: float) -> dict[str, Tensor]:
        """Improve the policy on one rollout, in place.

        Args:
            rollout: ``[T, N]``; its observations are normalized already. What its filler rows hold is zeroed.
            estimate: advantages and value targets ``[T, N]``.
            progress: env steps done over ``total_steps``, for the linear schedule.

        Returns:
            Scalar tensors on the device: means over the minibatches up to the end or the halt (one that exceeds
            ``target_kl`` included, one that is not finite not), ``skipped_minibatches`` (not finite, or after one that
            was not), ``stopped_minibatches`` (above ``target_kl``, or after), and ``learning_rate``.
        """
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(schedules.linear(self.config.learning_rate, progress))
        with self.clock.phase("update"):
            return self._update(rollout, estimate)

    def _update(self, rollout: Rollout, estimate: Estimate) -> dict[str, Tensor]:
        batch = self._prepare(rollout, estimate)
        skipped, stopped, reported = torch.zeros(3, device=rollout.rewards.device).unbind()
        sums = torch.zeros(len(_REPORTED), device=rollout.rewards.device)
        for minibatch, count in self._minibatches(batch):
            with self.clock.phase("forward"):
                loss, report = self._loss(minibatch, count)
            with self.clock.phase("backward"):
                loss.backward()
                distributed.sum_gradients_(self.policy.parameters())
                grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
            with self.clock.phase("optimizer"):
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
        means = sums / reported.clamp(min=1.0)
        return {
            **dict(zip(_REPORTED, means.unbind(), strict=True)),
            "skipped_minibatches": skipped,
            "stopped_minibatches": stopped,
            "learning_rate": self.learning_rate.clone(),
            "explained_variance": losses.explained_variance(rollout.values[:-1], estimate.value_targets, rollout.valid),
        }

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

    def _minibatches(self, batch: Minibatch) -> Iterator[tuple[Minibatch, Tensor]]:
        """Every row once per epoch in a new order, with the number of valid rows over all ranks."""
        rows = len(batch["valid"])
        for _ in range(self.config.update_epochs):
            order = torch.randperm(rows, device=batch["valid"].device)
            for indices in order.tensor_split(self.config.num_minibatches):
                minibatch = {name: tensor.index_select(0, indices) for name, tensor in batch.items()}
                yield minibatch, distributed.sum_(minibatch["valid"].sum(dtype=torch.float32))

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
        """Restore what `state_dict` gave."""
        optimizer, learning_rate = state["optimizer"], state["learning_rate"]
        if not isinstance(optimizer, dict) or not isinstance(learning_rate, Tensor):
            raise TypeError("the optimizer's state is not a dictionary with a learning rate beside it")
        self.optimizer.load_state_dict(optimizer)
        self.learning_rate.copy_(learning_rate)
        for group in self.optimizer.param_groups:  # loading replaces the shared tensor by a copy
            group["lr"] = self.learning_rate
