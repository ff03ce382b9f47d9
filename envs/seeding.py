"""Random streams of envs: one integer seed per env, disjoint over columns, ranks, seeds and reseed epochs."""

from __future__ import annotations

import itertools
import math

from envs.base import EnvError

_SEEDS = 2**31  # EnvPool reads seeds as int32, and a generator's other half (negative seeds) would be read differently
_INVERSE_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def first_seed(num_envs: int, *, seed: int, rank: int = 0, world_size: int = 1, epoch: int = 0) -> int:
    """Seed of this rank's env 0; its env ``n`` takes ``first_seed(...) + n``.

    The 2^31 seeds are cut into blocks of ``world_size * num_envs``: one per (seed, epoch), a part of it per rank.

        block = (seed + epoch * stride) mod blocks,   stride coprime to blocks, close to blocks / golden ratio

    So envs and ranks never share a stream; runs whose seeds differ (by less than ``blocks``: 524288 for 4096 envs)
    never do in the same epoch; and neither do the first ``blocks`` epochs of a run. The golden ratio spreads epochs
    evenly (Knuth, TAOCP 3, 6.4, theorem S), so that small seeds stay clear of each other's later epochs too.

    Raises:
        EnvError: ``seed`` or ``epoch`` is negative, or more than 2^31 envs were asked for.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise EnvError(f"{name}={value}: it must be 0 or more")
    total = world_size * num_envs
    blocks = _SEEDS // total
    if blocks == 0:
        raise EnvError(f"num_envs={num_envs} on {world_size} ranks: at most {_SEEDS} envs have seeds of their own")
    stride = next(k for k in itertools.count(round(blocks * _INVERSE_GOLDEN_RATIO)) if math.gcd(k, blocks) == 1)
    return (seed + epoch * stride) % blocks * total + rank * num_envs
