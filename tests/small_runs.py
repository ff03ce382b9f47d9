"""Runs small enough for a test, in this process: CartPole, 8 envs, 8 steps, a tiny network."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from trainer import session
from trainer.config import Config
from trainer.schema import compose_config

SMALL = (
    "env=CartPole",
    "num_envs=8",
    "rollout_length=8",
    "total_steps=100000",
    "device=cpu",
    "env.num_threads=1",
    "policy.hidden_sizes=[8]",
    "ppo.update_epochs=2",
    "ppo.num_minibatches=2",
    "wandb.mode=disabled",
    "logging.console=none",
)
#: Differ between two runs of the same seed.
TIMES = ("seconds", "steps_per_second")


def small_config(*overrides: str) -> Config:
    """A small run's configuration."""
    return compose_config([*SMALL, *overrides])


class StoppingConsole:
    """Collects notices, and sends this process a signal once an update is done."""

    def __init__(self, update: int, number: int = signal.SIGTERM):
        self.update, self.number = update, number
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        if metrics["update"] == self.update:
            os.kill(os.getpid(), self.number)

    def close(self) -> None:
        pass


def run_until(update: int, config: Config, base: Path, continued: Any = None, number: int = signal.SIGTERM) -> int:
    """Train until a signal after this update; the exit status."""
    console = StoppingConsole(update, number)
    original = session.make_console
    session.make_console = lambda *_: console
    try:
        return session.train(config, base, continued)
    finally:
        session.make_console = original


def rows(folder: Path) -> list[dict[str, Any]]:
    """The objects of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what the clock decided."""
    return {key: value for key, value in row.items() if key not in TIMES and not key.startswith(("time/", "share/"))}


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places where two nested structures of tensors and values differ, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {str(key): key for key in [*a, *b]}
        return [d for name, key in keys.items() for d in differences(a.get(key), b.get(key), f"{where}/{name}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for index, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, f"{where}/{index}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    else:
        same = type(a) is type(b) and a == b
    return [] if same else [where]
