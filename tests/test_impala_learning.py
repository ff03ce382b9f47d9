"""IMPALA solves CartPole with asynchronous actors on a CPU, within a minute."""

from __future__ import annotations

import pytest

from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.schema import compose_config

QUIET = (
    "algo=impala",
    "env=CartPole",
    "device=cpu",
    "env.num_threads=1",
    "wandb.mode=disabled",
    "logging.console=none",
)


def steps_to_solve(*overrides: str) -> int | None:
    """Env steps until the mean return of the last 100 episodes is at least 475; None if that never came."""
    trainer = Trainer(compose_config([*QUIET, *overrides]), QuietConsole())
    trainer.clock.start()
    try:
        while not trainer.finished:
            metrics = trainer.train_one_update()
            if (metrics["episode_return"] or 0.0) >= 475.0:
                return trainer.env_steps
        return None
    finally:
        trainer.close()


def test_cartpole_is_solved_by_actors_that_do_not_wait():
    assert steps_to_solve("seed=1") is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "overrides",
    [("seed=2",), ("seed=3",), ("credit.estimator=retrace", "impala.learning_rate=7e-4", "seed=1")],
)
def test_cartpole_is_solved_by_other_seeds_and_by_retrace(overrides: tuple[str, ...]):
    assert steps_to_solve(*overrides) is not None
