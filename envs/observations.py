"""Observations as the trainer takes them: one array per batch, also where an env gives several named ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Space
from gymnasium.spaces.utils import flatten_space
from numpy.typing import NDArray

from envs.base import EnvError

_Path = tuple[str, ...]


class ObservationMap:
    """Joins the parts of a ``Dict`` observation into one vector, in the space's order; passes a ``Box`` through.

    Args:
        id: of the env, for messages.
        space: ``Box``, or ``Dict`` (a nested one, too) of numbers, vectors and matrices.

    Raises:
        EnvError: another space, or another part; names it.
    """

    space: Box  #: of the joined observation: float32, or uint8 for images

    def __init__(self, id: str, space: Space[Any]) -> None:
        self._paths: tuple[_Path, ...] = ()
        if isinstance(space, Dict):
            parts = dict(_parts(space))
            for path, part in parts.items():
                if not isinstance(part, Box) or len(part.shape) > 2:
                    name = ".".join(path)
                    raise EnvError(f"env.id={id}: observation part {name} is {part}; a Dict may hold vectors only")
            self._paths = tuple(parts)
            space = flatten_space(space)
        if not isinstance(space, Box):
            raise EnvError(f"env.id={id} has observations of {type(space).__name__}; only Box and Dict are supported")
        self.space = space if space.dtype == np.uint8 and not self._paths else as_float32(space)

    def __call__(self, observations: Any) -> NDArray:
        """One array ``[n, *space.shape]`` of an engine's observations of ``n`` envs, in a dtype that fits ``space``."""
        if not self._paths:
            return observations
        parts = (reduce(lambda part, key: part[key], path, observations) for path in self._paths)
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _parts(space: Dict, path: _Path = ()) -> Iterator[tuple[_Path, Space[Any]]]:
    """The innermost spaces with the keys that lead there."""
    for key, part in space.spaces.items():
        if isinstance(part, Dict):
            yield from _parts(part, (*path, key))
        else:
            yield (*path, key), part


def as_float32(space: Box) -> Box:
    """The same bounds as float32; those beyond its range are infinite, and both of dm_control's 2e-308 .. 2e308."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    low = np.where((low > 0) & (low < 1e-300) & (high > 1e300), -np.inf, low)
    with np.errstate(over="ignore", under="ignore"):
        return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
