"""The two policy losses in plain torch, differentiable; `torch.compile` fuses what it likes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.loss_inputs import HALF_LOG_2PI, Coefficients, LossInputs, Scalar
from kernels.torch_rows import taken


class _Rows(NamedTuple):
    """The B rows of one loss, all in the dtype of the sums; what is not valid is 0."""

    valid: Tensor
    outputs: Tensor
    values: Tensor
    actions: Tensor
    advantages: Tensor
    value_targets: Tensor
    old_log_probs: Tensor | None
    old_values: Tensor | None


def policy_loss(inputs: LossInputs, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The scalar to descend and the ``[8]`` report; arguments are those of `kernels.ppo_loss` and `vtrace_loss`."""
    dtype = torch.float64 if inputs.policy_outputs.dtype == torch.float64 else torch.float32
    rows = _rows(inputs, dtype)
    count = rows.valid.sum(dtype=dtype) if inputs.row_count is None else inputs.row_count.to(dtype)

    def mean(x: Tensor) -> Tensor:
        return _select(x, rows.valid).sum() / count.clamp(min=1.0)

    if inputs.log_std is None:
        log_probs, entropies = taken(rows.outputs.log_softmax(-1), rows.actions), categorical_entropy(rows.outputs)
    else:
        log_std = inputs.log_std.to(dtype)
        log_probs, entropies = gaussian_log_prob(rows.outputs, log_std, rows.actions), gaussian_entropy(log_std)
    if rows.old_log_probs is None:
        policy = -_select(log_probs, rows.valid) * rows.advantages
        kl = clipped = torch.zeros_like(policy)
    else:
        log_ratio = _select(log_probs - rows.old_log_probs, rows.valid)
        policy, kl, clipped = clipped_surrogate(log_ratio, rows.advantages, coefficients.clip_range)
    errors = squared_errors(rows.values, rows.value_targets, rows.old_values, coefficients.value_clip_range)

    policy_loss, value_loss, entropy = mean(policy), 0.5 * mean(errors), mean(entropies)
    total = policy_loss + coefficients.value_coef * value_loss - coefficients.entropy_coef * entropy
    explained = explained_variance(rows.values, rows.value_targets, rows.valid)
    report = (mean(kl), mean(clipped), total, policy_loss, value_loss, entropy, explained, count)
    return total, torch.stack([x.detach() for x in report])


def _select(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid if x.dim() < 2 else valid[:, None], x, 0)


def _clamp(x: Tensor, low: Any, high: Any) -> Tensor:
    return x.clamp(low, high)  # numbers or tensors


def _rows(inputs: LossInputs, dtype: torch.dtype) -> _Rows:
    def take(x: Tensor) -> Tensor:
        return x.detach() if inputs.indices is None else x.detach().index_select(0, inputs.indices)

    valid = (
        torch.ones_like(inputs.state_values, dtype=torch.bool) if inputs.valid is None else take(inputs.valid).bool()
    )

    def field(x: Tensor) -> Tensor:
        return _select(take(x).to(dtype), valid)

    advantages = take(inputs.advantages).to(dtype)
    if inputs.advantage_moments is not None:
        advantages = standardize(advantages, inputs.advantage_moments)
    return _Rows(
        valid,
        _select(inputs.policy_outputs.to(dtype), valid),
        _select(inputs.state_values.to(dtype), valid),
        _select(take(inputs.actions), valid),
        _select(advantages, valid),
        field(inputs.value_targets),
        None if inputs.old_log_probs is None else field(inputs.old_log_probs),
        None if inputs.old_values is None else field(inputs.old_values),
    )


def _is_constant(std: Tensor, mean: Tensor) -> Tensor:
    # float32 sums over equal numbers leave a spread of a few roundings of their mean
    return std <= 1e-6 * mean.abs()


def standardize(advantages: Tensor, moments: Tensor) -> Tensor:
    """``(A - mean) / std`` with the population standard deviation; 0 where the advantages do not vary.

    Args:
        advantages: any shape, floating point; the result's dtype.
        moments: ``[3]``: count, mean and sum of squared deviations (M2) of the advantages that count.
    """
    count, mean, m2 = moments.to(advantages.dtype).unbind()
    std = (m2 / count.clamp(min=1.0)).sqrt()
    # a NaN is not constant: it goes on, to be seen
    return torch.where(_is_constant(std, mean), 0.0, (advantages - mean) / (std + 1e-8))


def gaussian_log_prob(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """``[*batch]`` log-densities of ``actions`` ``[*batch, A]`` under independent normal distributions."""
    standardized = (actions - mean) * (-log_std).exp()
    return (-0.5 * standardized.square() - log_std - HALF_LOG_2PI).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Scalar, the same in every row."""
    return (log_std + 0.5 + HALF_LOG_2PI).sum()


def categorical_entropy(logits: Tensor) -> Tensor:
    """``[*batch]``: ``-sum_a p log p``; an action of probability 0 contributes 0."""
    log_probs = logits.log_softmax(-1)
    # a probability of 0 meets a finite number: 0 * -inf would be NaN, here or in the gradient
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: Scalar) -> tuple[Tensor, Tensor, Tensor]:
    """Negated surrogate, KL estimate k3 and whether the ratio left the range, ``[B]``."""
    ratio = log_ratio.exp()
    clipped = _clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    # expm1 keeps the difference where the ratio is close to 1
    kl = torch.expm1(log_ratio) - log_ratio
    return policy, kl, ((ratio - 1.0).abs() > clip_range).to(ratio.dtype)


def squared_errors(values: Tensor, targets: Tensor, old_values: Tensor | None, clip_range: Scalar | None) -> Tensor:
    """``(v - R)^2``, with a range the larger of it and ``(old + clip(v - old, -c, c) - R)^2``, ``[B]``."""
    errors = (values - targets).square()
    if clip_range is None or old_values is None:
        return errors
    clipped = old_values + _clamp(values - old_values, -clip_range, clip_range)
    return torch.maximum(errors, (clipped - targets).square())


def explained_variance(
    values: Tensor, targets: Tensor, valid: Tensor, merge: Callable[[Tensor], Tensor] = lambda moments: moments
) -> Tensor:
    """``1 - Var[target - value] / Var[target]`` over the valid rows; 0 where the targets do not vary.

    Args:
        values, targets: floating point, of one shape.
        valid: bool, of the same.
        merge: joins the moments of these rows with those of others: ``[3, 2]``, count, mean and sum of squared
            deviations (M2) of targets and residuals.
    """
    count = valid.sum()

    def moments(x: Tensor) -> Tensor:
        mean = torch.where(valid, x, 0).sum() / count.clamp(min=1)
        return torch.stack([count, mean, torch.where(valid, (x - mean).square(), 0).sum()])

    counts, mean, m2 = merge(torch.stack([moments(targets), moments(targets - values)], dim=1)).to(targets.dtype)
    variance, residual = (m2 / counts.clamp(min=1)).unbind()
    return torch.where(_is_constant(variance.sqrt(), mean[0]), 0.0, 1.0 - residual / variance)
