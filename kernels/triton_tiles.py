"""Which tile a launch uses: a rule over (operation, T, N, layout, dtype), from docs/results/credit_tune.csv.

Time-major tiles read up to 16 bytes along the envs at a time and hold many runs beside each other; env-major tiles put
the runs of one env on neighbouring threads. Short windows take several envs per warp. Where too few programs would
start, time is split over them.
"""

from __future__ import annotations

from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200
ONE_OUTPUT = ("td_lambda", "discounted_returns", "eligibility_traces", "episodic_prefix_sum")  # fewer registers per row
HEAVY = ("vtrace", "retrace", "retrace_categorical")  # more of them


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
    if actions:
        tile = _env_major_actions(steps, actions) if env_major else _time_major_actions(steps, actions)
    elif env_major:
        tile = _env_major(steps, envs, heavy)
    elif envs >= 32768 and steps > 32:
        tile = _many_envs(operation in ONE_OUTPUT, itemsize)
    else:
        tile = _time_major(steps, envs, heavy, itemsize)
    # The last tiles of the groups wait for each other, which long windows feel; more maps take registers and time.
    return tile._replace(group=128 if env_major else 64) if steps > 32768 and actions <= 4 else tile


def _many_envs(one_output: bool, itemsize: int) -> Tile:
    if itemsize < 4:
        return Tile(4, 64, 2, 2, stages=3)
    return Tile(4, 32, 4 if one_output else 2, 1, stages=2)


def _time_major(steps: int, envs: int, heavy: bool, itemsize: int) -> Tile:
    if steps <= 8:
        return Tile(4, 32, 2, 2)
    if steps <= 16:
        return Tile(4, 64, 4, 4)
    if steps <= 32:
        return Tile(8, 32, 4, 8) if heavy else Tile(4, 64, 8, 4)
    if steps <= 128:
        if heavy and envs >= 8192 and itemsize <= 4:
            return Tile(8, 32, 4, 2, stages=3)
        return Tile(16, 32, 8, 16 if heavy else 8)
    if envs <= 16:
        return Tile(64, 16, 2 if heavy else 4, 8, split=True, chunks=4)
    if envs < 16 * MULTIPROCESSORS:
        long = steps > 4096
        if heavy:
            return Tile(64 if long else 32, 32, 2, 16, split=True, chunks=4)
        return Tile(32, 32, 4, 8, split=True, chunks=4) if long else Tile(16, 32, 4, 4, split=True, chunks=2)
    if steps <= 512:
        return Tile(64, 32, 2, 16, chunks=4) if heavy else Tile(32, 32, 4, 8, chunks=4)
    return Tile(32, 16, 4, 4, stages=2 if heavy else 3)


def _env_major(steps: int, envs: int, heavy: bool) -> Tile:
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
        return Tile(128, 1, 4, 4) if heavy else Tile(64, 1, 8, 2)
    if envs < 2048:
        return Tile(128, 1, 8, 4, split=envs < 4 * MULTIPROCESSORS)
    return Tile(512, 1, 4, 16) if heavy else Tile(128, 1, 16, 4)


def _time_major_actions(steps: int, actions: int) -> Tile:
    if actions > 16:  # a row of them is wide enough for a few envs, and is summed across threads
        return Tile(8, 8, 4, 8, split=True, actions=16)
    at_once = min(4, next_power(actions))  # 16 bytes of float32 for a thread
    if steps <= 32:
        return Tile(16, 16, 2, 8, actions=at_once)
    if steps <= 128:
        return Tile(32, 8, 4, 8, actions=at_once)
    if actions < 4 or steps > 32768:
        return Tile(16, 16, 4, 8, split=True, actions=at_once)
    return Tile(16, 8, 4, 4, split=True, actions=at_once)


def _env_major_actions(steps: int, actions: int) -> Tile:
    at_once = min(8 if steps > 256 else 4, next_power(actions))
    if steps <= 32:
        return Tile(8, 4, 4, 1, actions=at_once)
    if steps <= 256:
        return Tile(32, 1, 4, 1, actions=at_once)
    return Tile(128, 1, 4, 4, split=True, actions=at_once)
