"""The two policy losses in float64, row by row from the papers: for tests, slow.

Rows that do not count are dropped instead of masked, and every minimum is written as its cases; gradients are those
that autograd finds of these few lines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_probs_and_entropies(outputs: Tensor, actions: Tensor, log_std: Tensor | None) -> tuple[Tensor, Tensor]:
    """``[B]`` each: of independent normal distributions, or of a softmax where there is no ``log_std``."""
    if log_std is not None:
        variance = (2.0 * log_std).exp()
        densities = (-((actions - outputs) ** 2) / (2.0 * variance)).exp() / (2.0 * math.pi * variance).sqrt()
        entropy = 0.5 * (2.0 * math.pi * math.e * variance).log().sum()
        return densities.log().sum(1), entropy.expand(len(outputs))
    normalizers = outputs.logsumexp(1)
    taken = outputs[torch.arange(len(outputs)), actions] - normalizers
    return taken, torch.special.entr((outputs - normalizers[:, None]).exp()).sum(1)


def ppo_rows(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_range: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Schulman et al. 2017, figure 1 and equation 7: loss of each row, its KL estimate, whether it left the range."""
    ratio = (log_probs - old_log_probs).exp()
    best = torch.where(advantages >= 0, ratio.clamp(max=1.0 + clip_range), ratio.clamp(min=1.0 - clip_range))
    left = (ratio > 1.0 + clip_range) | (ratio < 1.0 - clip_range)
    return -best * advantages, ratio - 1.0 - ratio.log(), left.double()


def value_rows(values: Tensor, targets: Tensor, old_values: Tensor | None, clip_range: float | None) -> Tensor:
    """Half the squared error of each row, the larger of the plain and the clipped one."""
    plain = 0.5 * (values - targets) ** 2
    if clip_range is None or old_values is None:
        return plain
    edge = old_values + clip_range * (values - old_values).sign()
    clipped = 0.5 * (edge.detach() - targets) ** 2
    return torch.where(((values - old_values).abs() > clip_range) & (clipped > plain), clipped, plain)


def policy_loss(
    policy_outputs: Tensor,
    values: Tensor,
    actions: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    value_targets: Tensor,
    old_values: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    log_std: Tensor | None = None,
    indices: Tensor | None = None,
    count: float | None = None,
    advantage_moments: Tensor | None = None,
    clip_range: float = 0.0,
    value_clip_range: float | None = None,
    value_coef: float,
    entropy_coef: float,
) -> dict[str, Tensor]:
    """What `kernels.ppo_loss` reports, in float64; without ``old_log_probs`` what `kernels.vtrace_loss` does."""
    rows = torch.arange(len(values)) if indices is None else indices.cpu().long()
    kept = torch.ones(len(rows), dtype=torch.bool) if valid is None else valid.cpu()[rows] != 0

    def field(x: Tensor) -> Tensor:
        return x.cpu()[rows][kept].double()

    advantages = field(advantages)
    if advantage_moments is not None:
        n, mean, m2 = advantage_moments.cpu().double()
        std = (m2 / n).sqrt()
        advantages = (advantages - mean) / (std + 1e-8) if std > 1e-6 * mean.abs() else torch.zeros_like(advantages)
    taken = field(actions) if log_std is not None else field(actions).long()
    log_std = None if log_std is None else log_std.cpu().double()
    log_probs, entropies = log_probs_and_entropies(policy_outputs.cpu()[kept].double(), taken, log_std)
    if old_log_probs is None:
        policy, kl, left = -advantages * log_probs, torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    else:
        policy, kl, left = ppo_rows(log_probs, field(old_log_probs), advantages, clip_range)
    targets, kept_values = field(value_targets), values.cpu()[kept].double()
    old = None if old_values is None else field(old_values)
    n = max(float(kept.sum()) if count is None else count, 1.0)
    sums = {
        "approx_kl": kl.sum() / n,
        "clip_fraction": left.sum() / n,
        "policy": policy.sum() / n,
        "value": value_rows(kept_values, targets, old, value_clip_range).sum() / n,
        "entropy": entropies.sum() / n,
    }
    total = sums["policy"] + value_coef * sums["value"] - entropy_coef * sums["entropy"]
    explained = 1.0 - (targets - kept_values).var(correction=0) / targets.var(correction=0)
    return {**sums, "total": total, "explained_variance": explained, "row_count": torch.tensor(n)}
