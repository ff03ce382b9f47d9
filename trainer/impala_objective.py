"""IMPALA's objective on one minibatch of windows: in torch for any policy, or fused into one kernel call."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels import ppo_loss
from trainer import losses
from trainer.config import ImpalaConfig
from trainer.distributions import ActionHead
from trainer.off_policy import Present, Window

#: Beyond it a ratio is cut: it means nothing any more, and infinity times an advantage of 0 would be NaN.
_MAX_LOG_RATIO = 20.0
#: What an objective reports, in this order; each sums over ranks.
REPORTED = ("loss/approx_kl", "loss/clip_fraction", "loss/total", "loss/policy", "loss/value", "loss/entropy")


class Learned(NamedTuple):
    """What credit assignment gave, ``[T, n]``: constants of all minibatches."""

    log_probs: Tensor  #: of the policy that credit was assigned by
    advantages: Tensor  #: normalized, if they are to be
    targets: Tensor  #: in the critic's units

    def narrow(self, columns: Tensor | slice) -> Learned:
        """Some envs."""
        return Learned(*(tensor[:, columns] for tensor in self))


class Objective:
    """``policy loss + value_coef * value loss - entropy_coef * entropy`` over the valid rows of a minibatch.

    The policy loss is PPO's clipped surrogate around the policy that credit was assigned by. In the first minibatch the
    ratio is 1, and the gradient ``-mean(A * grad log pi)``: IMPALA's own.

    Args:
        head: how the policy's outputs become a distribution.
        config: coefficients.
        device: of the policy.
        backend: ``triton``, one fused kernel call (`kernels.ppo_loss`), or ``torch`` (`trainer.losses`).
    """

    def __init__(
        self, head: ActionHead, config: ImpalaConfig, device: torch.device, backend: Literal["torch", "triton"]
    ):
        self._head, self._config = head, config
        self._clip_range = torch.tensor(config.clip_range, device=device)
        self._solve = self._fused if backend == "triton" else self._in_torch

    def __call__(self, window: Window, present: Present, learned: Learned, count: Tensor) -> tuple[Tensor, Tensor]:
        """The scalar to descend and, without gradient, ``[len(REPORTED)]``: this rank's share of what is reported.

        Args:
            window: ``[T, n]``.
            present: the present policy's evaluation of it, with gradients.
            learned: its credit.
            count: scalar, what sums are divided by: valid rows of the minibatch, over all ranks.
        """
        reference = torch.maximum(learned.log_probs, present.log_probs - _MAX_LOG_RATIO)
        loss, report = self._solve(window, present, learned._replace(log_probs=reference), count)
        # of the logarithm: the ratio may exceed float32 after a long lag, and does no harm where it is clipped
        log_ratio = losses.select(present.log_probs - window.log_probs, window.valid)
        lag_kl = losses.masked_mean(0.5 * log_ratio.square(), window.valid, count)
        return loss, torch.cat([lag_kl[None], report.detach()])

    def _in_torch(self, window: Window, present: Present, learned: Learned, count: Tensor) -> tuple[Tensor, Tensor]:
        config, valid = self._config, window.valid.flatten()
        distribution = self._head.distribution(present.policy_outputs, present.log_std)
        log_probs = distribution.log_prob(self._head.flat(window.actions)).flatten()
        surrogate = losses.clipped_surrogate(
            log_probs, learned.log_probs.flatten(), learned.advantages.flatten(), valid, count, self._clip_range
        )
        predictions = present.predictions.flatten()
        value = losses.value_loss(predictions, predictions, learned.targets.flatten(), valid, count, clip_range=None)
        entropy = losses.entropy_bonus(distribution.entropy().flatten(), valid, count)
        total = surrogate.loss + config.value_coef * value - config.entropy_coef * entropy
        return total, torch.stack([surrogate.clip_fraction, total, surrogate.loss, value, entropy])

    def _fused(self, window: Window, present: Present, learned: Learned, count: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        rows = (self._head.flat(window.actions), *learned)
        loss = ppo_loss(
            present.policy_outputs.flatten(0, 1), present.predictions.flatten(),
            *(tensor.flatten(0, 1) for tensor in rows), valid=window.valid.flatten(), log_std=present.log_std,
            count=count, clip_range=self._clip_range, value_coef=config.value_coef, entropy_coef=config.entropy_coef,
            backend="triton",
        )  # fmt: skip
        return loss.total, loss.report[1:6]
