"""Losses of ``[batch]`` tensors: the formulas of `kernels.torch_loss`, for any distribution and over all ranks.

Rows that are not ``valid`` are *selected* away before any arithmetic, so that whatever they hold (a NaN too) reaches
neither the loss nor a gradient. Sums are divided by ``count``, the number of valid rows, which over several ranks is
the global one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import torch_loss
from kernels.torch_loss import standardize
from trainer import distributed

__all__ = [
    "SurrogateLoss",
    "clipped_surrogate",
    "entropy_bonus",
    "explained_variance",
    "masked_mean",
    "select",
    "standardize",
    "value_loss",
]


class SurrogateLoss(NamedTuple):
    """PPO's policy loss and what it says of the step."""

    loss: Tensor  #: scalar
    approx_kl: Tensor  #: scalar, not negative: mean of ``(ratio - 1) - log ratio``
    clip_fraction: Tensor  #: scalar: the share of rows whose ratio left ``[1 - clip, 1 + clip]``


def _check_batch(**tensors: Tensor) -> None:
    # a [n] against a [n, 1] would broadcast to [n, n] and still give a scalar
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected [batch] like {first_name} {tuple(first.shape)}"
            )


def select(values: Tensor, valid: Tensor) -> Tensor:
    """``values`` where valid, else 0; the gradient of the others is exactly 0."""
    return torch.where(valid, values, 0.0)


def masked_mean(values: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``sum of valid values / count``; 0 where ``count`` is 0."""
    return select(values, valid).sum() / count.clamp(min=1.0)


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    count: Tensor,
    clip_range: Tensor,
) -> SurrogateLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated.

    ``ratio = exp(log_prob - old_log_prob)``; ``loss = -mean(min(ratio * A, clip(ratio, 1 - c, 1 + c) * A))``. The KL
    is the non-negative estimator k3 (Schulman, "Approximating KL divergence", 2020).

    Args:
        log_probs: ``[batch]``, of the present policy, with gradient.
        old_log_probs: ``[batch]``, of the behaviour policy.
        advantages: ``[batch]``, normalized or not.
        valid: ``[batch]`` bool.
        count: scalar tensor, what the sum is divided by.
        clip_range: c, a scalar tensor.

    Raises:
        ValueError: a tensor is not ``[batch]``.
    """
    _check_batch(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, valid=valid)
    log_ratio = select(log_probs - old_log_probs, valid)
    rows = torch_loss.clipped_surrogate(log_ratio, select(advantages, valid), clip_range)
    loss, approx_kl, clip_fraction = (masked_mean(x, valid, count) for x in rows)
    return SurrogateLoss(loss, approx_kl.detach(), clip_fraction)


def value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, valid: Tensor, count: Tensor, clip_range: float | None
) -> Tensor:
    """Half the mean squared error, clipped around the old values if a range is given.

    ``0.5 * mean(max((v - R)^2, (old + clip(v - old, -c, c) - R)^2))``; the 0.5 is inside.

    Args:
        values: ``[batch]``, of the present critic, with gradient.
        old_values: ``[batch]``, as they were when the rollout was collected.
        targets: ``[batch]``, R.
        valid: ``[batch]`` bool.
        count: scalar tensor, what the sum is divided by.
        clip_range: c, or None for the plain squared error.

    Raises:
        ValueError: a tensor is not ``[batch]``.
    """
    _check_batch(values=values, old_values=old_values, targets=targets, valid=valid)
    values, targets, old_values = (select(x, valid) for x in (values, targets, old_values))
    errors = torch_loss.squared_errors(values, targets, old_values, clip_range)
    return 0.5 * masked_mean(errors, valid, count)


def entropy_bonus(entropies: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Mean entropy of the valid rows; a loss subtracts it."""
    _check_batch(entropies=entropies, valid=valid)
    return masked_mean(entropies, valid, count)


def explained_variance(values: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """``1 - Var[target - value] / Var[target]`` over the valid rows of all ranks; 0 where the targets do not vary.

    Args:
        values, targets: floating point, of one shape.
        valid: bool, of the same.
    """
    return torch_loss.explained_variance(values, targets, valid, distributed.merge_moments)
