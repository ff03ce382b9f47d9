"""Small asynchronous runs in this process: CartPole, 8 envs, two actors, a tiny network."""

from __future__ import annotations

from typing import Any

from small_runs import small_config

from trainer.config import Config
from trainer.console import QuietConsole
from trainer.loop import Trainer

IMPALA = ("algo=impala", "impala.num_minibatches=2", "impala.optimizer=adam")


def impala_config(*overrides: str) -> Config:
    return small_config(*IMPALA, *overrides)


def updates(count: int, *overrides: str, made: list[Trainer] | None = None) -> list[dict[str, Any]]:
    """The metrics of a run's first updates; its trainer is left in ``made``, closed."""
    trainer = Trainer(impala_config(*overrides), QuietConsole())
    if made is not None:
        made.append(trainer)
    trainer.clock.start()
    try:
        return [trainer.train_one_update() for _ in range(count)]
    finally:
        trainer.close()
