"""Evaluation of a checkpoint: returns of whole episodes, with the actions' mode or sampled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch

from envs.actions import ActionMap
from trainer import checkpoint
from trainer.builder import make_env, make_policy
from trainer.checkpoint import CheckpointError, load, load_newest
from trainer.config import Config
from trainer.normalize import ObservationNormalizer
from trainer.policy import ActorCritic
from trainer.schema import from_yaml

#: What a checkpoint says of its run, besides how to go on with it.
_NEEDED = ("config", "env_id", "update", "counters", "modules")


class Agent(NamedTuple):
    """What a checkpoint needs to act."""

    policy: ActorCritic
    normalizer: ObservationNormalizer | None
    action_map: ActionMap

    @torch.no_grad()
    def act(
        self, observations: torch.Tensor, state: torch.Tensor, deterministic: bool, playing: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions within the env's bounds for ``[batch, *observation_shape]``, and the memory that comes after
        ``state``; raw 0 in rows that are not ``playing``, whose observations may be NaN."""
        if self.normalizer is not None:
            observations = self.normalizer(observations)
        action = self.policy.act(observations, state, deterministic=deterministic)
        actions = action.actions
        if playing is not None:
            actions = torch.where(playing.view(-1, *(1,) * (actions.dim() - 1)), actions, 0)
        return self.action_map(actions), state if action.state is None else action.state


class Episodes(NamedTuple):
    """One whole episode per env."""

    returns: list[float]
    lengths: list[int]


def load_checkpoint(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration and state in a checkpoint file, or in the newest whole checkpoint of a run folder.

    Raises:
        CheckpointError: there is none, it cannot be read, or it lacks what playing needs.
    """
    if path.is_dir():
        state = load_newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path, print)
    else:
        state = load(path)
    missing = [key for key in _NEEDED if key not in state]
    if missing:
        raise CheckpointError(f"{path}: the checkpoint has no {missing[0]}; is it one of scripts/train.py?")
    return from_yaml(state["config"]), state


def run_folder_of(path: Path) -> Path:
    """The run folder that a checkpoint file, a folder of checkpoints or a run folder itself belongs to."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == "checkpoints" else folder


def make_agent(
    config: Config,
    state: dict[str, Any],
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    device: torch.device,
) -> Agent:
    """The policy of a checkpoint with its observation normalizer.

    Raises:
        CheckpointError: the spaces or networks do not fit; names the tensor.
    """
    networks = config.policy
    if networks.backend == "triton":  # how the run multiplied: the same parameters act on any device
        networks = dataclasses.replace(networks, backend="auto")
    policy = make_policy(dataclasses.replace(config, policy=networks), observation_space, action_space, device)
    checkpoint.load_module(policy, state["modules"].get("policy", {}), "policy")
    normalizer = None
    if config.normalize.observations:
        normalizer = ObservationNormalizer(observation_space.shape or (), config.normalize.observation_clip, device)
        statistics = state["modules"].get("observation_normalizer", {})
        checkpoint.load_module(normalizer, statistics, "observation_normalizer")
    return Agent(policy, normalizer, ActionMap(action_space, config.env.action_map))


def evaluate(
    config: Config, state: dict[str, Any], episodes: int, seed: int, deterministic: bool, device: torch.device
) -> Episodes:
    """Play one whole episode in each of ``episodes`` envs; every env counts once, so that short episodes are not
    favoured.

    Args:
        config: of the run; its ``env`` says what is played, on which engine.
        state: a checkpoint's content.
        episodes: how many.
        seed: of the envs and of sampled actions; other than the run's, or the same starts are played again.
        deterministic: the mode of the action distribution instead of a sample.
        device: where.
    """
    torch.manual_seed(seed)
    env = make_env(dataclasses.replace(config.env, pools=1, training_options={}), episodes, device, seed)
    try:
        agent = make_agent(config, state, env.single_observation_space, env.single_action_space, device)
        observations, memory = env.reset(), agent.policy.initial_state(episodes)
        returns = torch.zeros(episodes, dtype=torch.float64, device=device)
        lengths = torch.zeros(episodes, dtype=torch.int64, device=device)
        playing = torch.ones(episodes, dtype=torch.bool, device=device)
        while playing.any():
            actions, memory = agent.act(observations, memory, deterministic, playing)
            step = env.step(actions)
            returns += torch.where(playing, step.rewards.double(), 0.0)
            lengths += playing
            playing = playing & ~(step.terminated | step.truncated)
            observations = step.observations
        return Episodes(returns.tolist(), lengths.tolist())
    finally:
        env.close()
