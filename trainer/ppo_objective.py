"""PPO's objective on one minibatch of a flat batch: in torch for any policy, or fused into one kernel call."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels import ppo_loss
from trainer import losses
from trainer.config import PPOConfig
from trainer.policy import ActorCritic
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

    @classmethod
    def of(cls, rollout: Rollout) -> Batch:
        """Views of the rollout's fields, and memory for what credit assignment gives."""

        def flat(tensor: Tensor) -> Tensor:
            return tensor.view(-1, *tensor.shape[2:])

        shared = (rollout.observations[:-1], rollout.actions, rollout.log_probs, rollout.valid)
        assigned = torch.zeros(3, rollout.rewards.numel(), device=rollout.rewards.device)
        return cls(*map(flat, shared), *assigned.unbind())


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

    def __call__(self, batch: Batch, indices: Tensor, valid: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The scalar to descend and, without gradient, ``[len(REPORTED)]``: this rank's share of what is reported.

        Args:
            batch: the whole rollout.
            indices: ``[minibatch]`` int64, rows of the batch.
            valid: ``[minibatch]`` bool, their flags.
            count: scalar, what sums are divided by: valid rows of the minibatch, over all ranks.
        """
        # a selected-away loss still has a gradient, and 0 times a NaN input is NaN
        observations = _cleared(batch.observations.index_select(0, indices), valid)
        return self._solve(batch, observations, indices, valid, count)

    def _in_torch(
        self, batch: Batch, observations: Tensor, indices: Tensor, valid: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        config = self._config
        log_probs, values, advantages, targets = (
            tensor.index_select(0, indices)
            for tensor in (batch.log_probs, batch.values, batch.advantages, batch.value_targets)
        )
        present = self._policy.evaluate(observations, _cleared(batch.actions.index_select(0, indices), valid))
        surrogate = losses.clipped_surrogate(present.log_probs, log_probs, advantages, valid, count, self.clip_range)
        value = losses.value_loss(present.values, values, targets, valid, count, config.value_clip_range)
        entropy = losses.entropy_bonus(present.entropies, valid, count)
        total = surrogate.loss + config.value_coef * value - self.entropy_coef * entropy
        report = [surrogate.approx_kl, surrogate.clip_fraction, total, surrogate.loss, value, entropy]
        return total, torch.stack(report).detach()

    def _fused(
        self, batch: Batch, observations: Tensor, indices: Tensor, valid: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        config, present = self._config, self._policy.outputs(observations)
        loss = ppo_loss(
            present.policy_outputs, present.values, self._policy.head.flat(batch.actions), batch.log_probs,
            batch.advantages, batch.value_targets, batch.values, batch.valid,
            log_std=present.log_std, indices=indices, count=count, clip_range=self.clip_range,
            value_clip_range=config.value_clip_range, value_coef=config.value_coef, entropy_coef=self.entropy_coef,
            backend="triton",
        )  # fmt: skip
        return loss.total, loss.report[: len(REPORTED)]


def _cleared(rows: Tensor, valid: Tensor) -> Tensor:
    """Zero what a network or a distribution reads of filler rows, in place."""
    return rows.masked_fill_(~valid.view(-1, *(1,) * (rows.dim() - 1)), 0)
