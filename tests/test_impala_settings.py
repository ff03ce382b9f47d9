"""IMPALA's settings: what is refused by name before an actor starts, and what is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from impala_runs import impala_config, updates
from small_runs import small_config

from trainer import checkpoint
from trainer.config import ConfigError
from trainer.run_folder import RunFolder
from trainer.schema import compose_for_resume
from trainer.session import train


def test_retrace_with_continuous_actions_is_refused_before_an_actor_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"credit.estimator=retrace: it needs Discrete actions, not Box"):
        train(impala_config("env.id=Pendulum", "credit.estimator=retrace", "out=run"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("num_envs=9", "env.pools=2"), "num_envs=9 does not divide into env.pools=2 actors"),
        (("num_envs=1", "env.pools=2"), "num_envs=1 does not divide into env.pools=2 actors"),
        (("impala.rollouts_per_update=3",), "impala.rollouts_per_update=3 does not divide the 2 actors"),
        (("impala.num_minibatches=65",), "impala.num_minibatches=65 is more than the 64 rows of a batch"),
        (("impala.num_minibatches=9", "policy.core=gru"), "impala.num_minibatches=9 is more than the 8 envs"),
        (("credit.estimator=gae",), "credit.estimator=gae is not for algo=impala, which takes vtrace or retrace"),
        (("impala.max_lag=2", "impala.force_lag=4"), "impala.force_lag=4 can never keep impala.max_lag=2"),
        (("impala.max_lag=0",), "impala.max_lag=0 with impala.max_lag_action=drop"),
        (("impala.max_lag=1", "impala.rollouts_per_update=1"), "set max_lag to at least 2"),
        (("impala.max_lag=0", "impala.rollouts_per_update=1", "impala.queue_size=2"), "set max_lag to at least 1"),
        (("impala.max_lag=-1",), "impala.max_lag=-1 must be"),
        (("impala.max_lag_action=block",), "impala.max_lag_action=block bounds nothing where impala.max_lag=null"),
        (("impala.max_lag_action=wait",), "impala.max_lag_action=wait is not one of drop, block"),
        (("env.reseed_interval=3",), "env.reseed_interval=3 needs actors that wait"),
        (("normalize.rewards=true", "impala.rollouts_per_update=1"), "normalize.rewards=true"),
        (("normalize.rewards=true", "impala.max_lag=2"), "normalize.rewards=true"),
    ],
)
def test_impossible_settings_are_refused_by_name(overrides: tuple[str, ...], named: str):
    with pytest.raises(ConfigError) as refusal:
        impala_config(*overrides)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("impala.queue_size=1",),
        ("impala.queue_size=1", "impala.rollouts_per_update=1"),
        ("impala.max_lag_action=block", "normalize.rewards=true"),
    ],
)
def test_a_lag_of_zero_is_taken_and_kept_where_memory_or_blocking_bounds_it(overrides: tuple[str, ...]):
    for metrics in updates(6, "impala.max_lag=0", *overrides):
        assert metrics["lag/max"] == metrics["lag/dropped_rollouts"] == 0


def test_keys_of_ppo_are_not_checked_where_impala_learns():
    alone = ("num_envs=1", "rollout_length=1", "impala.num_minibatches=1")
    assert impala_config(*alone, "ppo.num_minibatches=2", "ppo.learning_rate=1").num_envs == 1


def test_a_single_env_is_learned_from_in_minibatches_of_its_rows():
    (metrics,) = updates(1, "num_envs=1", "impala.num_minibatches=4")
    assert metrics["skipped_minibatches"] == 0
    assert metrics["grad_norm"] > 0


def test_another_optimizer_does_not_continue_a_run(tmp_path: Path):
    assert train(impala_config("out=run", "total_steps=200"), tmp_path) == 0
    run = RunFolder.existing(tmp_path / "run")
    config = compose_for_resume(run.config.read_text(), ["impala.optimizer=rmsprop", "total_steps=400"])
    with pytest.raises(checkpoint.CheckpointError, match=r"impala.optimizer=rmsprop, but the checkpoint is of adam"):
        train(config, tmp_path, run)


def test_ppo_does_not_learn_by_retrace():
    with pytest.raises(ConfigError, match=r"credit.estimator=retrace is not for algo=ppo"):
        small_config("credit.estimator=retrace")
