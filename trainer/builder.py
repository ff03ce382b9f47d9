"""Builds the parts of a run from its configuration."""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import gymnasium
import torch

import envs
from envs.base import VecEnv
from envs.cores import local_ranks, usable_cores
from envs.group import EnvGroup
from kernels.loss_inputs import MAX_ACTIONS
from trainer import distributed
from trainer.actor_pool import ActorPool
from trainer.algorithm import Method, Parts
from trainer.collector import Collector
from trainer.config import Config, ConfigError, EnvConfig
from trainer.console import Console
from trainer.distributions import ActionHead
from trainer.estimator import estimate
from trainer.graphs import Graphs
from trainer.impala import Impala
from trainer.off_policy import make_estimator
from trainer.policy import ActorCritic
from trainer.ppo import PPO
from trainer.q_policy import QActorCritic
from trainer.timing import PhaseClock
from trainer.twin_policy import TwinActorCritic, twin_obstacle


def resolve_device(name: str) -> torch.device:
    """The device that ``device=`` names; under ``torchrun`` each rank of a host takes its own GPU.

    Raises:
        ConfigError: a GPU was asked for that is not there, or one for several ranks.
    """
    if ":" in name and local_ranks() > 1:
        raise ConfigError(f"device={name} is one GPU for {local_ranks()} ranks of this host; use device=cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name}: torch {torch.__version__} sees no CUDA device; use device=cpu")
    index = int(name.partition(":")[2] or distributed.local_rank())
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device={name}: there are {count} CUDA devices, the last is cuda:{count - 1}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def make_env(
    config: EnvConfig, num_envs: int, device: torch.device, seed: int, member: int = 0, members: int = 1
) -> VecEnv:
    """The env of this rank, or one of its ``members`` side by side, with the options that its engine takes."""
    options = {**config.options, **config.training_options}
    options |= {key: getattr(config, key) for key in envs.ENGINES[config.engine].settings}
    if config.max_episode_steps is not None:
        options["max_episode_steps"] = config.max_episode_steps
    return envs.make(
        config.id,
        config.engine,
        num_envs,
        device=device,
        seed=seed,
        rank=distributed.rank() * members + member,
        world_size=distributed.world_size() * members,
        **options,
    )


def make_training_env(config: Config, device: torch.device) -> VecEnv:
    """The env of this rank, as its algorithm steps it: for IMPALA a group with a member for each actor."""
    if config.algo != "impala":
        return make_env(config.env, config.num_envs, device, config.seed)
    actors, threads = config.num_actors, config.env.num_threads
    if config.env.engine == "envpool" and not threads:  # a member knows nothing of those that it shares the cores with
        threads = math.ceil(usable_cores() / (local_ranks() * actors))
    alone = replace(config.env, pools=1, num_threads=threads)
    with ExitStack() as started:
        members = [
            started.enter_context(
                closing(make_env(alone, config.num_envs // actors, device, config.seed, actor, actors))
            )
            for actor in range(actors)
        ]
        started.pop_all()  # from here on the group closes them
    return EnvGroup(members)


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], device: torch.device
) -> ActorCritic:
    """The networks for an env's spaces; with a Q head where Retrace learns from it.

    Raises:
        ConfigError: spaces and networks do not fit together, or ``policy.backend=triton`` cannot run here.
    """
    kind, backend = ActorCritic, config.policy.backend
    obstacle = twin_obstacle(config.policy, device)
    if config.credit.estimator == "retrace":
        kind, obstacle = QActorCritic, "has no Q head for credit.estimator=retrace"
    if backend == "triton" and obstacle:
        raise ConfigError(f"policy.backend=triton {obstacle}; use policy.backend=auto")
    if not obstacle and backend != "torch":
        kind = TwinActorCritic
    return kind(observation_space, action_space, config.policy, autocast_dtype(config)).to(device)


def autocast_dtype(config: Config) -> torch.dtype | None:
    """The networks' dtype under autocast, or None."""
    return torch.bfloat16 if config.autocast == "bfloat16" else None


def set_precision(matmul_precision: str) -> None:
    """How this process multiplies float32 on CUDA: matrices and convolutions, which torch switches apart."""
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = matmul_precision != "highest"


def make_graphs(config: Config, device: torch.device, clock: PhaseClock, console: Console) -> Graphs:
    """How the run's steps become CUDA graphs: on a CPU there are none."""
    enabled = config.cuda_graphs and device.type == "cuda"
    return Graphs(clock, enabled, config.timing.detail == "high", console.notice)


def resolve_loss_backend(
    config: Config, device: torch.device, head: ActionHead | None = None
) -> Literal["torch", "triton"]:
    """The backend that ``loss.backend=auto`` means on this device, for the actions of ``head`` if they are known.

    Raises:
        ConfigError: ``triton`` was asked for where it cannot run.
    """
    obstacle = None
    if device.type != "cuda":
        obstacle = f"needs device=cuda, but this run is on {device.type}"
    elif head is not None and head.choices and head.shape:
        obstacle = f"takes Box and Discrete actions, but those of {config.env.id} are MultiDiscrete"
    elif head is not None and head.outputs > MAX_ACTIONS:
        obstacle = f"takes up to {MAX_ACTIONS} actions, but {config.env.id} has {head.outputs}"
    if config.loss.backend == "triton" and obstacle:
        raise ConfigError(f"loss.backend=triton {obstacle}; use loss.backend=auto")
    return "torch" if obstacle or config.loss.backend == "torch" else "triton"


def make_method(config: Config, parts: Parts) -> Method:
    """The algorithm that ``algo`` names, and the source of its rollouts."""
    return _METHODS[config.algo](config, parts)


def _ppo(config: Config, parts: Parts) -> Method:
    collector = Collector(
        parts.env, parts.policy, parts.observation_normalizer, parts.value_normalizer, parts.action_map,
        config.rollout_length, parts.graphs, config.compile,
    )  # fmt: skip
    ppo = PPO(
        parts.policy, parts.value_normalizer, partial(estimate, config=config.credit, backend=parts.backend),
        config.ppo, parts.graphs, resolve_loss_backend(config, parts.device, parts.policy.head),
        config.compile,
    )  # fmt: skip
    return Method(collector, ppo)


def _impala(config: Config, parts: Parts) -> Method:
    if not isinstance(parts.env, EnvGroup):
        raise TypeError("algo=impala steps the members of an EnvGroup")
    normalizer = parts.value_normalizer
    estimator = make_estimator(
        parts.policy, normalizer.denormalize if normalizer else torch.Tensor.float, config.credit, parts.backend,
        config.impala.correction,
    )  # fmt: skip
    impala = Impala(
        parts.policy, parts.observation_normalizer, normalizer, estimator, config.impala, parts.graphs,
        resolve_loss_backend(config, parts.device, parts.policy.head),
    )  # fmt: skip
    return Method(ActorPool(config, parts.env, parts), impala)


_METHODS = {"ppo": _ppo, "impala": _impala}
