"""Which tile a launch uses: a rule over (operation, T, N, layout, dtype), from docs/results/credit_tune.csv.

Time-major tiles read up to 16 bytes along the envs at a time and hold many runs beside each other; env-major tiles put
the runs of one env on neighbouring threads. Short windows take several envs per warp. Where too few programs would
start, time is split over them.
"""

from __future__ import annotations

from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200
ACTIONS_AT_ONCE = 4  # 16 bytes of float32 for a thread; more are summed across threads, which is slower
FORWARD = ("eligibility_traces", "episodic_prefix_sum")
HEAVY = ("vtrace", "retrace", "retrace_categorical")  # more registers per row


class Tile(NamedTuple):
    """The shape of one program's work; all sizes are powers of two."""

    runs: int  #: S: runs of one env side by side
    envs: int  #: BN: envs
    length: int  #: L: steps of a run, held by one thread
    warps: int
    split: bool = False  #: one program for each tile, instead of one that walks over all tiles of its envs
    chunks: int = 1  #: L rows at a time of a longer run, read twice, the second time from the cache; 1 holds them
    stages: int = 1  #: tiles in flight where a program walks over several
    actions: int = 1  #: actions read at a time
    group: int = 16  #: where time is split, tiles that read each other's maps


def next_power(x: int) -> int:
    """The smallest power of two that is at least ``x``."""
    return 1 << max(x - 1, 0).bit_length()


def choose(operation: str, steps: int, envs: int, env_major: bool, itemsize: int, actions: int) -> Tile:
    """The tile for ``steps`` by ``envs`` rows of ``itemsize`` bytes; ``actions`` is 0 where there are none."""
    heavy = operation in HEAVY or itemsize > 4
    tile = _env_major(steps, envs) if env_major else _time_major(steps, envs, heavy, operation in FORWARD)
    if not actions:
        return tile
    return (_env_major_actions(steps, envs) if env_major else _time_major_actions(steps, envs))._replace(
        actions=min(ACTIONS_AT_ONCE, next_power(actions))
    )


def _time_major(steps: int, envs: int, heavy: bool, forward: bool) -> Tile:
    if steps <= 8:
        return Tile(4, 32, 2, 4)
    if steps <= 16:
        return Tile(4, 64, 4, 4)
    if steps <= 32:
        return Tile(4, 64, 8, 4)
    if envs >= 32768:
        return Tile(4, 32, 4 if forward else 2, 1, stages=2)
    if steps <= 128:
        return Tile(16, 32, 8, 16 if heavy else 8)
    if envs < 16 * MULTIPROCESSORS:
        long = steps > 4096
        if heavy:
            return Tile(64 if long else 32, 32, 2, 16, split=True, chunks=4)
        return Tile(32, 32, 4, 8, split=True, chunks=4) if long else Tile(16, 32, 4, 4, split=True, chunks=2)
    if steps <= 512:
        return Tile(64, 32, 2, 16, chunks=4) if heavy else Tile(32, 32, 4, 8, chunks=4)
    return Tile(32, 16, 4, 4, stages=2 if heavy else 3)


def _env_major(steps: int, envs: int) -> Tile:
    if steps <= 8:
        return Tile(2, 64, 4, 4)
    if steps <= 16:
        return Tile(4, 32, 4, 4)
    if steps <= 32:
        return Tile(8, 16, 4, 4)
    if steps <= 64:
        return Tile(16, 8, 4, 4)
    if steps <= 256:
        return Tile(32, 4, 4, 4)
    if steps <= 1024:
        return Tile(128, 1, 4, 4)
    if envs < 4 * MULTIPROCESSORS:
        return Tile(128, 1, 8, 4, split=True)
    return Tile(128, 1, 8, 4) if envs < 2048 else Tile(512, 1, 4, 16)


def _time_major_actions(steps: int, envs: int) -> Tile:
    if envs >= 16384:
        return Tile(4, 32, 4, 4, stages=2)
    return Tile(16, 32, 4, 16, split=envs < 16 * MULTIPROCESSORS and steps > 128)


def _env_major_actions(steps: int, envs: int) -> Tile:
    if steps <= 256:
        return Tile(32, 1, 4, 1)
    return Tile(512, 1, 4, 16, split=envs < MULTIPROCESSORS)
