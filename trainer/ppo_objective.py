"""PPO's objective on one minibatch of a flat batch: in torch for any policy, or fused into one kernel call."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels import ppo_loss
from kernels.gather import gather_rows
from kernels.operations import Backend
from trainer import losses
from trainer.config import PPOConfig
from trainer.minibatches import sums_of_parts
from trainer.policy import ActorCritic, Outputs
from trainer.rollout import Rollout

#: What an objective reports, in this order; each sums over ranks.
REPORTED = ("loss/approx_kl", "loss/clip_fraction", "loss/total", "loss/policy", "loss/value", "loss/entropy")


class Batch(NamedTuple):
    """A rollout as ``[rows]`` tensors that stay where they are; what it shares with the rollout is viewed."""

    observations: Tensor  #: ``[rows, *observation_shape]``
    actions: Tensor  #: ``[rows, *action_shape]``
    log_probs: Tensor  #: ``[rows]``, of the behaviour policy
    valid: Tensor  #: ``[rows]`` bool
    values: Tensor  #: ``[rows]``, of the critic that collected, in the present critic's units
    advantages: Tensor  #: ``[rows]``, normalized
    value_targets: Tensor  #: ``[rows]``, in the critic's units
    core_state: Tensor  #: ``[envs, state_size]``, the memory that enters row 0 of each env

    @classmethod
    def of(cls, rollout: Rollout) -> Batch:
        """Views of the rollout's fields, and memory for what credit assignment gives."""

        def flat(tensor: Tensor) -> Tensor:
            return tensor.view(-1, *tensor.shape[2:])

        shared = (rollout.observations[:-1], rollout.actions, rollout.log_probs, rollout.valid)
        assigned = torch.zeros(3, rollout.rewards.numel(), device=rollout.rewards.device)
        return cls(*map(flat, shared), *assigned.unbind(), core_state=rollout.core_state[0])

    @property
    def is_sequential(self) -> bool:
        """Whether the rows of an env must be evaluated in their order."""
        return self.core_state.shape[1] > 0

    @property
    def num_units(self) -> int:
        """Parts that a minibatch may be made of: rows or, where they are sequential, envs."""
        return len(self.core_state if self.is_sequential else self.valid)

    def counts_of(self, orders: Tensor, parts: int) -> Tensor:
        """``[epochs, parts]`` float32: valid rows of each part, where every row of ``orders`` ``[epochs, units]`` is
        split into so many."""
        valid = self.valid.view(-1, self.num_units).sum(0) if self.is_sequential else self.valid
        return sums_of_parts(valid, orders, parts)

    def rows_of(self, units: Tensor) -> Tensor:
        """The rows of these units, time first: row 0 of all its envs begins a minibatch."""
        if not self.is_sequential:
            return units
        starts = torch.arange(0, len(self.valid), len(self.core_state), device=units.device)
        return (starts[:, None] + units).flatten()


class Objective:
    """``policy loss + value_coef * value loss - entropy_coef * entropy`` over the valid rows of a minibatch.

    Args:
        policy: whose parameters the gradient is of.
        config: coefficients. Clip range and entropy coefficient become tensors, which replayed graphs read anew.
        backend: ``triton``, one fused kernel call (`kernels.ppo_loss`), or ``torch`` (`trainer.losses`).
    """

    def __init__(self, policy: ActorCritic, config: PPOConfig, backend: Literal["torch", "triton"]):
        self._policy, self._config = policy, config
        device = next(policy.parameters()).device
        self.clip_range = torch.tensor(config.clip_range, device=device)
        self.entropy_coef = torch.tensor(config.entropy_coef, device=device)
        self._solve = self._fused if backend == "triton" else self._in_torch

    def __call__(self, batch: Batch, indices: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The scalar to descend and, without gradient, ``[len(REPORTED)]``: this rank's share of what is reported.

        Args:
            batch: the whole rollout.
            indices: ``[minibatch]`` int64, rows of the batch, as `Batch.rows_of` orders them.
            count: scalar, what sums are divided by: valid rows of the minibatch, over all ranks.
        """
        return self._solve(batch, indices, count)

    def _in_torch(self, batch: Batch, indices: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        log_probs, values, advantages, targets, valid = (
            tensor.index_select(0, indices)
            for tensor in (batch.log_probs, batch.values, batch.advantages, batch.value_targets, batch.valid)
        )
        actions = self._policy.head.flat(gather_rows(batch.actions, indices, batch.valid, backend="torch"))
        present = self._outputs(batch, indices, "torch")
        distribution = self._policy.head.distribution(present.policy_outputs, present.log_std)
        surrogate = losses.clipped_surrogate(
            distribution.log_prob(actions), log_probs, advantages, valid, count, self.clip_range
        )
        value = losses.value_loss(present.values, values, targets, valid, count, config.value_clip_range)
        entropy = losses.entropy_bonus(distribution.entropy(), valid, count)
        total = surrogate.loss + config.value_coef * value - self.entropy_coef * entropy
        report = [surrogate.approx_kl, surrogate.clip_fraction, total, surrogate.loss, value, entropy]
        return total, torch.stack(report).detach()

    def _fused(self, batch: Batch, indices: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        config, present = self._config, self._outputs(batch, indices, "triton")
        loss = ppo_loss(
            present.policy_outputs, present.values, self._policy.head.flat(batch.actions), batch.log_probs,
            batch.advantages, batch.value_targets, batch.values, batch.valid,
            log_std=present.log_std, indices=indices, count=count, clip_range=self.clip_range,
            value_clip_range=config.value_clip_range, value_coef=config.value_coef, entropy_coef=self.entropy_coef,
            backend="triton",
        )  # fmt: skip
        return loss.total, loss.report[: len(REPORTED)]

    def _outputs(self, batch: Batch, indices: Tensor, backend: Backend) -> Outputs:
        """What the present policy says of a minibatch's rows."""
        # a selected-away loss still has a gradient, and 0 times a NaN input is NaN
        observations = gather_rows(batch.observations, indices, batch.valid, backend=backend)
        if not batch.is_sequential:
            return self._policy.outputs(observations)
        envs = len(indices) * len(batch.core_state) // len(batch.valid)
        state = batch.core_state.index_select(0, indices[:envs])  # in row 0 an env's row is its number
        valid = batch.valid.index_select(0, indices).view(-1, envs)
        window = self._policy.outputs(observations.view(-1, envs, *observations.shape[1:]), state, valid)
        return window._replace(policy_outputs=window.policy_outputs.flatten(0, 1), values=window.values.flatten(0, 1))
