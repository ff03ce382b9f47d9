"""The few places where ranks must agree; with one process every function is the identity.

One process per GPU, started by ``torchrun``. Nothing here knows an algorithm.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def initialize(device_name: str) -> None:
    """Join the process group that ``torchrun`` describes in the environment; nothing without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend = "gloo" if device_name == "cpu" or not torch.cuda.is_available() else "nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10))


def shutdown() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """This process's number on its own host: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_(tensor: Tensor) -> Tensor:
    """Sum a tensor over ranks, in place; returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def sum_numbers(numbers: Sequence[float], device: torch.device) -> Sequence[float]:
    """Sum numbers of the host over ranks, by way of the device; exact up to 2^53."""
    if world_size() == 1:
        return numbers
    return sum_(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()


def sum_gradients_(parameters: Iterable[torch.nn.Parameter], report: Tensor) -> None:
    """Sum gradients, and what is reported beside them, over ranks, in place, in one message."""
    if world_size() == 1:
        return
    tensors = [*(p.grad for p in parameters if p.grad is not None), report]
    flat = sum_(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def broadcast_parameters_(parameters: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values, in place."""
    if world_size() > 1:
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if it is true on one; the way ranks agree to stop."""
    return sum_numbers([float(flag)], device)[0] > 0


def merge_moments(moments: Tensor) -> Tensor:
    """Merge ``(count, mean, M2)`` over ranks.

    ``count = sum n``, ``mean = sum n*mean / count``, ``M2 = sum M2 + sum n*(mean_r - mean)^2`` (Chan et al. 1979).

    Args:
        moments: ``[3, ...]``, this rank's count, mean and sum of squared deviations.

    Returns:
        The same of the union over ranks, float64 where there is more than one.
    """
    if world_size() == 1:
        return moments
    local_count, local_mean, local_m2 = moments.double().unbind(0)
    sums = sum_(torch.stack([local_count, local_count * local_mean]))
    mean = sums[1] / sums[0].clamp(min=1.0)
    m2 = sum_(local_m2 + local_count * (local_mean - mean).square())
    return torch.stack([sums[0], mean, m2])
