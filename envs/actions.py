"""Actions: what a policy may send, checked before an engine reads it, and how raw actions reach the engine's bounds."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray
from torch import Tensor

from envs.base import EnvError


def check_layout(actions: Tensor, space: Space, num_envs: int) -> None:
    """Refuse ``actions`` that are not ``[num_envs, *space.shape]`` float32, or int64 for ``Discrete``; reads no value.

    Raises:
        EnvError: wrong shape or dtype.
    """
    shape = (num_envs, *(space.shape or ()))
    dtype = torch.int64 if isinstance(space, Discrete) else torch.float32
    if tuple(actions.shape) != shape or actions.dtype != dtype:
        got = f"{list(actions.shape)} {actions.dtype}"
        raise EnvError(f"actions are {got}: expected {list(shape)} {dtype} for {space}")


def check_values(actions: NDArray, space: Space, first_env: int) -> None:
    """Refuse host ``actions`` with a value that is not finite, or not in a ``Discrete`` space; row 0 is ``first_env``.

    Raises:
        EnvError: names the first such env and its action.
    """
    if isinstance(space, Discrete):
        legal = (actions >= space.start) & (actions < space.start + space.n)
        rule = f"it must be in {space.start} .. {space.start + space.n - 1}"
    else:
        legal = np.isfinite(actions)
        rule = "every value must be finite"
    if not legal.all():
        row = int(np.argmin(legal.reshape(len(actions), -1).all(axis=1)))
        value = np.array2string(actions[row], separator=", ", precision=4, threshold=6)
        raise EnvError(f"env {first_env + row} got action {value}: {rule}")
