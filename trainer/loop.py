"""The loop: collect -> credit -> update -> log."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import torch

from envs.actions import ActionMap
from envs.base import VecEnv
from kernels.operations import Backend
from trainer import checkpoint, distributed, estimator
from trainer.algorithm import Parts
from trainer.aside import Aside
from trainer.builder import (
    make_graphs,
    make_method,
    make_policy,
    make_training_env,
    resolve_device,
    resolve_loss_backend,
    set_precision,
)
from trainer.checkpoint import CheckpointError
from trainer.config import Config, CreditConfig
from trainer.console import Console
from trainer.episodes import EpisodeTracker
from trainer.normalize import ObservationNormalizer, RewardNormalizer, ValueNormalizer
from trainer.probe import CreditProbe, make_probe, phase_shares
from trainer.rollout import Rollout, first_non_finite_row
from trainer.schema import to_yaml
from trainer.timing import make_clock


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line."""


class Trainer:
    """One run: its parts, its counters, and the loop over updates."""

    def __init__(self, config: Config, console: Console, env: VecEnv | None = None):
        """Build the parts; an ``env`` that is given must be the one that the configuration names."""
        self.config, self.console = config, console
        self.device = resolve_device(config.device)
        self.backend: Backend = estimator.resolve_backend(config.credit, self.device)
        resolve_loss_backend(config, self.device)  # refused, if at all, before an env starts
        set_precision(config.matmul_precision)
        torch.manual_seed(config.seed)  # the same parameters on every rank
        with ExitStack() as started:
            self.env: VecEnv = started.enter_context(closing(env or make_training_env(config, self.device)))
            self._build()
            started.pop_all()  # from here on `close` ends it
        self.update = 0
        self.env_steps = 0
        self.seconds = 0.0
        self.skipped_in_a_row = 0
        self._told: set[str] = set()  #: faults of the env that a person knows of
        self.newest: tuple[Rollout, torch.Tensor] | None = None  #: the last rollout and its rewards, until the next
        self.is_between_rollouts = True  #: False half way through one: the envs are ahead of all that was counted
        self.is_whole = True  #: False half way through an update: such a state must not be saved
        self.clock.start()

    def _build(self) -> None:
        """The parts that depend on the env's spaces."""
        config, console = self.config, self.console
        space, action_space = self.env.single_observation_space, self.env.single_action_space
        self.policy = make_policy(config, space, action_space, self.device)
        distributed.broadcast_parameters_(self.policy.parameters())
        torch.manual_seed(config.seed + 1_000_003 * distributed.rank())  # but actions and minibatches of their own

        normalize, n = config.normalize, config.num_envs
        # statistics are sums over time as well, but not what `credit.backend` compares
        fastest = estimator.resolve_backend(CreditConfig(), self.device)
        self.observation_normalizer = (
            ObservationNormalizer(space.shape or (), normalize.observation_clip, self.device)
            if normalize.observations
            else None
        )
        self.reward_normalizer = (
            RewardNormalizer(n, config.credit.gamma, fastest, self.device) if normalize.rewards else None
        )
        self.value_normalizer = ValueNormalizer(self.device) if normalize.values else None
        self.clock, self._aside = make_clock(self.device, config.timing.detail == "high"), Aside(self.device)
        action_map = ActionMap(action_space, config.env.action_map)
        if action_map.notice:
            console.notice(action_map.notice)
        self.episodes = EpisodeTracker(n, config.logging.episode_window, fastest, self.device)
        self.episode_statistics = self.episodes.statistics()
        self.graphs = make_graphs(config, self.device, self.clock, console)
        self.source, self.algorithm = make_method(
            config,
            Parts(
                self.env, self.policy, action_map, self.observation_normalizer, self.value_normalizer,
                self.graphs, self.backend, self.device, console, self.episodes,
            ),
        )  # fmt: skip
        self.probe: CreditProbe | None = (
            make_probe(config.credit, self.backend, self.device, self.graphs.enabled) if config.credit.probe else None
        )
        self.clock.may_rest = self.probe is None  # it needs the share of credit, and its own time, of the same update

    @property
    def progress(self) -> float:
        """Share of ``total_steps`` that is done."""
        return min(self.env_steps / self.config.total_steps, 1.0)

    @property
    def finished(self) -> bool:
        """True once ``total_steps`` valid env steps were taken."""
        return self.env_steps >= self.config.total_steps

    def train_one_update(self) -> dict[str, Any]:
        """Collect a rollout, assign credit, improve the policy; the metrics of this update."""
        interval = self.config.env.reseed_interval
        if interval and self.update and self.update % interval == 0:
            self.start_envs_anew()
        self.is_between_rollouts = False
        rollout = self.source.collect()
        rewards = self._rewards(rollout)
        if self.probe is not None:
            with self.clock.phase("probe"):
                self.probe(rollout, rewards, self.update)
        self.newest = rollout, rewards
        with self.clock.phase("log"):
            ended = self.episodes.follow(rollout)
            valid = distributed.sum_(rollout.valid.sum())  # fails where another rank has failed to collect
            self._aside.mark()
        self.is_whole = False
        statistics = self.algorithm.update(rollout, rewards, self.progress)
        with self.clock.phase("log"), self._aside.reading():  # while the device updates the policy
            self.episodes.record(ended)
            steps = int(valid)
        self.clock.settle()
        self.clock.lap()
        with self.clock.phase("log"):
            metrics = self._read(rollout, statistics, steps)
        self.is_between_rollouts = self.is_whole = True
        return metrics

    def _rewards(self, rollout: Rollout) -> torch.Tensor:
        """What is learned from: the env's rewards, clipped and then normalized where that is asked for."""
        rewards, clip = rollout.rewards, self.config.normalize.reward_clip
        with self.clock.phase("normalize"):
            if clip is not None:
                rewards = rewards.clamp(-clip, clip)
            if self.reward_normalizer is not None:
                rewards = self.reward_normalizer(rewards, rollout.terminated, rollout.truncated, rollout.valid)
        return rewards

    def _read(self, rollout: Rollout, statistics: dict[str, torch.Tensor], steps: int) -> dict[str, Any]:
        """Read what the device accumulated, and count: here the device waits for the host, so there is little of it."""
        stacked = torch.stack(list(statistics.values()))
        # the clock waits for an event: a copy to the host that has to wait would hold up the copies of all actors
        times, of_source = self.source.explain(self.clock.read())
        numbers = dict(zip(statistics, stacked.tolist(), strict=True))
        self.episode_statistics = self.episodes.statistics()
        shares = phase_shares(times)
        self.update += 1
        self.env_steps += steps
        self.seconds += times["total"] / 1e3
        self._watch_skipped(numbers, rollout)
        return {
            "update": self.update,
            "env_steps": self.env_steps,
            "seconds": self.seconds,
            "steps_per_second": steps / (times["total"] / 1e3),
            **self.episode_statistics._asdict(),
            **numbers,
            **of_source,
            **self._faults(),
            **{f"time/{name}_ms": value for name, value in times.items()},
            "time/clock_ms": self.clock.cost_ms,
            **{f"share/{name}": share for name, share in shares.items()},
            **(self.probe.metrics(shares["credit"]) if self.probe is not None else {}),
            "credit_backend": self.backend,
        }

    def _faults(self) -> dict[str, int]:
        """What the env survived since the last update; the first of each kind is told."""
        faults = {f"env/{name}": number for name, number in self.env.counters().items()}
        for name, number in faults.items():
            if number and name not in self._told:
                self._told.add(name)
                self.console.notice(f"update {self.update}: {name}={number}; later ones are counted in the metrics")
        return faults

    def _watch_skipped(self, numbers: dict[str, float], rollout: Rollout) -> None:
        withheld = int(numbers["skipped_minibatches"])
        if not withheld:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        total = self.algorithm.minibatches_per_update
        where = first_non_finite_row(rollout) or "the rollout is finite, the loss or gradient in phase update is not"
        self.console.notice(f"update {self.update}: {withheld} of {total} minibatches withheld, not finite: {where}")

    def refuse_to_go_on_unfinite(self) -> None:
        """End a run that no longer learns.

        Raises:
            TrainingError: ``max_skipped_updates`` updates in a row had minibatches withheld.
        """
        limit = self.algorithm.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            key = f"{self.config.algo}.max_skipped_updates={limit}"
            raise TrainingError(f"{key}: so many updates in a row were not finite, the last is {self.update}")

    def start_envs_anew(self) -> None:
        """Re-seed the envs by the number of updates done, and begin new episodes: the rule that resuming follows,
        too."""
        self.env.reseed(self.update)
        self.source.restart()
        self.episodes.restart()
        if self.reward_normalizer is not None:
            self.reward_normalizer.restart()

    def close(self) -> None:
        """End the source of rollouts, the graphs and the env; calling it twice is fine."""
        self.source.close()
        self.graphs.close()
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        return {
            "modules": {name: module.state_dict() for name, module in self._modules().items()},
            "algorithm": self.algorithm.state_dict(),
            "episodes": self.episodes.state_dict(),
            "counters": {
                "update": self.update,
                "env_steps": self.env_steps,
                "seconds": self.seconds,
                "skipped_in_a_row": self.skipped_in_a_row,
            },
            "rng": checkpoint.rng_state(self.device),
            "source": self.source.state_dict(),
            "is_between_rollouts": self.is_between_rollouts,
            "env_id": self.env.id,
            "config": to_yaml(self.config),
        }

    def _modules(self) -> dict[str, torch.nn.Module]:
        modules = {
            "policy": self.policy,
            "observation_normalizer": self.observation_normalizer,
            "reward_normalizer": self.reward_normalizer,
            "value_normalizer": self.value_normalizer,
        }
        return {name: module for name, module in modules.items() if module is not None}

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        """Restore what `state_dict` gave; envs that cannot restore their state start anew, seeded by the update.

        Raises:
            CheckpointError: another env or number of envs, or something is missing or of another shape; names it.
        """
        try:
            self._restore(state, where)
        except KeyError as error:
            raise CheckpointError(
                f"{where}: the saved state has no {error}: another version wrote it; start a new run, "
                f"scripts/evaluate.py checkpoint=... still plays this one"
            ) from error

    def _restore(self, state: dict[str, Any], where: str) -> None:
        if state["env_id"] != self.env.id:
            raise CheckpointError(f"{where}: env.id is {self.env.id}, but the checkpoint is of {state['env_id']}")
        saved_envs = state["episodes"]["previous_done"].numel()
        if saved_envs != self.config.num_envs:
            raise CheckpointError(f"{where}: num_envs={self.config.num_envs}, but the checkpoint has {saved_envs} envs")
        modules = self._modules()
        for name, module in modules.items():
            checkpoint.load_module(module, state["modules"].get(name, {}), f"{where}: {name}")
        unknown = sorted(state["modules"].keys() - modules.keys())
        if unknown:
            raise CheckpointError(f"{where}: this configuration has no {unknown[0]}; was it changed?")
        self.algorithm.load_state_dict(state["algorithm"])
        self.episodes.load_state_dict(state["episodes"])
        self.episode_statistics = self.episodes.statistics()
        for name, value in state["counters"].items():
            setattr(self, name, value)
        goes_on = self.source.load_state_dict(state.get("source", {})) and state.get("is_between_rollouts", True)
        if not goes_on or distributed.world_size() > 1:
            self.start_envs_anew()
        if distributed.rank() == 0:
            checkpoint.restore_rng_state(state["rng"], self.device)
        else:
            torch.manual_seed(self.config.seed + 1_000_003 * distributed.rank() + 7919 * self.update)
