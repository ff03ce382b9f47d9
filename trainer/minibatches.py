"""Minibatches: an update's rows, or whole windows of envs, in some order, split into parts of nearly equal size."""

from __future__ import annotations

import torch
from torch import Tensor


def sums_of_parts(values: Tensor, orders: Tensor, parts: int) -> Tensor:
    """The sum of ``values`` over each minibatch.

    Args:
        values: ``[units]``, of each row or window: how many of its rows are valid.
        orders: ``[epochs, units]`` int64, a permutation per epoch.
        parts: minibatches per epoch, cut as `Tensor.tensor_split` cuts.

    Returns:
        ``[epochs, parts]`` float32.
    """
    size, longer = divmod(orders.shape[1], parts)
    halves = values[orders].split([longer * (size + 1), (parts - longer) * size], dim=1)
    shapes = (longer, size + 1), (parts - longer, size)
    sums = [half.unflatten(1, shape).sum(2) for half, shape in zip(halves, shapes, strict=True)]
    return torch.cat(sums, dim=1).float()
