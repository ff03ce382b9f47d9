"""Actions: what a policy may send, checked before an engine reads it, and how raw actions reach the engine's bounds."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray
from torch import Tensor

from envs.base import EnvError
from envs.observations import as_float32

MODES = ("clip", "rescale", "squash", "none")
_NARROWEST, _WIDEST = 1e-6, 1e6  # bounds outside are placeholders: EnvPool has 2e-308 .. 2e308 (VizDoom), +-1e10 (LQR)


class ActionMap:
    """Maps raw policy actions to the engine's; the log-probability that PPO stores is the raw action's.

    With ``l``, ``h`` the bounds of a dimension and ``a`` the raw action:

        clip      min(max(a, l), h)
        rescale   l + (h - l) (min(max(a, -1), 1) + 1) / 2
        squash    l + (h - l) (tanh(a) + 1) / 2
        none      a

    A dimension without usable bounds (not finite, ``l >= h``, or placeholders) passes unchanged, and `notice` says so.
    ``Discrete`` and ``MultiDiscrete`` take indices from 0 and add the space's ``start``. Bounds move to the actions'
    device at the first call, so a CUDA graph may capture later ones.

    Args:
        space: the env's single action space, ``Box``, ``Discrete`` or ``MultiDiscrete``.
        mode: ``clip``, ``rescale``, ``squash`` or ``none``; it matters to ``Box`` only.

    Raises:
        EnvError: unknown mode.
    """

    notice: str  #: one line on dimensions without usable bounds, or empty

    def __init__(self, space: Space, mode: str = "clip") -> None:
        if mode not in MODES:
            raise EnvError(f"env.action_map={mode} is unknown: {', '.join(MODES)}")
        self.notice = ""
        self._mode = mode
        indices = index_range(space)
        self._first = None if indices is None else torch.from_numpy(indices[0])
        self._counts_from_0 = indices is None or not indices[0].any()
        if isinstance(space, Box) and mode != "none":
            usable = _has_usable_bounds(space)
            if not usable.all():
                unusable = ", ".join(map(str, np.flatnonzero(~usable)))
                self.notice = f"env.action_map={mode}: action dimensions {unusable} have no usable bounds, passed as is"
            self._bounded = torch.from_numpy(usable)
            self._low, self._high = (
                torch.from_numpy(np.where(usable, bound, 0).astype(np.float32)) for bound in (space.low, space.high)
            )

    def __call__(self, actions: Tensor) -> Tensor:
        """Return the engine's actions for raw ``actions`` ``[n, *shape]`` as float32, or int64 if discrete."""
        if self._first is not None:
            if self._counts_from_0:
                return actions
            self._first = self._first.to(actions.device)
            return actions + self._first
        actions = actions.float()
        if self._mode == "none":
            return actions
        if self._low.device != actions.device:
            self._bounded, self._low, self._high = (
                bound.to(actions.device) for bound in (self._bounded, self._low, self._high)
            )
        return torch.where(self._bounded, self._into_bounds(actions), actions)

    def _into_bounds(self, actions: Tensor) -> Tensor:
        if self._mode == "clip":
            return torch.clamp(actions, self._low, self._high)
        unit = actions.tanh() if self._mode == "squash" else actions.clamp(-1, 1)
        return torch.lerp(self._low, self._high, (unit + 1) / 2)


def _has_usable_bounds(space: Box) -> NDArray:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray((high - low > _NARROWEST) & (np.maximum(abs(low), abs(high)) < _WIDEST))


def index_range(space: Space) -> tuple[NDArray, NDArray] | None:
    """First and last index of a discrete action, int64 of its shape; None where actions are continuous."""
    if isinstance(space, Discrete):
        first, count = np.array(space.start, np.int64), space.n
    elif isinstance(space, MultiDiscrete):
        first, count = space.start.astype(np.int64), space.nvec
    else:
        return None
    return first, first + count - 1


def float_actions(id: str, space: Space, indices: str) -> Box:
    """The ``Box`` of float actions in float32; ``indices`` names the discrete spaces that the engine takes besides.

    Raises:
        EnvError: another space.
    """
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        raise EnvError(f"env.id={id} has actions of {space}; only {indices} and Box of floats are supported")
    return as_float32(space)


def check_layout(actions: Tensor, space: Space, num_envs: int) -> None:
    """Refuse ``actions`` that are not ``[num_envs, *space.shape]`` float32, or int64 if discrete; reads no value.

    Raises:
        EnvError: wrong shape or dtype.
    """
    shape = (num_envs, *(space.shape or ()))
    dtype = torch.float32 if index_range(space) is None else torch.int64
    if tuple(actions.shape) != shape or actions.dtype != dtype:
        got = f"{list(actions.shape)} {actions.dtype}"
        raise EnvError(f"actions are {got}: expected {list(shape)} {dtype} for {space}")


def check_values(actions: NDArray, space: Space, first_env: int) -> None:
    """Refuse host ``actions`` with a value that is not finite, or not in a discrete space; row 0 is ``first_env``.

    Raises:
        EnvError: names the first such env and its action.
    """
    indices = index_range(space)
    if indices is None:
        legal = np.isfinite(actions)
        rule = "every value must be finite"
    else:
        first, last = indices
        legal = (actions >= first) & (actions <= last)
        rule = f"it must be in {_in_one_line(first)} .. {_in_one_line(last)}"
    if not legal.all():
        row = int(np.argmin(legal.reshape(len(actions), -1).all(axis=1)))
        raise EnvError(f"env {first_env + row} got action {_in_one_line(actions[row])}: {rule}")


def _in_one_line(action: NDArray) -> str:
    return np.array2string(
        action, separator=", ", formatter={"float_kind": "{:.4g}".format, "int": str}, max_line_width=10**6
    )
