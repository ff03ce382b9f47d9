"""Evaluation of checkpoints: whole episodes, one per env, printed and saved."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import run_until, small_config

from envs.envpool_cpu import EnvPoolVecEnv
from scripts import evaluate as script
from trainer.checkpoint import CheckpointError
from trainer.evaluate import evaluate, load_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    config = small_config("out=run", "normalize.observations=true", "checkpoint.interval_updates=1")
    assert run_until(3, config, base) == 143
    return base / "run"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    script.main()


def test_every_env_plays_one_whole_episode(run: Path):
    config, state = load_checkpoint(run)
    episodes = evaluate(config, state, 5, seed=3, deterministic=True, device=CPU)
    assert len(episodes.returns) == len(episodes.lengths) == 5
    assert episodes.returns == [float(length) for length in episodes.lengths], "CartPole pays 1 a step"
    assert len(set(episodes.lengths)) > 1, "the envs start differently"
    assert config.env.pools == 0, "the configuration is not changed"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("engine", ["envpool", "torch"])
def test_the_same_seed_gives_the_same_episodes(run: Path, engine: str, deterministic: bool):
    config, state = load_checkpoint(run)
    config.env.engine = engine
    first, again = (evaluate(config, state, 4, 5, deterministic, CPU) for _ in range(2))
    assert first == again
    assert evaluate(config, state, 4, 6, deterministic, CPU) != first


def test_a_run_with_fused_networks_is_played_on_a_cpu(run: Path):
    config, state = load_checkpoint(run)
    expected = evaluate(config, state, 3, seed=1, deterministic=True, device=CPU)
    config.policy.backend = "triton"
    assert evaluate(config, state, 3, seed=1, deterministic=True, device=CPU) == expected


@pytest.mark.parametrize(
    "overrides",
    [("policy.core=gru", "ppo.num_minibatches=4"), ("algo=impala", "env.pools=4", "impala.rollouts_per_update=2")],
)
def test_limits_of_training_are_none_of_playing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
):
    config = small_config("out=run", "num_envs=8", *overrides)
    assert run_until(1, config, tmp_path) == 143
    command(monkeypatch, f"checkpoint={tmp_path}/run", "episodes=1")
    assert (tmp_path / "run/evaluation-1-envpool-1.json").exists()


def test_evaluation_changes_neither_weights_nor_normalizers(run: Path):
    config, state = load_checkpoint(run)
    before = {name: tensor.clone() for name, tensor in state["modules"]["observation_normalizer"].items()}
    evaluate(config, state, 3, seed=1, deterministic=False, device=CPU)
    after = load_checkpoint(run)[1]["modules"]["observation_normalizer"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert before["running.count"] > 0


def test_the_command_prints_and_saves_deterministic_and_sampled_returns(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command(monkeypatch, f"checkpoint={run}", "episodes=6")
    printed = capsys.readouterr().out
    saved = json.loads((run / "evaluation-3-envpool-6.json").read_text())
    assert saved["env_id"] == "CartPole-v1"
    for name in ("deterministic", "sampled"):
        returns = saved[name]["returns"]
        assert len(returns) == 6
        assert saved[name]["mean"] == pytest.approx(sum(returns) / 6)
        assert saved[name]["std"] == pytest.approx(statistics.pstdev(returns))
        assert f"return {saved[name]['mean']:.2f} ±" in printed


def test_a_single_checkpoint_file_is_played_and_older_ones_too(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command(monkeypatch, f"checkpoint={run}/checkpoints/update-00000002.pt", "episodes=2", "env.engine=torch")
    assert "on torch, after" in capsys.readouterr().out
    assert json.loads((run / "evaluation-2-torch-2.json").read_text())["update"] == 2


def test_a_run_with_options_of_its_engine_is_played_on_another_engine_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = small_config("out=run", "env.engine=torch", "env.options.dtype=float64", "env.options.stagger=true")
    assert run_until(1, config, tmp_path) == 143
    command(monkeypatch, f"checkpoint={tmp_path}/run", "episodes=2", "env.engine=envpool")
    printed = capsys.readouterr().out
    assert "env.options dtype, stagger are those of env.engine=torch: left out" in printed
    assert "on envpool, after" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "checkpoint=<a run folder or file> is missing"),
        (["checkpoint=nowhere"], "nowhere: no such checkpoint"),
        (["checkpoint={run}", "episods=3"], "episods: there is no such key; did you mean episodes?"),
        (["checkpoint={run}", "episodes=0"], "episodes=0"),
        (["checkpoint={run}", "episodes=1000000000"], "episodes=1000000000 must be at least 1 and at most 16777216"),
        (["checkpoint={run}", "env=Ant"], "env=Ant: the run's env is changed key by key, such as env.id=Ant"),
        (["checkpoint={run}", "episodes=abc"], "episodes: Value 'abc'"),
        (["checkpoint={run}", "env.engine=foo"], "env.engine=foo"),
        (["checkpoint={run}", "env.engin=torch"], "env.engin: there is no such key; did you mean engine?"),
        (["checkpoint={run}", "env.pools=many"], "env.pools: Value 'many'"),
        (["checkpoint={run}", "env.timeout=1e300"], "env.timeout=1e+300 must be greater than 0 and at most 1e+09"),
        (["checkpoint={run}", "env.module=nope"], "env.module=nope cannot be imported"),
        (["checkpoint={run}", "env.foo=1"], "env.foo: there is no such key; there are id, engine, module,"),
        (
            ["checkpoint={run}", "deterministic=true"],
            "deterministic: there is no such key; there are checkpoint, episodes",
        ),
        (["{run}"], "{run}: an argument is key=value, without dashes: checkpoint={run}"),
        (["--checkpoint={run}"], "--checkpoint={run}: an argument is key=value, without dashes: checkpoint={run}"),
        (["checkpoint={run}", "seed=3000000000"], "seed=3000000000 must be at least 0 and at most 2147483647"),
        (["checkpoint={run}", "device=gpu"], "device=gpu is not one of auto, cpu, cuda, cuda:N"),
        (["checkpoint={run}", "device=cuda:99"], "device=cuda:99"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
):
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, *(argument.format(run=run) for argument in arguments))
    errors = capsys.readouterr().err
    assert end.value.code == 1
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert named.format(run=run) in errors


@pytest.mark.parametrize("lacking", ["config", "env_id", "counters", "modules"])
def test_a_checkpoint_that_lacks_what_playing_needs_is_refused(run: Path, tmp_path: Path, lacking: str):
    _, state = load_checkpoint(run)
    torch.save({key: value for key, value in state.items() if key != lacking}, tmp_path / "update-1.pt")
    with pytest.raises(CheckpointError, match=f"has no {lacking}; is it one of"):
        load_checkpoint(tmp_path / "update-1.pt")


def test_a_checkpoint_without_networks_names_the_first_tensor(run: Path):
    config, state = load_checkpoint(run)
    with pytest.raises(CheckpointError, match="policy: the checkpoint has no tensor"):
        evaluate(config, {**state, "modules": {}}, 1, 0, True, torch.device("cpu"))


def test_ctrl_c_closes_the_envs_and_leaves_without_a_traceback(run: Path, monkeypatch: pytest.MonkeyPatch):
    closed: list[EnvPoolVecEnv] = []

    def interrupt(env: EnvPoolVecEnv, *_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EnvPoolVecEnv, "recv", interrupt)
    monkeypatch.setattr(EnvPoolVecEnv, "close", lambda env: closed.append(env))
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, f"checkpoint={run}", "episodes=2")
    assert end.value.code == 130
    assert len(closed) == 1


def test_help_says_what_the_command_does_and_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, "--help")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Evaluate a checkpoint: ``python scripts/evaluate.py")
    assert "checkpoint= episodes=100" in printed


def test_a_policy_that_does_not_fit_the_env_is_refused_by_its_tensor(run: Path):
    config, state = load_checkpoint(run)
    config.env.id = "Acrobot"
    with pytest.raises(CheckpointError, match=r"tensor actor\.0\.weight"):
        evaluate(config, state, 2, seed=1, deterministic=True, device=CPU)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("imageio", "imageio_ffmpeg", "pygame")),
    reason="films need pip install -e '.[video]'",
)
def test_a_film_has_a_frame_for_every_state(run: Path, monkeypatch: pytest.MonkeyPatch):
    import imageio.v3

    from trainer.video import film

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    target = run / "film.mp4"
    length = film(run, target, seed=1)
    frames = imageio.v3.imread(target)
    assert frames.shape[0] == length + 1
    assert frames.shape[1:] == (400, 600, 3)
    assert frames[0].std() > 0, "something is to be seen"


def film_with(monkeypatch: pytest.MonkeyPatch, run: Path, answer: Callable[..., Any], *arguments: str) -> None:
    """Ask for a film of one played episode; ``answer`` stands for the process that films."""
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(script.subprocess, "run", answer)
    command(monkeypatch, f"checkpoint={run}", "episodes=1", "video=true", *arguments)


@pytest.mark.parametrize(
    ("last_line", "told"),
    [
        ("ModuleNotFoundError: No module named 'imageio'", "named 'imageio' (pip install -e '.[video]')"),
        ("gymnasium.error.DependencyNotInstalled: no pygame", "no pygame (pip install -e '.[video]')"),
        ("RuntimeError: no display", "no film was made: RuntimeError: no display"),
    ],
)
def test_a_film_that_fails_names_its_cure(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last_line: str, told: str
):
    with pytest.raises(SystemExit):
        film_with(monkeypatch, run, lambda *_, **__: SimpleNamespace(returncode=1, stderr=f"Traceback\n{last_line}\n"))
    printed = capsys.readouterr()
    assert "filming " in printed.out
    assert printed.err.endswith(f"{told}\n") and printed.err.count("\n") == 1


def test_a_film_that_hangs_is_given_up(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    with pytest.raises(SystemExit):
        film_with(monkeypatch, run, hang, "video_timeout=7.0")
    assert capsys.readouterr().err == "error: video=true: no film within video_timeout=7.0 s\n"


def test_what_gymnasium_cannot_render_is_said_before_anything_is_played(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delitem(script.gymnasium.registry, "CartPole-v1")
    with pytest.raises(SystemExit):
        film_with(monkeypatch, run, pytest.fail)
    assert "Gymnasium, which renders, has no CartPole-v1" in capsys.readouterr().err
