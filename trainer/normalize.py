"""Running normalizers of observations, rewards and values.

Statistics are Chan-merged float64 moments, so that neither large offsets nor counts beyond 2^24 lose anything. They
are frozen while a rollout is collected and updated: the policy that acted and the policy that is updated see the same
numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels import eligibility_traces
from kernels.operations import Backend
from trainer import distributed

_EPS = 1e-8


def moments(values: Tensor, valid: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of the rows that are valid and finite.

    Args:
        values: ``[rows, *shape]``, floating point or uint8.
        valid: ``[rows]`` bool.

    Returns:
        ``[3, *shape]`` float64. Two passes: the mean first, then deviations from it, so that there is no cancellation.
    """
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    mask = valid & torch.isfinite(rows).all(-1) if rows.is_floating_point() else valid
    count = mask.sum(dtype=torch.float64)
    selected = torch.where(mask[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
    mean = selected.sum(0, dtype=torch.float64) / count.clamp(min=1.0)
    # float64 also because the square of a finite float32 may not be finite
    m2 = torch.where(mask[:, None], rows.double() - mean, 0.0).square().sum(0)
    stacked = torch.stack([count.expand_as(mean), mean, m2])
    return stacked.view(3, *values.shape[1:])


class RunningMoments(nn.Module):
    """Count, mean and M2 of everything seen so far, float64, over all ranks.

    Merging ``(n, mean, M2)`` with a batch ``(m, mu, S)``: ``delta = mu - mean``, ``mean += delta * m / (n + m)``,
    ``M2 += S + delta^2 * n * m / (n + m)`` (Chan, Golub and LeVeque 1979).
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64, device=device))

    @torch.no_grad()
    def update(self, values: Tensor, valid: Tensor) -> None:
        """Merge the valid and finite rows of ``values`` ``[rows, *shape]`` into the statistics."""
        batch_count, batch_mean, batch_m2 = distributed.merge_moments(moments(values, valid)).unbind(0)
        batch_count = batch_count.flatten()[0]
        total = self.count + batch_count
        weight = batch_count / total.clamp(min=1.0)
        delta = batch_mean - self.mean
        self.m2 += batch_m2 + delta.square() * self.count * weight
        self.mean += delta * weight
        self.count.copy_(total)

    def variance(self) -> Tensor:
        """Population variance, ``M2 / count``; 1 before anything was seen."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp(min=1.0), 1.0)


class Scaling(NamedTuple):
    """What a normalizer subtracts and multiplies, ``[*shape]``, while its statistics are frozen."""

    mean: Tensor  #: float64
    rate: Tensor  #: float64, ``1 / std``
    high: Tensor  #: float32, the mean rounded
    low: Tensor  #: float32, what rounding the mean left: with mean 20000 and std 0.4 it would show
    rate32: Tensor  #: float32


class ObservationNormalizer(nn.Module):
    """``clip((observation - mean) / std, -clip, clip)``, float32; a constant column becomes exactly 0."""

    def __init__(self, shape: tuple[int, ...], clip: float, device: torch.device | None = None):
        super().__init__()
        self.running = RunningMoments(shape, device)
        self.clip = clip

    def scaling(self) -> Scaling:
        """The present statistics, as `forward` applies them."""
        mean, rate = self.running.mean, torch.rsqrt(self.running.variance() + _EPS)
        high = mean.float()
        return Scaling(mean, rate, high, (mean - high.double()).float(), rate.float())

    def forward(self, observations: Tensor, scaling: Scaling | None = None) -> Tensor:
        """Normalize ``[..., *shape]`` with the statistics as they are, or as they were in a `scaling`; updates
        nothing."""
        scaling = scaling or self.scaling()
        if observations.dtype == torch.float64:
            return ((observations - scaling.mean) * scaling.rate).clamp(-self.clip, self.clip).float()
        centred = (observations.float() - scaling.high) - scaling.low
        return (centred * scaling.rate32).clamp(-self.clip, self.clip)

    def update(self, observations: Tensor, valid: Tensor) -> None:
        """Learn from the valid rows of a rollout: ``[T, N, *shape]`` and ``[T, N]``."""
        self.running.update(observations.flatten(0, 1), valid.flatten())


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return.

    ``G[t] = r[t] + gamma * (1 - done[t-1]) * G[t-1]``, forward in time over windows: an eligibility trace with decay
    ``gamma``.
    """

    carry: Tensor
    previous_done: Tensor

    def __init__(self, num_envs: int, gamma: float, backend: Backend, device: torch.device):
        super().__init__()
        self.running = RunningMoments((), device)
        self.gamma = gamma
        self.backend: Backend = backend
        self.register_buffer("carry", torch.zeros(num_envs, device=device))
        self.register_buffer("previous_done", torch.zeros(num_envs, dtype=torch.bool, device=device))

    def forward(self, rewards: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor) -> Tensor:
        """Learn from a window's rewards ``[T, N]`` and return them scaled."""
        returns, carry = eligibility_traces(
            rewards,
            terminated,
            truncated,
            valid=valid,
            carry=self.carry,
            previous_done=self.previous_done,
            gamma=self.gamma,
            trace_lambda=1.0,
            backend=self.backend,
        )
        self.carry.copy_(carry)
        self.previous_done.copy_((terminated[-1] | truncated[-1]) & valid[-1])
        self.running.update(returns.flatten(), valid.flatten())
        return rewards * torch.rsqrt(self.running.variance() + _EPS).float()

    def restart(self) -> None:
        """Forget the returns that are under way: the envs start anew."""
        self.carry.zero_()
        self.previous_done.zero_()


class ValueNormalizer(nn.Module):
    """Lets the critic predict ``(V - mean) / std`` of its targets while the rest of the code sees V.

    When the statistics move, the critic's last layer is rescaled so that its predictions do not (PopArt, van Hasselt
    et al. 2016, arXiv 1602.07714, eq. 9): ``w' = w * std / std'``, ``b' = (std * b + mean - mean') / std'``.
    """

    def __init__(self, device: torch.device | None = None):
        super().__init__()
        self.running = RunningMoments((), device)

    def _scale(self) -> tuple[Tensor, Tensor]:
        return self.running.mean.float(), self.running.variance().clamp(min=1e-4).sqrt().float()

    def normalize(self, values: Tensor) -> Tensor:
        """From units of the reward to the critic's."""
        mean, std = self._scale()
        return (values - mean) / std

    def denormalize(self, values: Tensor) -> Tensor:
        """From the critic's units to those of the reward."""
        mean, std = self._scale()
        return values * std + mean

    @torch.no_grad()
    def update(self, targets: Tensor, valid: Tensor, head: nn.Linear) -> None:
        """Learn from value targets ``[T, N]`` and keep the predictions of ``head``, the critic's last layer, as they
        were."""
        old_mean, old_std = self._scale()
        self.running.update(targets.flatten(), valid.flatten())
        mean, std = self._scale()
        # written so that statistics which did not move change no bit
        head.weight.mul_(old_std / std)
        head.bias.mul_(old_std / std).add_((old_mean - mean) / std)
