"""Random numbers as a function of (key, env, episode): they advance under CUDA graph replay and need no state."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_AGE_LANE = 2**32  # no task draws as many numbers
_MULTIPLIERS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def stream_key(seed: int, rank: int, epoch: int) -> Tensor:
    """The key ``[2]`` int64 of one (seed, rank, epoch); numpy's `SeedSequence` keeps near ones unlike each other."""
    words = np.random.SeedSequence(seed, spawn_key=(rank, epoch)).generate_state(2, np.uint64)
    return torch.from_numpy(words.view(np.int64))


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """The logical shift; torch's own repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit words (Steele, Lea & Flood 2014, figure 16)."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIERS[0]
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIERS[1]
    return value ^ _shift_right(value, 31)


def uniform(key: Tensor, columns: Tensor, episodes: Tensor, lanes: Tensor) -> Tensor:
    """Independent numbers in [0, 1), 53 bits each, for every lane of every (env column, episode).

    Under one key no two (column, episode) pairs share a stream: their counters differ, and every step is a bijection.

    Args:
        key: ``[2]`` int64, from `stream_key`.
        columns: ``[N]`` int64, below 2^31.
        episodes: ``[N]`` int64, below 2^32.
        lanes: ``[D]`` int64, the numbers of a stream to draw.

    Returns:
        ``[D, N]`` float64.
    """
    stream = _mix(key[0] + (columns << 32) + episodes)
    words = _mix((stream + lanes[:, None] * _GOLDEN) ^ key[1])
    return _shift_right(words, 11).double() * 2.0**-53


def random_ages(key: Tensor, episodes: Tensor, limit: int) -> Tensor:
    """How many transitions of at most ``limit`` each env's episode is to count as past when it begins.

    Args:
        key: ``[2]`` int64, from `stream_key`.
        episodes: ``[N]`` int64, the number of each env's episode.
        limit: the time limit, in transitions.

    Returns:
        ``[N]`` int32, uniform in ``0 .. limit - 1``.
    """
    columns = torch.arange(len(episodes), device=episodes.device)
    lane = torch.full((1,), _AGE_LANE, device=episodes.device)
    return (uniform(key, columns, episodes, lane)[0] * limit).int()
