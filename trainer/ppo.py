"""PPO: one update of the policy from one rollout (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.shuffle import shuffle_
from kernels.step_guard import COUNTS, GuardSettings
from trainer import distributed, losses, schedules
from trainer.config import PPOConfig
from trainer.estimator import Estimator
from trainer.graphs import Graphs, Part
from trainer.normalize import ValueNormalizer
from trainer.optimizer import GuardedAdam
from trainer.policy import ActorCritic
from trainer.ppo_objective import REPORTED, Batch, Objective
from trainer.rollout import Rollout

#: Means over the minibatches of an update.
_MEANS = (*REPORTED, "grad_norm")
#: What an update returns, in this order.
_RESULTS = (*_MEANS, "skipped_minibatches", "stopped_minibatches", "learning_rate", "explained_variance")


class _Step(NamedTuple):
    """What one part of a minibatch step leaves to the next."""

    loss: Tensor  #: scalar, with its graph until the backward pass
    report: Tensor  #: ``[len(REPORTED)]``; this rank's share, after the backward pass the sum over ranks
    num_valid: Tensor  #: scalar: valid rows of the minibatch, over all ranks


class PPO:
    """Clipped-surrogate updates; nothing in it reads the device from the host.

    Advantages are normalized over all valid rows of the rollout (population standard deviation, over all ranks). Every
    row of the rollout is in exactly one minibatch per epoch; minibatch sizes differ by one at most. With a recurrent
    core a minibatch is made of whole windows of envs, each from the memory that it was collected with.

    A minibatch whose loss or gradient is not finite is not applied, nor is any that follows it in the same update; the
    optimizer's step count stays, too.

    Credit is assigned once per rollout, or again before every epoch or minibatch (``recompute_advantages``): then the
    present critic values the whole rollout anew. What the value loss is clipped around stays what the collecting critic
    said, and so do the value normalizer's statistics.

    Args:
        policy: trained in place.
        value_normalizer: gives the critic's units; None leaves them those of the reward.
        estimator: assigns credit to a rollout; launches work, and never waits for the device.
        config: settings.
        graphs: whether steps become CUDA graphs; all minibatches between two assignments of credit are one.
        loss_backend: ``triton`` fuses the loss; ``torch`` takes any policy.
        compile_loss: compile network and loss.
    """

    _rollout: Rollout  #: whose memory the graphs read

    def __init__(
        self,
        policy: ActorCritic,
        value_normalizer: ValueNormalizer | None,
        estimator: Estimator,
        config: PPOConfig,
        graphs: Graphs,
        loss_backend: Literal["torch", "triton"] = "torch",
        compile_loss: bool = False,
    ):
        self.policy, self.value_normalizer, self.config = policy, value_normalizer, config
        self.max_skipped_updates = config.max_skipped_updates
        self.minibatches_per_update = config.update_epochs * config.num_minibatches
        self._estimator, self._clock = estimator, graphs.clock
        device = next(policy.parameters()).device
        #: a tensor, so that schedules and KL adaptation never stop the device
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        adapts = config.lr_schedule == "adaptive"
        guard = GuardSettings(
            config.max_grad_norm, config.target_kl, config.desired_kl if adapts else None, config.min_learning_rate,
            config.max_learning_rate,
        )  # fmt: skip
        fused = loss_backend == "triton"
        self.optimizer = GuardedAdam(policy.parameters(), self.learning_rate, config.adam_eps, guard, fused)
        self.objective = Objective(policy, config, loss_backend)
        self._solve = torch.compile(self.objective.__call__, dynamic=False) if compile_loss else self.objective
        self._totals = torch.zeros(COUNTS + len(_MEANS), device=device)  #: of an update, over its minibatches
        self._explained_variance = torch.zeros((), device=device)
        self._results = torch.zeros(len(_RESULTS), device=device)
        assign = Part("credit", self._assign_credit)
        self._begin = graphs.step("the update's start", assign, Part(None, self._prepare))
        self._begin_anew = graphs.step(
            "credit anew", Part("inference", self._evaluate_rollout), assign, Part(None, self._load_credit)
        )
        self._stretches = [
            graphs.step("the minibatches", *(part for number in numbers for part in self._minibatch(number)))
            for numbers in _split(self.minibatches_per_update, config)
        ]
        self._end = graphs.step("the update's end", Part(None, self._sum_up))
        self._steps = (self._begin, self._begin_anew, *self._stretches, self._end)

    def update(self, rollout: Rollout, rewards: Tensor, progress: float) -> dict[str, Tensor]:
        """Assign credit and improve the policy on one rollout, in place.

        Args:
            rollout: ``[T, N]``; its observations are normalized already. Its values are overwritten where
                ``recompute_advantages`` asks for new ones.
            rewards: ``[T, N]``, the rollout's own or normalized ones.
            progress: env steps done over ``total_steps``, for linear schedules.

        Returns:
            Scalar tensors on the device: means over the minibatches up to the end or the halt (one that exceeds
            ``target_kl`` included, one that is not finite not), ``skipped_minibatches`` (not finite, or after one that
            was not), ``stopped_minibatches`` (above ``target_kl``, or after), and ``learning_rate``.
        """
        self._follow_schedules(progress)
        with self._clock.phase("update"):
            self._bind(rollout)
            self._rewards.copy_(rewards)
            self._begin()
            for number, descend in enumerate(self._stretches):
                if number:
                    self._begin_anew()
                descend()
            self._end()
            return dict(zip(_RESULTS, self._results.clone().unbind(), strict=True))

    def _follow_schedules(self, progress: float) -> None:
        config, share = self.config, schedules.linear(1.0, progress)
        if config.lr_schedule == "linear":
            self.learning_rate.fill_(schedules.linear(config.learning_rate, progress))
        if config.clip_schedule == "linear":
            self.objective.clip_range.fill_(config.clip_range * share)
        if config.entropy_schedule == "linear":
            self.objective.entropy_coef.fill_(config.entropy_coef * share)

    def _bind(self, rollout: Rollout) -> None:
        """Take a rollout's memory as what graphs read, unless it is that already."""
        if getattr(self, "_rollout", None) is not rollout:
            self._rollout, self._batch = rollout, Batch.of(rollout)
            self._rewards = torch.empty_like(rollout.rewards)
            units = self._batch.num_units
            epochs, device = self.config.update_epochs, self.learning_rate.device
            self._orders = torch.empty(epochs, units, dtype=torch.int64, device=device)
            self._counts = torch.empty(epochs, self.config.num_minibatches, device=device)  #: valid rows
            for step in self._steps:
                step.reset()

    def _assign_credit(self) -> None:
        self._estimate = self._estimator(self._rollout, self._rewards)

    def _minibatch(self, number: int) -> tuple[Part, ...]:
        """The step of an update's n-th minibatch."""
        return (
            Part("forward", partial(self._forward, number)),
            Part("backward", self._backward),
            Part("optimizer", self._apply_or_withhold),
        )

    def _prepare(self) -> None:
        """The whole rollout as one flat batch in the critic's units, and the order of its parts in every epoch."""
        rollout, estimate = self._rollout, self._estimate
        self._totals.zero_()
        values, targets, valid = rollout.values[:-1], estimate.value_targets, rollout.valid
        self._explained_variance.copy_(losses.explained_variance(values, targets, valid))
        if self.value_normalizer is not None:
            self.value_normalizer.update(targets, valid, self.policy.value_head)
        self._batch.values.copy_(self._normalized(values).flatten())
        self._load_credit()
        shuffle_(self._orders)
        self._counts.copy_(distributed.sum_(self._batch.counts_of(self._orders, self.config.num_minibatches)))

    def _load_credit(self) -> None:
        """What credit assignment gave, as minibatches take it."""
        advantages, targets, moments = self._estimate
        if self.config.normalize_advantages:
            advantages = losses.standardize(advantages, distributed.merge_moments(moments))
        self._batch.advantages.copy_(advantages.flatten())
        self._batch.value_targets.copy_(self._normalized(targets).flatten())

    def _normalized(self, values: Tensor) -> Tensor:
        return values if self.value_normalizer is None else self.value_normalizer.normalize(values)

    @torch.no_grad()
    def _evaluate_rollout(self) -> None:
        """The rollout's values by the present critic, in units of the reward."""
        rollout = self._rollout
        values = self.policy.value(rollout.observations, rollout.core_state[0], rollout.valid)
        rollout.values.copy_(values if self.value_normalizer is None else self.value_normalizer.denormalize(values))

    def _forward(self, number: int) -> None:
        epoch, part = divmod(number, self.config.num_minibatches)
        rows = self._batch.rows_of(self._orders[epoch].tensor_split(self.config.num_minibatches)[part])
        count = self._counts[epoch, part]
        self._step = _Step(*self._solve(self._batch, rows, count), count)

    def _backward(self) -> None:
        loss, report, num_valid = self._step
        self._gradient, report = self.optimizer.gradient(loss, report)
        # an autograd graph that lives on ties the parameters to this call's stream, which a capture could not leave
        self._step = _Step(loss.detach(), report, num_valid)

    def _apply_or_withhold(self) -> None:
        """Step the optimizer unless the minibatch is to be withheld: then parameters, moments and step count stay bit
        for bit."""
        self.optimizer.step(self._gradient, self._step.report, self._step.num_valid, self._totals)
        self.policy.clamp_log_std_()

    def _sum_up(self) -> None:
        skipped, stopped, reported = self._totals[:COUNTS].unbind()
        means = self._totals[COUNTS:] / reported.clamp(min=1.0)
        others = torch.stack([skipped, stopped, self.learning_rate, self._explained_variance])
        self._results.copy_(torch.cat([means, others]))

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
        for step in self._steps:
            step.reset()


def _split(minibatches: int, config: PPOConfig) -> list[range]:
    """The numbers of an update's minibatches, in the stretches between which credit is assigned anew."""
    sizes = {"rollout": minibatches, "epoch": config.num_minibatches, "minibatch": 1}
    size = sizes[config.recompute_advantages]
    return [range(start, start + size) for start in range(0, minibatches, size)]
