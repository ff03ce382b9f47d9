"""Rows of the float64 reference: the window's flags, the runs that one trace spans, and values of successors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Window(NamedTuple):
    """The flags of a window, ``[T, N]``, and the discount of each env, ``[N]``."""

    terminated: Flags
    truncated: Flags
    valid: Flags
    gammas: Array

    def runs(self) -> Iterator[tuple[int, slice]]:
        """The rows that one trace spans, as (env, rows): up to a done row, the row before filler, or the last row."""
        length, num_envs = self.valid.shape
        for env in range(num_envs):
            start = 0
            for t in range(length):
                if not self.valid[t, env]:
                    start = t + 1
                elif self.terminated[t, env] or self.truncated[t, env] or t + 1 == length or not self.valid[t + 1, env]:
                    yield env, slice(start, t + 1)
                    start = t + 1


def window_of(
    like: Tensor, terminated: Tensor, truncated: Tensor | None, valid: Tensor | None, gamma: float | Tensor
) -> Window:
    """The window whose rows ``like`` ``[T, N, ...]`` has: no flags is none truncated and all valid."""
    shape, num_envs = tuple(like.shape[:2]), like.shape[1]
    return Window(
        flags_of(terminated, shape),
        np.zeros(shape, np.bool_) if truncated is None else flags_of(truncated, shape),
        np.ones(shape, np.bool_) if valid is None else flags_of(valid, shape),
        float64(gamma) if isinstance(gamma, Tensor) else np.full(num_envs, gamma),
    )


def flags_of(flags: Tensor, shape: tuple[int, ...]) -> Flags:
    """Flags as bool, any nonzero is true."""
    return (flags.detach().cpu() != 0).numpy().reshape(shape)


def float64(x: Tensor) -> Array:
    """A tensor's values, without its gradient."""
    return x.detach().cpu().double().numpy()


def successors_of(window: Window, values: Tensor, last_value: Tensor, next_values: Tensor | None) -> Array:
    """V of each row's true successor, 0 after termination."""
    if next_values is None:
        next_values = torch.cat([values, last_value.unsqueeze(0)])[1:]
    return np.where(window.terminated, 0.0, float64(next_values))
