"""Tensors that lie so far apart that their offsets take 64 bits."""

from __future__ import annotations

from torch import Tensor


def spread(x: Tensor, axis: int, distance: int) -> Tensor:
    """The same values, ``distance`` elements apart along one axis; memory in between is never touched."""
    strides = [distance if i == axis % x.dim() else stride for i, stride in enumerate(x.stride())]
    memory = x.new_empty((x.shape[axis] - 1) * distance + x.numel())
    return memory.as_strided(x.shape, strides).copy_(x)
