"""What engines refuse alike: counts, seeds, devices, states that do not fit, and what does not fit into memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from envs.base import EnvError

#: How torch, NumPy, CUDA and Warp say that memory does not suffice: few of them have an exception of its own for that.
_TOO_LARGE = re.compile(
    r"out of memory|not enough memory|can(no|')t allocate memory|(unable|failed) to allocate [\d.]+ (bytes|[KMGTPE]iB)|"
    r"CUBLAS_STATUS_ALLOC_FAILED|size calculation overflowed|array shapes must not exceed",
    re.IGNORECASE,
)


def check_columns(num_envs: int, seed: int, rank: int, world_size: int) -> None:
    """Refuse numbers that name no env columns or no random streams.

    Raises:
        EnvError: names the number.
    """
    if num_envs < 1:
        raise EnvError(f"num_envs={num_envs}: it must be at least 1")
    if not 0 <= rank < world_size:
        raise EnvError(f"rank={rank}: it must be in 0 .. world_size-1={world_size - 1}")
    if seed < 0:
        raise EnvError(f"seed={seed}: it must be 0 or more")


def check_flag(name: str, value: object) -> None:
    """Refuse a switch that is neither on nor off.

    Raises:
        EnvError: names the switch.
    """
    if not isinstance(value, bool):
        raise EnvError(f"env.options.{name}={value!r}: it must be true or false")


def check_limit(max_episode_steps: int | None) -> None:
    """Refuse a time limit that no count of steps, in int32, reaches.

    Raises:
        EnvError: names the limit.
    """
    if max_episode_steps is not None and not 1 <= max_episode_steps < 2**31:
        raise EnvError(f"env.max_episode_steps={max_episode_steps}: it must be in 1 .. {2**31 - 1}")


def usable_device(device: torch.device | str) -> torch.device:
    """The device with its index, as the tensors on it report it.

    Raises:
        EnvError: this torch, or this machine, has no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise EnvError(f"device={device} cannot be used: {str(error).splitlines()[0]}") from error


@contextmanager
def memory_errors(what: str, kind: type[Exception] = EnvError) -> Iterator[None]:
    """Refuse in one line what does not fit into memory, on whichever device and whoever allocates.

    Args:
        what: keys with their values, and what they make too large.
        kind: of the exception that is raised instead, with the first line of what was said.
    """
    try:
        yield
    except (EnvError, kind):  # already says so in one line
        raise
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        if not isinstance(error, MemoryError) and not _TOO_LARGE.search(str(error)):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise kind(f"{what} does not fit into memory: {reason}") from error


def copy_state(id: str, state: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a saved ``state`` of env ``id`` into those of the same name; nothing is copied on an error.

    Raises:
        EnvError: a tensor is missing, unknown, or of another shape or dtype.
    """
    if state.keys() != into.keys():
        raise EnvError(f"state of {id} has {', '.join(state)}: expected {', '.join(into)}")
    for name, tensor in into.items():
        got, expected = (f"{list(x.shape)} {x.dtype}" for x in (state[name], tensor))
        if got != expected:
            raise EnvError(f"{name} in the state of {id} is {got}: expected {expected}")
    for name, tensor in into.items():
        tensor.copy_(state[name])
