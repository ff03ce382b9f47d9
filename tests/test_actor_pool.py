"""Asynchronous actors: what a run logs, how it ends, and how it goes on."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from impala_runs import impala_config, updates
from small_runs import differences, rows, run_until

from envs import envpool_worker
from envs.base import EnvError
from envs.envpool_cpu import EnvPoolVecEnv
from trainer import actor_pool, actors, checkpoint
from trainer.console import QuietConsole
from trainer.impala import Impala
from trainer.loop import Trainer
from trainer.run_folder import RunFolder
from trainer.schema import compose_for_resume
from trainer.session import train
from trainer.timing import PHASES

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Impala, "update", fails)
    with pytest.raises(RuntimeError, match="shapes differ"):
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
    with pytest.raises(EnvError, match=r"pool of envs (0 .. 3|4 .. 7) of CartPole-v1: no answer for env.timeout=0.5 s"):
        train(impala_config("out=run", "env.timeout=0.5"), tmp_path)
    assert time.monotonic() - started < 15
    released.set()
    time.sleep(0.2)  # the stuck threads end by themselves
    assert checkpoint.load_newest(tmp_path / "run/checkpoints", print)["update"] == len(rows(tmp_path / "run"))


def test_an_env_that_hangs_in_its_actor_s_thread_is_reported_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original, released, steps = CartPoleEnv.step, threading.Event(), itertools.count()

    def step(env: CartPoleEnv, action: Any) -> Any:
        if next(steps) == 700:  # one env of one actor
            released.wait(20)
        return original(env, action)

    monkeypatch.setattr(CartPoleEnv, "step", step)
    monkeypatch.setattr(actor_pool, "distributed", SimpleNamespace(rank=lambda: 1))
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"envs (8 to 11|12 to 15): no answer for env\.timeout=1\.0 s, one .* stuck"):
        train(impala_config("out=run", "env.engine=gymnasium", "env.timeout=1"), tmp_path)
    assert time.monotonic() - started < 15
    released.set()
    time.sleep(0.2)  # the stuck thread ends by itself
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


@pytest.mark.parametrize("lag", [0, 2, 4])
def test_a_forced_lag_goes_on_through_a_resume_bit_for_bit(tmp_path: Path, lag: int):
    settings = ("env.engine=torch", f"impala.force_lag={lag}", "normalize.observations=true")
    assert run_until(6, impala_config(*settings, "out=straight"), tmp_path) == 143
    assert run_until(3, impala_config(*settings, "out=broken"), tmp_path) == 143
    run = RunFolder.existing(tmp_path / "broken")
    torch.manual_seed(12345)  # whatever happened in between
    assert run_until(6, compose_for_resume(run.config.read_text(), []), tmp_path, run) == 143
    straight, broken = (
        checkpoint.load_newest(tmp_path / name / "checkpoints", print) for name in ("straight", "broken")
    )
    changing = {"config", "counters", "rng"}  # the folder's name, seconds, and what seeded the actors
    assert differences(*({k: v for k, v in state.items() if k not in changing} for state in (straight, broken))) == []
    lags = [[row["lag/max"] for row in rows(tmp_path / name)] for name in ("straight", "broken")]
    assert lags[0] == lags[1] == [min(update, lag) for update in range(6)]


def test_a_forced_lag_is_resumed_with_another_number_of_actors(tmp_path: Path):
    assert run_until(3, impala_config("out=run", "env.engine=torch", "impala.force_lag=2"), tmp_path) == 143
    run = RunFolder.existing(tmp_path / "run")
    assert run_until(6, compose_for_resume(run.config.read_text(), ["env.pools=1"]), tmp_path, run) == 143
    assert [row["lag/max"] for row in rows(run.path)] == [0, 1, 2, 0, 1, 2], "envs and versions start anew"


def test_switching_threads_often_changes_no_count():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        metrics = updates(20, "env.pools=4")
    finally:
        sys.setswitchinterval(interval)
    # 64 rows an update, less the filler rows that its episodes left
    steps = [b["env_steps"] - a["env_steps"] for a, b in itertools.pairwise(metrics)]
    assert all(48 <= step <= 64 for step in steps)
    assert sum(metrics[-1]["lag/histogram"]) == 80


def test_the_learner_waits_for_the_device_before_it_copies_from_it(monkeypatch: pytest.MonkeyPatch):
    """A copy to pageable memory that waits for its stream holds up the copies of all other threads."""
    trainer, calls = Trainer(impala_config(), QuietConsole()), []
    read, tolist = trainer.clock.read, torch.Tensor.tolist
    monkeypatch.setattr(trainer.clock, "read", lambda: (calls.append("waits"), read())[1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (calls.append("copies"), tolist(tensor))[1])
    try:
        trainer.clock.start()
        trainer.train_one_update()
    finally:
        trainer.close()
    assert calls[-2:] == ["waits", "copies"]


@pytest.mark.parametrize(("detail", "expected"), [("normal", False), ("high", True)])
def test_the_clocks_of_actors_are_as_detailed_as_the_learners(
    monkeypatch: pytest.MonkeyPatch, detail: str, expected: bool
):
    asked: list[bool] = []
    original = actors.make_clock
    monkeypatch.setattr(actors, "make_clock", lambda *given: asked.append(given[1]) or original(*given))
    updates(1, f"timing.detail={detail}")
    assert asked == [expected, expected]
