"""Signals: the first one saves and leaves with a status of its own, whenever it comes; the second leaves at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, rows, run_until, small_config

from envs.base import EnvError, VecEnv
from envs.envpool_cpu import EnvPoolVecEnv
from trainer import checkpoint, loop
from trainer.collector import Collector
from trainer.config import ConfigError
from trainer.metrics import WandbLogger
from trainer.ppo import PPO
from trainer.run_folder import RunFolder
from trainer.schema import compose_config, compose_for_resume
from trainer.session import train
from trainer.signals import StopSignal

ROOT = Path(__file__).resolve().parent.parent
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGHUP: 129}
#: Where the signal comes, and at which call of it.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "start-up": (loop, "make_training_env", 1),
    "rollout": (Collector, "collect", 2),
    "update": (PPO, "update", 2),
    "checkpoint write": (checkpoint, "save", 1),
    "finish": (WandbLogger, "finish", 1),
}


def signal_in(function: Callable[..., Any], call: int, number: int) -> Callable[..., Any]:
    """The function, with a signal to this process inside its n-th call."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_saves_and_leaves_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals
):
    owner, name, call = MOMENTS[moment]
    total = 130 if moment == "finish" else 100_000
    config = small_config("out=run", f"total_steps={total}", "checkpoint.interval_updates=2")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signal_in(getattr(owner, name), call, number))
        assert train(config, tmp_path) == STATUS[number]

    run = RunFolder.existing(tmp_path / "run")
    state = checkpoint.load_newest(run.checkpoints, print)
    done = rows(run.path)
    assert state["update"] == len(done) == {"start-up": 0, "finish": 3}.get(moment, 2)
    assert state["counters"]["env_steps"] == (done[-1]["env_steps"] if done else 0)
    assert run.summary.exists()
    assert not list(run.checkpoints.glob(".*"))
    resumed = compose_for_resume(run.config.read_text(), ["total_steps=100000"])
    assert run_until(len(done) + 1, resumed, tmp_path, run) == 143
    assert rows(run.path)[: len(done)] == done
    assert rows(run.path)[-1]["update"] == len(done) + 1


def test_former_handlers_come_back_when_a_run_ends(tmp_path: Path):
    before = {number: signal.getsignal(number) for number in STATUS}
    assert run_until(1, small_config("out=run"), tmp_path) == 143
    assert {number: signal.getsignal(number) for number in STATUS} == before


def test_under_nohup_the_end_of_the_terminal_stops_nothing():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.received
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_no_signal_is_status_zero():
    with StopSignal() as stop:
        assert not stop.received
        assert stop.exit_status == 0


def test_a_second_signal_leaves_at_once():
    program = (
        "import os, signal, time; from trainer.signals import StopSignal\n"
        "with StopSignal():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('one', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (143, "one\n")
    assert done.stderr.splitlines() == [
        "",
        "rollscan: stopping after this update, then saving; a second signal leaves at once, without saving",
    ]


def test_the_command_stopped_from_outside_leaves_a_checkpoint_and_no_process(tmp_path: Path):
    """The whole process group gets the signal, as from Ctrl-C or a scheduler; wandb's own process is part of it."""
    settings = (*SMALL, "out=run", "wandb.mode=offline", "logging.console=plain")
    command = [sys.executable, str(ROOT / "scripts/train.py"), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.endswith(f"; resume={tmp_path / 'run'} goes on\n")
    with pytest.raises(ProcessLookupError):  # nobody is left in the group
        os.killpg(process.pid, 0)
    state = checkpoint.load_newest(tmp_path / "run/checkpoints", print)
    assert state["update"] == len(rows(tmp_path / "run"))


def test_a_run_that_fails_saves_and_says_so_in_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise EnvError("env 3 broke")

    monkeypatch.setattr(Collector, "collect", fail)
    with pytest.raises(EnvError, match="env 3 broke"):
        train(small_config("out=run"), tmp_path)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert checkpoint.load_newest(tmp_path / "run/checkpoints", print)["update"] == 0


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_an_env_that_exits_does_not_pass_for_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str
):
    settings = [setting for setting in SMALL if not setting.startswith("ppo.")]
    monkeypatch.setattr(Collector, "collect", lambda _: sys.exit(0))
    with pytest.raises(RuntimeError, match=r"^an env or a module of one's own called sys\.exit\(0\)$"):
        train(compose_config([*settings, f"algo={algo}", "out=run"]), tmp_path)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_run_that_is_refused_half_way_through_its_start_closes_its_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str
):
    closed: list[VecEnv] = []

    def refuse(*_: Any) -> None:
        raise ConfigError("policy: refused")

    monkeypatch.setattr(loop, "make_policy", refuse)
    monkeypatch.setattr(EnvPoolVecEnv, "close", lambda env: closed.append(env))
    settings = [setting for setting in SMALL if not setting.startswith("ppo.")]
    with pytest.raises(ConfigError, match="policy: refused"):
        train(compose_config([*settings, f"algo={algo}", "out=run"]), tmp_path)
    assert len(closed) == {"ppo": 1, "impala": 2}[algo]
    assert not list(tmp_path.iterdir())
