"""Vectorized envs behind one contract (`envs.base`); each engine is imported only when it is asked for."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from envs.base import EnvError, StepResult, VecEnv
from envs.checks import memory_errors
from envs.names import resolve_among

__all__ = ["ENGINES", "EnvError", "StepResult", "VecEnv", "make", "resolve"]


class Engine(NamedTuple):
    """Where an engine's `VecEnv` class lives and what installs the packages that it imports."""

    module: str
    class_name: str
    requirement: str  #: what ``pip install`` takes
    settings: tuple[str, ...] = ()  #: keys of ``env`` that it takes besides its options


_PLAIN = "-e ."
_ON_THE_HOST = ("pools", "num_threads", "timeout")

ENGINES = {
    "envpool": Engine("envs.envpool_cpu", "EnvPoolVecEnv", _PLAIN, _ON_THE_HOST),
    "gymnasium": Engine("envs.gymnasium_vec", "GymnasiumVecEnv", _PLAIN, _ON_THE_HOST),
    "mujoco_warp": Engine("envs.mujoco_warp", "MujocoWarpVecEnv", "-e '.[warp]'", ("physics",)),
    "torch": Engine("envs.torch_classic", "TorchVecEnv", _PLAIN),
}


def make(
    id: str,
    engine: str = "envpool",
    num_envs: int = 1,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    **engine_options: Any,
) -> VecEnv:
    """Build ``num_envs`` copies of an env.

    Args:
        id: a name as typed (``Ant``, ``pong``) or an exact id; see `resolve`.
        engine: a key of `ENGINES`.
        num_envs: envs of this rank.
        device: where observations, rewards and flags are.
        seed: of the run; together with ``rank`` it decides every random stream.
        rank: this process among ``world_size``.
        world_size: processes of the run, each with ``num_envs`` envs.
        **engine_options: for that engine, e.g. ``pools``, ``num_threads`` and ``timeout`` for EnvPool.

    Raises:
        EnvError: engine, id, number or option refused, the engine's package is missing, or memory does not suffice.
    """
    if num_envs < 1:
        raise EnvError(f"num_envs={num_envs}: it must be at least 1")
    if not 0 <= rank < world_size:
        raise EnvError(f"rank={rank}: it must be in 0 .. world_size-1={world_size - 1}")
    exact, make_env = resolve(id, engine), _load(engine)
    with memory_errors(f"num_envs={num_envs}: {exact}"):
        return make_env(exact, num_envs, device=device, seed=seed, rank=rank, world_size=world_size, **engine_options)


def resolve(name: str, engine: str = "envpool") -> str:
    """Return the exact id that ``name`` means to ``engine``: ``Ant`` is its newest version, e.g. ``Ant-v5``.

    Raises:
        EnvError: unknown or ambiguous; the message lists the closest ids, or another engine that has it.
    """
    known_ids = _load(engine).known_ids()
    try:
        return resolve_among(name, known_ids, engine)
    except EnvError as error:
        raise EnvError(f"{error}{_elsewhere(name, engine)}") from error


def _elsewhere(name: str, engine: str) -> str:
    """The end of a message: another engine of the plain installation that knows ``name``, if there is one."""
    for other in (other for other, entry in ENGINES.items() if entry.requirement == _PLAIN and other != engine):
        with suppress(EnvError):
            return f"; env.engine={other} has {resolve_among(name, _load(other).known_ids(), other)}"
    return ""


def _load(engine: str) -> Any:
    if engine not in ENGINES:
        raise EnvError(f"env.engine={engine} is unknown: {', '.join(ENGINES)}")
    entry = ENGINES[engine]
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        raise EnvError(
            f"env.engine={engine} needs the package {error.name}: pip install {entry.requirement}"
        ) from error
    return getattr(module, entry.class_name)
