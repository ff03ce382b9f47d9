"""Which tile a launch uses: a rule over (operation, T, N, layout, dtype), and a small table of measured exceptions."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """The shape of one program's work; all sizes are powers of two."""

    runs: int  #: S: runs of one env side by side
    envs: int  #: BN: envs
    length: int  #: L: steps of a run, held by one thread
    warps: int
    split: bool = False  #: one program for each tile, instead of one that walks over all tiles of its envs
    stages: int = 1  #: tiles in flight where a program walks over several
    actions: int = 1  #: actions read at a time


def next_power(x: int) -> int:
    """The smallest power of two that is at least ``x``."""
    return 1 << max(x - 1, 0).bit_length()


def choose(operation: str, steps: int, envs: int, env_major: bool, itemsize: int, actions: int) -> Tile:
    """The tile for a rollout of ``steps`` by ``envs``."""
    if actions:
        width = min(16, next_power(actions))
        return Tile(32, 4, 4, 4, actions=width) if env_major else Tile(4, 32, 4, 4, actions=width)
    if env_major:
        return Tile(32, 4, 4, 4)
    return Tile(min(16, next_power(-(-steps // 8))), 32, 8, 4)
