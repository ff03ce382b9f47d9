"""The loop: collect -> credit -> update -> log."""

from __future__ import annotations

import time
from typing import Any

import torch

from envs.actions import ActionMap
from envs.base import VecEnv
from kernels.operations import Backend
from trainer import checkpoint, distributed, estimator
from trainer.builder import autocast_dtype, make_env, resolve_device
from trainer.collector import Collector
from trainer.config import Config, to_dict, to_yaml
from trainer.console import Console, make_console
from trainer.episodes import Ended, EpisodeTracker
from trainer.metrics import MetricsFile, WandbLogger, finite, write_json
from trainer.normalize import ObservationNormalizer, RewardNormalizer, ValueNormalizer
from trainer.policy import ActorCritic
from trainer.ppo import PPO
from trainer.report import machine, run_name, run_tags
from trainer.rollout import Rollout, first_non_finite_row
from trainer.run_folder import RunFolder
from trainer.signals import StopSignal
from trainer.timing import PhaseClock


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line."""


class Trainer:
    """One run: its parts, its counters, and the loop over updates."""

    def __init__(self, config: Config, console: Console, stop: StopSignal):
        self.config, self.console, self.stop = config, console, stop
        self.device = resolve_device(config.device)
        self.backend: Backend = estimator.resolve_backend(config.credit, self.device)
        torch.set_float32_matmul_precision(config.matmul_precision)
        torch.manual_seed(config.seed)  # the same parameters on every rank
        self.env: VecEnv = make_env(config.env, config.num_envs, self.device, config.seed)
        space, action_space = self.env.single_observation_space, self.env.single_action_space
        self.policy = ActorCritic(space, action_space, config.policy, autocast_dtype(config)).to(self.device)
        distributed.broadcast_parameters_(self.policy.parameters())
        torch.manual_seed(config.seed + 1_000_003 * distributed.rank())  # but actions and minibatches of their own

        normalize, n = config.normalize, config.num_envs
        self.observation_normalizer = (
            ObservationNormalizer(space.shape or (), normalize.observation_clip, self.device)
            if normalize.observations
            else None
        )
        self.reward_normalizer = (
            RewardNormalizer(n, config.credit.gamma, self.backend, self.device) if normalize.rewards else None
        )
        self.value_normalizer = ValueNormalizer(self.device) if normalize.values else None
        self.clock = PhaseClock(self.device)
        action_map = ActionMap(action_space, config.env.action_map)
        if action_map.notice:
            console.notice(action_map.notice)
        self.collector = Collector(
            self.env, self.policy, self.observation_normalizer, self.value_normalizer, action_map,
            config.rollout_length, self.clock, config.compile,
        )  # fmt: skip
        self.algorithm = PPO(self.policy, self.value_normalizer, config.ppo, self.clock, config.compile)
        self.episodes = EpisodeTracker(n, config.logging.episode_window, self.backend, self.device)
        self.update = 0
        self.env_steps = 0
        self.seconds = 0.0
        self.skipped_in_a_row = 0

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
        rollout = self.collector.collect()
        rewards = self._rewards(rollout)
        with self.clock.phase("credit"):
            estimate = estimator.estimate(rollout, rewards, self.config.credit, self.backend)
        statistics = self.algorithm.update(rollout, estimate, self.progress)
        with self.clock.phase("log"):
            ended = self.episodes.follow(rollout)
            statistics["valid_steps"] = distributed.sum_(rollout.valid.sum(dtype=torch.float64))
        self.clock.lap()
        with self.clock.phase("log"):
            return self._read(rollout, statistics, ended)

    def _rewards(self, rollout: Rollout) -> torch.Tensor:
        if self.reward_normalizer is None:
            return rollout.rewards
        with self.clock.phase("normalize"):
            return self.reward_normalizer(rollout.rewards, rollout.terminated, rollout.truncated, rollout.valid)

    def _read(self, rollout: Rollout, statistics: dict[str, torch.Tensor], ended: Ended) -> dict[str, Any]:
        """The update's one synchronization: read what the device accumulated, and count."""
        values = torch.stack([tensor.double() for tensor in statistics.values()]).tolist()
        numbers = dict(zip(statistics, values, strict=True))
        times = self.clock.read()
        self.episodes.record(ended)
        steps = int(numbers.pop("valid_steps"))
        self.update += 1
        self.env_steps += steps
        self.seconds += times["total"] / 1e3
        self._watch_skipped(numbers, rollout)
        return {
            "update": self.update,
            "env_steps": self.env_steps,
            "seconds": self.seconds,
            "steps_per_second": steps / (times["total"] / 1e3),
            "episode_return": self.episodes.mean_return(),
            "episode_length": self.episodes.mean_length(),
            "episodes": self.episodes.ended,
            **numbers,
            **{f"env/{name}": number for name, number in self.env.counters().items()},
            **{f"time/{name}_ms": value for name, value in times.items()},
            "credit_backend": self.backend,
        }

    def _watch_skipped(self, numbers: dict[str, float], rollout: Rollout) -> None:
        if not numbers["skipped_minibatches"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        where = first_non_finite_row(rollout) or "the rollout is finite: the loss or its gradient is not"
        self.console.notice(f"update {self.update} was not applied, its loss or gradient is not finite: {where}")
        limit = self.config.ppo.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            raise TrainingError(f"ppo.max_skipped_updates={limit} updates in a row were not finite; the last: {where}")

    def start_envs_anew(self) -> None:
        """Re-seed the envs by the number of updates done, and begin new episodes: the rule that resuming follows,
        too."""
        self.env.reseed(self.update)
        self.collector.restart()
        self._forget_episodes()

    def _forget_episodes(self) -> None:
        self.episodes.restart()
        if self.reward_normalizer is not None:
            self.reward_normalizer.restart()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        modules = {
            "policy": self.policy,
            "observation_normalizer": self.observation_normalizer,
            "reward_normalizer": self.reward_normalizer,
            "value_normalizer": self.value_normalizer,
        }
        return {
            "modules": {name: module.state_dict() for name, module in modules.items() if module is not None},
            "algorithm": self.algorithm.state_dict(),
            "episodes": self.episodes.state_dict(),
            "counters": {"update": self.update, "env_steps": self.env_steps, "seconds": self.seconds},
            "rng": checkpoint.rng_state(self.device),
            "env": self.env.state_dict(),
            "env_id": self.env.id,
            "config": to_yaml(self.config),
        }

    def load_state_dict(self, state: dict[str, Any], where: str) -> None:
        """Restore what `state_dict` gave; envs that cannot restore their state start anew, seeded by the update.

        Raises:
            CheckpointError: a tensor is missing or of another shape; names it.
        """
        for name in ("policy", "observation_normalizer", "reward_normalizer", "value_normalizer"):
            module = getattr(self, name)
            if module is not None:
                checkpoint.load_module(module, state["modules"].get(name, {}), f"{where}: {name}")
        self.algorithm.load_state_dict(state["algorithm"])
        self.episodes.load_state_dict(state["episodes"])
        self.update, self.env_steps = state["counters"]["update"], state["counters"]["env_steps"]
        self.seconds = state["counters"]["seconds"]
        if state["env"] is not None and distributed.world_size() == 1:
            self.collector.resume_from(self.env.load_state_dict(state["env"]))
        else:
            self.start_envs_anew()
        if distributed.rank() == 0:
            checkpoint.restore_rng_state(state["rng"], self.device)
        else:
            torch.manual_seed(self.config.seed + 1_000_003 * distributed.rank() + 7919 * self.update)


def train(config: Config, folder: RunFolder, resumed: bool) -> int:
    """Run until ``total_steps``, a signal, or an error; returns the exit status.

    Args:
        config: validated.
        folder: the run's folder, made already; with ``resumed`` its newest checkpoint is continued.
        resumed: whether this continues a run.

    Raises:
        ConfigError, EnvError, CheckpointError, TrainingError: one line each.
    """
    is_main = distributed.rank() == 0
    if not is_main:
        config.logging.console, config.wandb.mode = "none", "disabled"
    console = make_console(config.logging, run_name(config))
    trainer: Trainer | None = None
    try:
        with StopSignal() as stop:
            trainer = Trainer(config, console, stop)
            return _Session(trainer, folder, resumed).run()
    finally:
        if trainer is not None:
            trainer.env.close()
        console.close()


class _Session:
    """A trainer with its folder: metrics, checkpoints, summary."""

    def __init__(self, trainer: Trainer, folder: RunFolder, resumed: bool):
        self.trainer, self.folder, self.console = trainer, folder, trainer.console
        self.is_main = distributed.rank() == 0
        config = trainer.config
        previous_run: str | None = None
        if resumed:
            state = checkpoint.load_newest(folder.checkpoints, self.console.notice, trainer.device)
            trainer.load_state_dict(state, str(folder.checkpoints))
            previous_run = state["wandb_id"]
        if self.is_main:
            folder.write_config(config)
            self.metrics = MetricsFile(folder.metrics, keep_updates=trainer.update)
            self.wandb = WandbLogger(
                config.wandb, folder.path, folder.path.name, run_tags(config, trainer.env.id, trainer.backend),
                {**to_dict(config), "env_id": trainer.env.id, "previous_wandb_run": previous_run},
                self.metrics.kept, self.console.notice,
            )  # fmt: skip
        self._last_save = time.monotonic()

    def run(self) -> int:
        """The loop over updates."""
        trainer = self.trainer
        env, config = trainer.env, trainer.config
        self.console.notice(
            f"{env.id} on {env.engine}, {config.num_envs} envs x {config.rollout_length} steps, "
            f"{machine(trainer.device)}, credit {config.credit.estimator} on {trainer.backend}; {self.folder.path}"
        )
        status = "failed"
        exit_status = 1
        try:
            trainer.clock.lap()
            while not trainer.finished and not self._stop_agreed():
                metrics = trainer.train_one_update()
                with trainer.clock.phase("log"):
                    self._record(metrics)
            status, exit_status = ("finished", 0) if trainer.finished else ("stopped", trainer.stop.exit_status)
        finally:
            self._finish(status, exit_status)
        return exit_status

    def _stop_agreed(self) -> bool:
        return distributed.any_rank(self.trainer.stop.received, self.trainer.device)

    def _record(self, metrics: dict[str, Any]) -> None:
        trainer = self.trainer
        if not self.is_main:
            return
        self.metrics.write(metrics)
        self.wandb.log({key: finite(value) for key, value in metrics.items()})
        self.console.show(metrics, trainer.progress)
        settings = trainer.config.checkpoint
        due = settings.interval_updates and trainer.update % settings.interval_updates == 0
        if due or time.monotonic() - self._last_save > settings.interval_seconds:
            self._save()

    def _save(self) -> None:
        state = {**self.trainer.state_dict(), "wandb_id": self.wandb.id}
        checkpoint.save(self.folder.checkpoints, self.trainer.update, state)
        self._last_save = time.monotonic()

    def _finish(self, status: str, exit_status: int) -> None:
        """Save and sum up, also when the loop failed: the last state that was applied is a good one."""
        if not self.is_main:
            return
        trainer = self.trainer
        self._save()
        self.metrics.close()
        summary = {
            "status": status,
            "algo": trainer.config.algo,
            "env_id": trainer.env.id,
            "engine": trainer.env.engine,
            "seed": trainer.config.seed,
            "credit_backend": trainer.backend,
            "updates": trainer.update,
            "env_steps": trainer.env_steps,
            "seconds": trainer.seconds,
            "steps_per_second": trainer.env_steps / trainer.seconds if trainer.seconds else None,
            "episodes": trainer.episodes.ended,
            "episode_return": trainer.episodes.mean_return(),
            "episode_length": trainer.episodes.mean_length(),
            "machine": machine(trainer.device),
            "torch": torch.__version__,
        }
        write_json(self.folder.summary, summary)
        self.wandb.finish(summary, exit_status)
        self.console.close()
        window, mean = len(trainer.episodes.returns), trainer.episodes.mean_return()
        self.console.notice(
            f"{status} after {trainer.env_steps} steps, {trainer.update} updates, {trainer.seconds:.1f} s; mean return "
            f"of the last {window} episodes {'-' if mean is None else f'{mean:.2f}'}; {self.folder.path}"
        )
