"""Asynchronous actors: what a run logs, how it ends, how old policies may be, and what is refused before it starts."""

from __future__ import annotations

import gc
import itertools
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import differences, rows, run_until, small_config, without_times

import envs
from envs import envpool_worker
from envs.base import EnvError
from envs.envpool_cpu import EnvPoolVecEnv
from envs.group import EnvGroup
from trainer import checkpoint, evaluate
from trainer.config import Config, ConfigError
from trainer.console import QuietConsole
from trainer.impala import Impala
from trainer.loop import Trainer
from trainer.run_folder import RunFolder
from trainer.schema import compose_for_resume
from trainer.session import train
from trainer.timing import PHASES

IMPALA = ("algo=impala", "impala.num_minibatches=2", "impala.optimizer=adam")


def impala_config(*overrides: str) -> Config:
    return small_config(*IMPALA, *overrides)


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Trainers that are closed when the test ends."""
    made: list[Trainer] = []
    yield made
    for trainer in made:
        trainer.close()


def updates(trainers: list[Trainer], count: int, *overrides: str) -> list[dict[str, Any]]:
    trainer = Trainer(impala_config(*overrides), QuietConsole())
    trainers.append(trainer)
    trainer.clock.start()
    return [trainer.train_one_update() for _ in range(count)]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    if _started_since(before):
        gc.collect()  # an env that was refused half way through the start is dropped, not closed
    for thread in _started_since(before):
        thread.join(2.0 if thread.name.startswith("pool") else 0.0)
    assert [thread.name for thread in _started_since(before)] == []


def _started_since(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in set(threading.enumerate()) - before if t.name.startswith(("actor", "pool"))]


def test_a_run_finishes_and_logs_what_every_run_logs(tmp_path: Path):
    assert train(impala_config("out=run", "total_steps=2000"), tmp_path) == 0
    metrics = rows(tmp_path / "run")
    assert metrics[-1]["env_steps"] >= 2000
    for row in metrics:
        phases = sum(row[f"time/{name}_ms"] for name in PHASES)
        assert phases == pytest.approx(row["time/total_ms"], rel=1e-6), "what the learner waited for is explained"
        assert 0 <= row["learner/idle"] <= 1
        assert 0 <= row["actor/idle"] <= 1
        assert row["lag/min"] <= row["lag/mean"] <= row["lag/max"] <= 2
        for actor in (0, 1):
            of_actor = {key: value for key, value in row.items() if key.startswith(f"actor/{actor}/")}
            total = of_actor.pop(f"actor/{actor}/total_ms")
            assert sum(of_actor.values()) == pytest.approx(total, rel=1e-6)
    assert sum(metrics[-1]["lag/histogram"]) == 2 * len(metrics)
    assert metrics[-1]["episodes"] > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["algo"]) == ("finished", "impala")


def fails_after(calls: int, error: Exception) -> Any:
    """A `recv` that raises in its n-th call."""
    original, seen = EnvPoolVecEnv.recv, []

    def recv(self: EnvPoolVecEnv, pool: int) -> Any:
        seen.append(pool)
        if len(seen) == calls:
            raise error
        return original(self, pool)

    return recv


def test_an_exception_in_an_actor_ends_the_run_with_its_own_traceback_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(EnvPoolVecEnv, "recv", fails_after(101, ValueError("boom")))
    with pytest.raises(ValueError, match="boom") as failure:
        train(impala_config("out=run"), tmp_path)
    frames = [frame.name for frame in traceback.extract_tb(failure.value.__traceback__)]
    assert {"run", "collect", "recv"} <= set(frames), "the actor's thread is in the traceback"
    done = rows(tmp_path / "run")
    assert done
    assert checkpoint.load_newest(tmp_path / "run/checkpoints", print)["update"] == len(done)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_an_exception_in_the_learner_ends_the_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(self: Impala, *_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Impala, "update", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(impala_config("out=run"), tmp_path)


def test_an_env_that_does_not_answer_is_reported_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original, released = envpool_worker._serve, threading.Event()

    def serve(pool: Any, requests: Any, replies: Any) -> None:
        steps = iter(range(40))

        class Slow:
            def recv(self) -> Any:
                if next(steps, None) is None:
                    released.wait(20)
                return pool.recv()

        original(Slow(), requests, replies)

    monkeypatch.setattr(envpool_worker, "_serve", serve)
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"pool of envs 0 .. 3 of CartPole-v1: no answer for env.timeout=0.5 s"):
        train(impala_config("out=run", "env.timeout=0.5"), tmp_path)
    assert time.monotonic() - started < 15
    released.set()
    time.sleep(0.2)  # the stuck threads end by themselves
    assert checkpoint.load_newest(tmp_path / "run/checkpoints", print)["update"] == len(rows(tmp_path / "run"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_run_goes_on_from_there(tmp_path: Path, number: signal.Signals):
    assert run_until(3, impala_config("out=run"), tmp_path, number=number) == 128 + number
    run = RunFolder.existing(tmp_path / "run")
    before = rows(run.path)
    assert checkpoint.load_newest(run.checkpoints, print)["update"] == len(before) >= 3
    resumed = compose_for_resume(run.config.read_text(), [])
    assert run_until(len(before) + 2, resumed, tmp_path, run) == 143
    after = rows(run.path)
    assert after[: len(before)] == before
    assert after[-1]["env_steps"] > before[-1]["env_steps"]
    assert after[-1]["update"] >= len(before) + 2


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_forced_lag_acts_with_the_parameters_of_so_many_updates_ago(
    trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch, lag: int
):
    history: list[dict[str, torch.Tensor]] = []
    errors: list[float] = []
    original = Impala.update

    def update(self: Impala, rollout: Any, rewards: torch.Tensor, progress: float) -> Any:
        present = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        history.append(present)
        self.policy.load_state_dict(history[max(0, len(history) - 1 - lag)])
        log_probs = self.policy.distribution(rollout.observations[:-1]).log_prob(rollout.actions)
        errors.append(float((log_probs - rollout.log_probs)[rollout.valid].detach().abs().max()))
        self.policy.load_state_dict(present)
        return original(self, rollout, rewards, progress)

    monkeypatch.setattr(Impala, "update", update)
    metrics = updates(trainers, 8, f"impala.force_lag={lag}", "impala.learning_rate=0.01")
    assert max(errors) < 1e-5, "two batch sizes of the same float32 network"
    assert [m["lag/max"] for m in metrics] == [m["lag/min"] for m in metrics] == [min(u, lag) for u in range(8)]
    assert metrics[-1]["lag/histogram"][-1] == 2 * (8 - lag)
    assert not any(thread.name.startswith("actor") for thread in threading.enumerate())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_window_was_collected_by_the_version_that_it_names(
    trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch, device: str
):
    """Half-written weights, or on CUDA a rollout that is read before it is complete, would show in the log-probs."""
    history: list[dict[str, torch.Tensor]] = []
    errors: list[float] = []
    original = Impala.update

    def update(self: Impala, rollout: Any, rewards: torch.Tensor, progress: float) -> Any:
        history.append({name: tensor.clone() for name, tensor in self.policy.state_dict().items()})
        for note in trainers[0].source._notes.values():
            columns = slice(4 * note.actor, 4 * note.actor + 4)
            self.policy.load_state_dict(history[note.version])
            distribution = self.policy.distribution(rollout.observations[:-1, columns])
            difference = distribution.log_prob(rollout.actions[:, columns]) - rollout.log_probs[:, columns]
            errors.append(float(difference[rollout.valid[:, columns]].detach().abs().max()))
        self.policy.load_state_dict(history[-1])
        return original(self, rollout, rewards, progress)

    monkeypatch.setattr(Impala, "update", update)
    overrides = ("impala.learning_rate=0.01", "matmul_precision=highest", f"device={device}")
    metrics = updates(trainers, 12, *overrides)
    assert max(errors) < 1e-5, "two batch sizes of the same float32 network"
    assert max(m["lag/max"] for m in metrics) >= 1


def test_a_forced_lag_repeats_bit_for_bit(trainers: list[Trainer]):
    def numbers() -> list[dict[str, Any]]:
        metrics = updates(trainers, 4, "impala.force_lag=2", "normalize.observations=true")
        return [
            {k: v for k, v in without_times(m).items() if not k.startswith(("share", "learner", "actor"))}
            for m in metrics
        ]

    assert numbers() == numbers()


def test_at_lag_zero_the_policies_are_one_though_statistics_move(trainers: list[Trainer]):
    overrides = ("impala.force_lag=0", "normalize.observations=true", "impala.num_minibatches=1")
    for metrics in updates(trainers, 4, *overrides, "impala.learning_rate=0.01"):
        assert metrics["loss/approx_kl"] == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("how", ["impala.force_lag=3", "impala.rollouts_per_update=1"])
def test_a_policy_that_does_not_learn_is_the_same_policy_after_any_lag_and_though_statistics_move(
    trainers: list[Trainer], how: str
):
    """The learner scales a window as its actor did, whatever the statistics are by now."""
    metrics = updates(trainers, 8, how, "normalize.observations=true", "impala.learning_rate=0")
    assert max(m["lag/max"] for m in metrics) >= 1
    for m in metrics:
        assert m["loss/approx_kl"] == pytest.approx(0, abs=1e-10)


def slow_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Impala.update

    def update(self: Impala, *args: Any) -> Any:
        time.sleep(0.05)
        return original(self, *args)

    monkeypatch.setattr(Impala, "update", update)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_block_keeps_every_rollout_within_the_lag_that_is_allowed(
    trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch, max_lag: int
):
    slow_learner(monkeypatch)
    limits = (f"impala.max_lag={max_lag}", "impala.max_lag_action=block", "impala.queue_size=8")
    metrics = updates(trainers, 10, *limits)
    assert max(m["lag/max"] for m in metrics) == max_lag, "a learner this slow lets actors run ahead as far as they may"
    assert metrics[-1]["lag/dropped_rollouts"] == 0


def test_drop_learns_from_no_rollout_that_is_too_old_and_loses_no_episode(
    trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch
):
    slow_learner(monkeypatch)
    metrics = updates(trainers, 8, "impala.max_lag=2", "impala.max_lag_action=drop", "impala.queue_size=8")
    assert max(m["lag/max"] for m in metrics) <= 2
    dropped = metrics[-1]["lag/dropped_rollouts"]
    assert dropped > 0
    assert dropped % 2 == 0, "the batches of both actors"
    # CartPole pays 1 a step: an episode's return is its length, which a gap would break
    episodes = trainers[0].episodes
    assert episodes.ended > 0
    assert list(episodes.returns) == list(episodes.lengths)
    assert all(length >= 8 for length in episodes.lengths)


def test_groups_of_actors_take_turns_and_rollouts_name_their_envs(
    trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch
):
    columns = []
    original = Impala.update

    def update(self: Impala, rollout: Any, *args: Any) -> Any:
        columns.append((rollout.columns.start, rollout.columns.stop, rollout.valid.shape[1]))
        return original(self, rollout, *args)

    monkeypatch.setattr(Impala, "update", update)
    metrics = updates(trainers, 6, "env.pools=4", "impala.rollouts_per_update=2")
    assert columns == [(0, 4, 4), (4, 8, 4)] * 3
    assert all(m["lag/max"] <= 3 for m in metrics)
    assert all(length >= 8 for length in trainers[0].episodes.lengths)


def test_switching_threads_often_changes_no_count(trainers: list[Trainer]):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        metrics = updates(trainers, 20, "env.pools=4")
    finally:
        sys.setswitchinterval(interval)
    # 64 rows an update, less the filler rows that its episodes left
    steps = [b["env_steps"] - a["env_steps"] for a, b in itertools.pairwise(metrics)]
    assert all(48 <= step <= 64 for step in steps)
    assert sum(metrics[-1]["lag/histogram"]) == 80


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", ["vtrace", "retrace"])
def test_actors_share_a_gpu_engine_in_groups_on_streams_of_their_own(trainers: list[Trainer], estimator: str):
    overrides = ("env.engine=torch", "device=cuda", f"credit.estimator={estimator}", "num_envs=256", "env.pools=4")
    metrics = updates(trainers, 30, *overrides, "normalize.observations=true")
    assert metrics[-1]["skipped_minibatches"] == 0
    assert metrics[-1]["credit_backend"] == "triton"
    assert all(length >= 8 for length in trainers[0].episodes.lengths)
    phases = sum(metrics[-1][f"time/{name}_ms"] for name in PHASES)
    assert phases == pytest.approx(metrics[-1]["time/total_ms"], rel=1e-3)


@pytest.mark.parametrize("estimator", ["vtrace", "retrace"])
@pytest.mark.parametrize("engine", ["envpool", "torch"])
def test_every_engine_and_estimator_trains_saves_and_is_evaluated(tmp_path: Path, engine: str, estimator: str):
    overrides = (f"env.engine={engine}", f"credit.estimator={estimator}", "impala.update_epochs=2")
    assert train(impala_config("out=run", "total_steps=400", *overrides), tmp_path) == 0
    config, state = evaluate.load_checkpoint(tmp_path / "run")
    result = evaluate.evaluate(config, state, 5, 1000, True, torch.device("cpu"))
    assert len(result.returns) == 5


def test_retrace_with_continuous_actions_is_refused_before_an_actor_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"credit.estimator=retrace: it needs Discrete actions, not Box"):
        train(impala_config("env.id=Pendulum", "credit.estimator=retrace", "out=run"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("num_envs=9",), "num_envs=9 does not divide into env.pools=2 actors"),
        (("num_envs=1", "env.pools=2"), "num_envs=1 does not divide into env.pools=2 actors"),
        (("impala.rollouts_per_update=3",), "impala.rollouts_per_update=3 does not divide the 2 actors"),
        (("impala.num_minibatches=9",), "impala.num_minibatches=9 is more than the 8 envs of a batch"),
        (("credit.estimator=gae",), "credit.estimator=gae is not for algo=impala, which takes vtrace or retrace"),
        (("impala.max_lag=2", "impala.force_lag=4"), "impala.force_lag=4 can never keep impala.max_lag=2"),
        (("impala.max_lag=0",), "impala.max_lag=0 with impala.max_lag_action=drop"),
        (("impala.max_lag=-1",), "impala.max_lag=-1 must be"),
        (("impala.max_lag_action=wait",), "impala.max_lag_action=wait is not one of drop, block"),
        (("env.reseed_interval=3",), "env.reseed_interval=3 needs actors that wait"),
        (("normalize.rewards=true", "impala.rollouts_per_update=1"), "normalize.rewards=true"),
    ],
)
def test_impossible_settings_are_refused_by_name(overrides: tuple[str, ...], named: str):
    with pytest.raises(ConfigError) as refusal:
        impala_config(*overrides)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_ppo_does_not_learn_by_retrace():
    with pytest.raises(ConfigError, match=r"credit.estimator=retrace is not for algo=ppo"):
        small_config("credit.estimator=retrace")


def test_a_group_of_envs_steps_as_one_env_with_pools():
    """Actors see the same episodes that PPO's pools do: seeds depend on the column, not on who steps it."""
    options = {"num_threads": 1, "seed": 5}
    whole = envs.make("CartPole", num_envs=6, pools=2, **options)
    group = EnvGroup(
        [envs.make("CartPole", num_envs=3, pools=1, rank=m, world_size=2, **options) for m in range(2)],
    )
    assert group.pools == whole.pools
    torch.manual_seed(0)
    assert torch.equal(whole.reset(), group.reset())
    for epoch in (0, 1):
        for _ in range(40):
            actions = torch.randint(0, 2, (6,))
            for one, other in zip(whole.step(actions), group.step(actions), strict=True):
                assert torch.equal(one, other)
        for env in (whole, group):
            env.reseed(epoch + 1)
        assert differences(whole.reset(), group.reset()) == []
    whole.close()
    group.close()
    with pytest.raises(EnvError, match="at least one member"):
        EnvGroup([])
