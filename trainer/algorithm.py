"""What the loop asks of an algorithm, and what it hands to one: PPO and IMPALA meet here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from envs.actions import ActionMap
from envs.base import VecEnv
from kernels.operations import Backend
from trainer.console import Console
from trainer.episodes import EpisodeTracker
from trainer.graphs import Graphs
from trainer.normalize import ObservationNormalizer, ValueNormalizer
from trainer.policy import ActorCritic
from trainer.rollout import Rollout


@dataclass(frozen=True)
class Parts:
    """What a run has whatever its algorithm."""

    env: VecEnv
    policy: ActorCritic
    action_map: ActionMap
    observation_normalizer: ObservationNormalizer | None
    value_normalizer: ValueNormalizer | None
    graphs: Graphs  #: with the run's clock
    backend: Backend  #: of the credit kernels
    device: torch.device
    console: Console
    episodes: EpisodeTracker


class Source(Protocol):
    """Where rollouts come from: a `trainer.collector.Collector`, or actors of their own."""

    def collect(self) -> Rollout:
        """The next rollout; good until the next call."""
        ...

    def restart(self) -> None:
        """Start every env anew, after the env was re-seeded."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next window depends on beside the policy, and the env's own state where it can be had."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what `state_dict` gave; False if the envs cannot go on where they were, but must start anew."""
        ...

    def explain(self, times: dict[str, float]) -> tuple[dict[str, float], dict[str, Any]]:
        """An update's milliseconds per phase along the critical path, and numbers of the source to be logged.

        Args:
            times: what the run's clock read, with the phases that the source opened.
        """
        ...

    def close(self) -> None:
        """End what the source started; calling it twice is fine."""
        ...


class Algorithm(Protocol):
    """Improves the policy from one rollout at a time."""

    max_skipped_updates: int  #: the run fails after so many updates in a row that withheld a minibatch
    minibatches_per_update: int

    def update(self, rollout: Rollout, rewards: Tensor, progress: float) -> dict[str, Tensor]:
        """Assign credit and improve the policy, in place.

        Args:
            rollout: ``[T, N]``; its observations are normalized already if its source did so.
            rewards: ``[T, N]``, the rollout's own or normalized ones.
            progress: env steps done over ``total_steps``.

        Returns:
            Scalar tensors on the device to be logged, ``skipped_minibatches`` (withheld, not finite) among them.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All state but the policy's and the normalizers'."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...


class Method(NamedTuple):
    """An algorithm with the source of its rollouts."""

    source: Source
    algorithm: Algorithm
