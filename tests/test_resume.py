"""Resuming: the same numbers as a run that was never interrupted, and refusals of what does not fit."""

from __future__ import annotations

import json
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import differences, rows, run_until, small_config, without_times

from envs.base import EnvError
from envs.torch_classic import TorchVecEnv
from trainer import checkpoint, distributed
from trainer.checkpoint import CheckpointError
from trainer.collector import Collector
from trainer.config import Config, ConfigError
from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.ppo import PPO
from trainer.rollout import Rollout
from trainer.run_folder import RunFolder
from trainer.schema import compose_for_resume
from trainer.session import train

EXACT = {
    "torch engine, its state is saved": ("env.engine=torch",),
    "envpool, started anew every update": ("env.engine=envpool", "env.reseed_interval=1"),
}
EVERYTHING = ("normalize.observations=true", "normalize.rewards=true", "normalize.values=true")


def resume(folder: Path, update: int, *overrides: str) -> int:
    run = RunFolder.existing(folder)
    return run_until(update, compose_for_resume(run.config.read_text(), list(overrides)), folder, run)


def newest(folder: Path) -> dict:
    state = checkpoint.load_newest(folder / "checkpoints", print)
    for key in ("seconds",):
        state["counters"].pop(key)
    state.pop("config")  # names the folder
    return state


@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
@pytest.mark.parametrize("engine", EXACT.values(), ids=EXACT.keys())
def test_ten_updates_equal_five_resumed_for_five_bit_for_bit(tmp_path: Path, engine: tuple[str, ...], schedule: str):
    overrides = (*engine, *EVERYTHING, f"ppo.lr_schedule={schedule}")
    assert run_until(10, small_config(*overrides, "out=straight"), tmp_path) == 143
    assert run_until(5, small_config(*overrides, "out=broken"), tmp_path) == 143
    torch.manual_seed(12345)  # whatever happened in between
    assert resume(tmp_path / "broken", 10) == 143

    straight, broken = newest(tmp_path / "straight"), newest(tmp_path / "broken")
    assert straight["update"] == broken["update"] == 10
    assert differences(straight, broken) == []
    assert {"policy", "observation_normalizer", "reward_normalizer", "value_normalizer"} == set(straight["modules"])
    assert straight["algorithm"]["optimizer"]["second"].abs().sum() > 0
    expected, got = ([without_times(row) for row in rows(tmp_path / name)] for name in ("straight", "broken"))
    assert [row["update"] for row in got] == list(range(1, 11))
    assert got == expected


def test_envs_that_cannot_restore_their_state_start_anew_by_the_same_rule_every_time(tmp_path: Path):
    """EnvPool without reseed_interval: resuming twice from one checkpoint gives the same run twice."""
    assert run_until(3, small_config("out=run"), tmp_path) == 143
    results = []
    for _ in range(2):
        assert resume(tmp_path / "run", 5) == 143
        results.append([without_times(row) for row in rows(tmp_path / "run")])
        (tmp_path / "run/checkpoints/update-00000005.pt").unlink()
    assert results[0] == results[1]
    assert [row["update"] for row in results[0]] == [1, 2, 3, 4, 5]


def test_an_older_checkpoint_resumes_without_repeating_an_update(tmp_path: Path):
    assert run_until(4, small_config("out=run", "checkpoint.interval_updates=2"), tmp_path) == 143
    (tmp_path / "run/checkpoints/update-00000004.pt").unlink()
    assert resume(tmp_path / "run", 5) == 143
    got = rows(tmp_path / "run")
    assert [row["update"] for row in got] == [1, 2, 3, 4, 5]
    assert all(a["env_steps"] < b["env_steps"] for a, b in pairwise(got))


def test_the_linear_schedule_continues_and_a_longer_run_takes_its_own_value(tmp_path: Path):
    config = small_config("out=run", "total_steps=1000", "ppo.lr_schedule=linear", "ppo.learning_rate=1e-3")
    assert run_until(4, config, tmp_path) == 143
    done = rows(tmp_path / "run")[-1]["env_steps"]
    assert resume(tmp_path / "run", 5, "total_steps=2000") == 143
    assert rows(tmp_path / "run")[-1]["learning_rate"] == pytest.approx(1e-3 * (1 - done / 2000), rel=1e-6)


def test_a_finished_run_resumes_to_an_end_at_once_and_goes_on_when_it_is_made_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(small_config("out=run", "total_steps=130"), tmp_path) == 0
    before = rows(tmp_path / "run")
    capsys.readouterr()
    folder = RunFolder.existing(tmp_path / "run")
    assert train(compose_for_resume(folder.config.read_text(), []), tmp_path, folder) == 0
    assert "all of total_steps=130 are done; total_steps=<more> goes on" in capsys.readouterr().err
    assert rows(tmp_path / "run") == before
    assert resume(tmp_path / "run", 0, "total_steps=300") == 0
    assert rows(tmp_path / "run")[: len(before)] == before
    assert rows(tmp_path / "run")[-1]["env_steps"] >= 300


def test_another_engine_begins_new_episodes(tmp_path: Path):
    assert run_until(2, small_config("out=run", "env.engine=torch"), tmp_path) == 143
    assert resume(tmp_path / "run", 4, "env.engine=envpool") == 143
    assert resume(tmp_path / "run", 5, "env.engine=torch") == 143
    assert [row["update"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_run_that_fails_half_way_through_a_rollout_resumes_with_new_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps, send = 0, TorchVecEnv.send

    def fail(env: TorchVecEnv, pool: int, actions: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps == 19:
            raise EnvError("broken")
        send(env, pool, actions)

    monkeypatch.setattr(TorchVecEnv, "send", fail)
    limits = ("env.engine=torch", "rollout_length=8", "env.max_episode_steps=6", "total_steps=500")
    with pytest.raises(EnvError, match="broken"):
        train(small_config("out=run", *limits), tmp_path)
    assert len(rows(tmp_path / "run")) == 2, "the failure came in the third rollout"
    assert resume(tmp_path / "run", 5) == 143
    lengths = [row["episode_length"] for row in rows(tmp_path / "run")]
    assert lengths == [6.0] * 5, "no episode lacks the rows that were collected in vain"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_configuration_that_is_no_text_is_refused_by_name(run: RunFolder, tmp_path: Path, content: bytes):
    shutil.copytree(run.path, tmp_path / "copy")
    copy = RunFolder.existing(tmp_path / "copy")
    copy.config.write_bytes(content)
    with pytest.raises(ConfigError, match=r"copy/config\.yaml (is empty|cannot be read)"):
        copy.read_config()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    base = tmp_path_factory.mktemp("runs")
    assert run_until(2, small_config("out=run", "checkpoint.interval_updates=1"), base, number=signal.SIGUSR1) == 138
    return RunFolder.existing(base / "run")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("policy.hidden_sizes=[16]", "policy: tensor actor.0.weight"),
        ("policy.hidden_sizes=[8,8]", "policy: tensor actor.2.weight"),
        ("env.id=Acrobot-v1", "env.id is Acrobot-v1, but the checkpoint is of CartPole-v1"),
        ("normalize.observations=true", "observation_normalizer: the checkpoint has no tensor running.count"),
        ("normalize.values=false", "value_normalizer"),
        ("num_envs=4", "num_envs=4"),
    ],
)
def test_a_changed_run_is_refused_with_the_name_of_what_does_not_fit(run: RunFolder, override: str, named: str):
    config = compose_for_resume(run.config.read_text(), [override])

    def files() -> list[tuple[str, int]]:
        return sorted((path.name, path.stat().st_mtime_ns) for path in run.path.rglob("[!.]*"))

    before = files()
    with pytest.raises(CheckpointError) as refusal:
        train(config, run.path, run)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert files() == before


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        ({"algorithm": {"optimizer": {"state": {}, "param_groups": []}, "learning_rate": torch.ones(())}}, "first"),
        ({"rng": {}}, "cpu"),
        ({"episodes": {"previous_done": torch.zeros(8)}}, "carry"),
    ],
    ids=["optimizer", "random numbers", "episodes"],
)
def test_a_state_of_another_version_is_refused_in_one_line(run: RunFolder, lacking: dict[str, Any], named: str):
    trainer = Trainer(small_config(), QuietConsole())
    state = checkpoint.load_newest(run.checkpoints, print) | lacking
    with pytest.raises(
        CheckpointError, match=r"^here: the saved state has no '\w+': another version wrote it;.*$"
    ) as refusal:
        trainer.load_state_dict(state, "here")
    assert f"'{named}'" in str(refusal.value)
    trainer.close()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path):
    run = tmp_path / "run"
    assert run_until(2, small_config(f"out={run}"), tmp_path) == 143
    first = newest(run), [without_times(row) for row in rows(run)]
    shutil.rmtree(run / "checkpoints")
    assert resume(run, 2) == 143
    assert differences(first, (newest(run), [without_times(row) for row in rows(run)])) == []


def test_a_run_whose_folder_is_removed_says_so_goes_on_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    collect, calls, run = Collector.collect, iter(range(100)), tmp_path / "run"

    def remove(collector: Collector) -> Rollout:
        if next(calls) == 2:
            shutil.rmtree(run)
        return collect(collector)

    monkeypatch.setattr(Collector, "collect", remove)
    assert train(small_config("out=run", "checkpoint.interval_updates=1", "total_steps=300"), tmp_path) == 0
    assert capsys.readouterr().err.count("was removed while the run goes on") == 1
    ended = newest(run)["update"]
    assert resume(run, ended + 1, "total_steps=1000") == 143
    assert [row["update"] for row in rows(run)] == list(range(4, ended + 2))


def test_a_torn_newest_checkpoint_is_named_and_the_one_before_continues(tmp_path: Path):
    assert run_until(3, small_config("out=run", "checkpoint.interval_updates=1"), tmp_path) == 143
    torn = tmp_path / "run/checkpoints/update-00000003.pt"
    torn.write_bytes(torn.read_bytes()[:500])
    assert resume(tmp_path / "run", 4) == 143
    assert [row["update"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_configuration_survives_being_saved_and_resumed(run: RunFolder):
    saved: Config = compose_for_resume(run.config.read_text(), [])
    assert saved == small_config("out=run", "checkpoint.interval_updates=1")


def test_a_resumed_optimizer_follows_this_configuration(tmp_path: Path):
    first = Trainer(small_config("ppo.lr_schedule=linear", "ppo.learning_rate=1e-3"), QuietConsole())
    first.train_one_update()
    state = first.state_dict()
    changed = small_config("ppo.lr_schedule=constant", "ppo.learning_rate=1e-9", "ppo.adam_eps=0.1")
    resumed = Trainer(changed, QuietConsole())
    resumed.load_state_dict(state, "here")
    optimizer = resumed.algorithm.optimizer
    assert optimizer.learning_rate is resumed.algorithm.learning_rate
    assert optimizer.learning_rate.item() == pytest.approx(1e-9)
    assert optimizer.eps == 0.1
    for trainer in (first, resumed):
        trainer.env.close()


def test_a_failure_half_way_through_an_update_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(self: PPO, *_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(PPO, "_backward", fails)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(small_config(f"out={tmp_path / 'run'}"), tmp_path)
    assert not list((tmp_path / "run").glob("checkpoints/*.pt"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_another_ranks_failure_to_collect_leaves_this_ones_state_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = iter(range(2))

    def valid_rows_of_all_ranks(rows: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            raise RuntimeError("connection closed by peer")
        return rows

    ranks = SimpleNamespace(**{**vars(distributed), "sum_": valid_rows_of_all_ranks})
    monkeypatch.setattr("trainer.loop.distributed", ranks)
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(small_config(f"out={tmp_path / 'run'}"), tmp_path)
    assert newest(tmp_path / "run")["update"] == len(rows(tmp_path / "run")) == 1
