"""One run from start to end: the loop over updates with its folder, checkpoints, console and exit status."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from envs.checks import memory_errors
from trainer import checkpoint, distributed
from trainer.config import Config, ConfigError
from trainer.console import make_console
from trainer.keys import get
from trainer.loop import Trainer
from trainer.metrics import MetricsFile, WandbLogger, finite, write_json
from trainer.report import engine_name, machine, run_name, run_tags
from trainer.run_folder import RunFolder, refuse_taken
from trainer.schema import to_dict
from trainer.signals import StopSignal

_STOPPED_BY_ANOTHER_RANK = 128 + signal.SIGTERM
#: What decides how much memory a run takes, by algorithm.
_SIZES = {
    "ppo": ("num_envs", "rollout_length", "policy.hidden_sizes"),
    "impala": ("num_envs", "rollout_length", "impala.queue_size", "policy.hidden_sizes"),
}


def train(config: Config, base: Path, continued: RunFolder | None = None) -> int:
    """Run until ``total_steps``, a signal, or an error; returns the exit status.

    A new run's folder is made once everything else stands: a run that is refused leaves none.

    Args:
        config: validated.
        base: what a relative ``out`` is relative to.
        continued: the run whose newest checkpoint is continued in place; None starts a new run.

    Raises:
        ConfigError, EnvError, CheckpointError, TrainingError, OSError: one line each.
        RuntimeError: an env or a module of one's own called `sys.exit`.
    """
    if continued is None:
        refuse_taken(config, base)
    if distributed.rank() != 0:
        config.logging.console, config.wandb.mode = "none", "disabled"
    console = make_console(config.logging, run_name(config))
    is_main = distributed.rank() == 0
    sizes = ", ".join(f"{key}={get(config, key)}" for key in _SIZES[config.algo])
    with memory_errors(f"{sizes}: the run", ConfigError), _exits_told(), ExitStack() as opened:
        opened.callback(console.close)
        if continued is not None and is_main:
            opened.enter_context(continued.held())
        with StopSignal() as stop:
            trainer = opened.enter_context(closing(Trainer(config, console)))
            session = _Session(trainer, stop)
            previous_wandb_run = session.load(continued.checkpoints) if continued is not None else None
            if is_main:
                folder = continued or opened.enter_context(RunFolder.create(config, base).held())
                session.open(folder, previous_wandb_run)
            status = session.run()
            return stop.exit_status or status  # a finished run may have got its signal while it was summed up


@contextmanager
def _exits_told() -> Iterator[None]:
    """An env's `sys.exit` must not pass for the end of the run, nor end the other jobs of a sweep."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"an env or a module of one's own called sys.exit({error.code})") from error


class _Session:
    """A trainer with its folder: metrics, checkpoints, summary."""

    def __init__(self, trainer: Trainer, stop: StopSignal):
        self.trainer, self.console, self.stop = trainer, trainer.console, stop
        self.is_main = distributed.rank() == 0
        self._last_save = time.monotonic()

    def load(self, checkpoints: Path) -> str | None:
        """Go on from the newest whole checkpoint; the id of the wandb run that it belongs to, if there is one."""
        if not checkpoint.list_checkpoints(checkpoints):  # killed before its first was due
            self.console.notice(f"{checkpoints} holds no checkpoint: the run begins again, at update 0")
            return None
        state = checkpoint.load_newest(checkpoints, self.console.notice, self.trainer.device)
        self.trainer.load_state_dict(state, str(checkpoints))
        if self.trainer.finished:
            total = self.trainer.config.total_steps
            self.console.notice(f"all of total_steps={total} are done; total_steps=<more> goes on")
        return state.get("wandb_id")

    def open(self, folder: RunFolder, previous_wandb_run: str | None) -> None:
        """Begin the run's files and its wandb run."""
        env, config, backend = self.trainer.env, self.trainer.config, self.trainer.backend
        self.folder = folder
        self._open_files()
        self.wandb = WandbLogger(
            config.wandb, folder.path, folder.path.name, run_tags(config, env.id, backend),
            {**to_dict(config), "env_id": env.id, "previous_wandb_run": previous_wandb_run},
            self.metrics.kept, self.console.notice,
        )  # fmt: skip
        self.console.notice(
            f"{env.id} on {engine_name(config)}, {config.num_envs} envs x {config.rollout_length} steps, "
            f"{machine(self.trainer.device)}, credit {config.credit.estimator} on {backend}; {folder.path}"
        )

    def _open_files(self) -> None:
        self.folder.write_config(self.trainer.config)
        self.metrics = MetricsFile(self.folder.metrics, keep_updates=self.trainer.update)

    def run(self) -> int:
        """The loop over updates; returns the exit status."""
        trainer = self.trainer
        status, exit_status = "failed", 1
        try:
            trainer.clock.start()  # building the parts was no turn of the loop
            while not trainer.finished and not self._stop_agreed():
                metrics = trainer.train_one_update()
                with trainer.clock.phase("log"):
                    self._record(metrics)
                trainer.refuse_to_go_on_unfinite()
            status, exit_status = "finished", 0
            if not trainer.finished:
                status, exit_status = "stopped", self.stop.exit_status or _STOPPED_BY_ANOTHER_RANK
        finally:
            self._finish(status, exit_status)
        return exit_status

    def _stop_agreed(self) -> bool:
        return distributed.any_rank(self.stop.received, self.trainer.device)

    def _record(self, metrics: dict[str, Any]) -> None:
        trainer = self.trainer
        if not self.is_main:
            return
        self.metrics.write(metrics)
        self.wandb.log(finite(metrics))
        self.console.show(metrics, trainer.progress)
        settings = trainer.config.checkpoint
        due = settings.interval_updates and trainer.update % settings.interval_updates == 0
        if due or time.monotonic() - self._last_save > settings.interval_seconds:
            self._save()

    def _save(self) -> None:
        if not self.folder.config.exists():
            self.console.notice(f"{self.folder.path} was removed while the run goes on: its metrics so far are lost")
            self.metrics.close()
            self._open_files()
        state = {**self.trainer.state_dict(), "wandb_id": self.wandb.id}
        checkpoint.save(self.folder.checkpoints, self.trainer.update, state)
        self._last_save = time.monotonic()

    def _finish(self, status: str, exit_status: int) -> None:
        """Save and sum up, also when the loop failed: unless that was half way through an update, the state is good."""
        if not self.is_main:
            return
        trainer = self.trainer
        try:
            if trainer.is_whole:
                self._save()
        finally:
            self.metrics.close()
            summary = {"status": status, **_summary(trainer)}
            write_json(self.folder.summary, summary)
            self.wandb.finish(summary, exit_status)
            self.console.close()
        mean, path = trainer.episode_statistics.episode_return, self.folder.path
        where = f"resume={path} goes on" if status == "stopped" else path
        self.console.notice(
            f"{status} after {trainer.env_steps} steps, {trainer.update} updates, {trainer.seconds:.1f} s; mean return "
            f"of the last episodes {'-' if mean is None else f'{mean:.2f}'}; {where}"
        )


def _summary(trainer: Trainer) -> dict[str, Any]:
    return {
        "algo": trainer.config.algo,
        "env_id": trainer.env.id,
        "engine": trainer.env.engine,
        "seed": trainer.config.seed,
        "credit_backend": trainer.backend,
        "updates": trainer.update,
        "env_steps": trainer.env_steps,
        "seconds": trainer.seconds,
        "steps_per_second": trainer.env_steps / trainer.seconds if trainer.seconds else None,
        **trainer.episode_statistics._asdict(),
        "machine": machine(trainer.device),
        "torch": torch.__version__,
    }
