"""The command ``scripts/train.py``: folders, sweeps, exit status, refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from small_runs import SMALL, rows

from scripts import train as script
from trainer import session
from trainer.collector import Collector
from trainer.schema import from_yaml

ROOT = Path(__file__).resolve().parent.parent
TINY = (*SMALL, "total_steps=130")


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit status."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    try:
        script.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the real command."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/train.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_folders(base: Path) -> list[Path]:
    return sorted(path.parent for path in base.rglob("summary.json"))


def test_two_launches_in_one_second_finish_in_two_folders(tmp_path: Path):
    processes = [start(*TINY, "logging.console=auto", cwd=tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = run_folders(tmp_path)
    assert len(folders) == 2
    for folder in folders:
        assert folder.parent.parent == tmp_path / "runs"
        assert folder.name.removesuffix("-2").endswith("-ppo-CartPole-1")
        assert from_yaml((folder / "config.yaml").read_text()).env.id == "CartPole"
        assert len(list((folder / "checkpoints").iterdir())) == 1
    for out, err in outputs:
        assert "100%" in out
        assert "\x1b" not in out + err, "no colours in a pipe"
        assert "finished after" in err
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "nothing else is left in the working directory"


def test_a_sweep_runs_every_job_and_fails_if_one_failed(tmp_path: Path):
    sweep = start("-m", *TINY, "out=sweep", "seed=1,2", "env.id=CartPole,Nope", "hydra.job.chdir=True", cwd=tmp_path)
    _, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 1
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if line.startswith("error: ")] == [
        "error: env.id=Nope is unknown to env.engine=envpool; closest: Hopper-v5, Gopher-v5"
    ] * 2
    assert run_folders(tmp_path) == [tmp_path / "sweep/0", tmp_path / "sweep/2"]
    configs = [from_yaml((tmp_path / f"sweep/{job}/config.yaml").read_text()) for job in (0, 2)]
    assert [config.seed for config in configs] == [1, 2]
    first, second = (torch.load(next((tmp_path / f"sweep/{job}/checkpoints").iterdir())) for job in (0, 2))
    assert not torch.equal(first["modules"]["policy"]["actor.0.weight"], second["modules"]["policy"]["actor.0.weight"])


@pytest.mark.parametrize("chdir", [True, False])
def test_sweeps_without_out_make_a_folder_for_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chdir: bool):
    assert command(monkeypatch, "-m", *TINY, "seed=1,2,3", f"hydra.job.chdir={chdir}") == 0
    folders = run_folders(tmp_path)
    assert sorted(json.loads((folder / "summary.json").read_text())["seed"] for folder in folders) == [1, 2, 3]
    assert all(folder.parent.parent == tmp_path / "runs" for folder in folders)


def test_a_job_of_a_sweep_equals_the_same_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert command(monkeypatch, "-m", *TINY, "out=sweep", "seed=1,2") == 0
    assert command(monkeypatch, *TINY, "out=alone", "seed=2", "hydra.job.chdir=True") == 0
    swept, alone = rows(tmp_path / "sweep/1"), rows(tmp_path / "alone")
    assert [row["loss/total"] for row in swept] == [row["loss/total"] for row in alone]


def test_resume_works_from_another_working_directory_and_with_a_quoted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert command(monkeypatch, *TINY, "out='a run'") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command(monkeypatch, "resume='../a run'", "total_steps=300", "hydra.job.chdir=True") == 0
    assert [row["update"] for row in rows(tmp_path / "a run")] == [1, 2, 3, 4, 5]
    assert command(monkeypatch, f"resume='{tmp_path}/a run'") == 0, "a finished run has nothing left to do"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_out_that_holds_a_run_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command(monkeypatch, *TINY, "out=run") == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert command(monkeypatch, *TINY, "out=run") == 1
    assert capsys.readouterr().err.startswith("error: out=run already holds a run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/update-00000900.pt"])
def test_an_out_that_holds_what_a_run_would_overwrite_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
):
    remains = tmp_path / "run" / name
    remains.parent.mkdir(parents=True)
    remains.write_text("precious")
    assert command(monkeypatch, *TINY, "out=run") == 1
    assert capsys.readouterr().err == f"error: out=run holds {name} of a run without config.yaml; choose another\n"
    assert remains.read_text() == "precious"


def test_a_run_that_another_process_continues_is_refused_before_an_env_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command(monkeypatch, *TINY, "out=run") == 0
    holder = (
        "import sys; from pathlib import Path; from trainer.run_folder import RunFolder\n"
        "with RunFolder(Path('run')).held(): print('held', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", holder], cwd=tmp_path, env=environment, stdin=-1, stdout=-1, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(session, "Trainer", None)  # not even begun
            assert command(monkeypatch, "resume=run", "total_steps=300") == 1
        assert capsys.readouterr().err == (
            f"error: resume={tmp_path}/run: process {other.pid} on {socket.gethostname()} trains in it; stop that one "
            "first\n"
        )
        other.kill()
    assert command(monkeypatch, "resume=run", "total_steps=300") == 0, "what a killed process leaves keeps nobody out"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("learnig_rate=1",), "learnig_rate: there is no such key"),
        (("ppo.num_minibatches=0",), "ppo.num_minibatches=0"),
        (("env.id=CartPol",), "env.id=CartPol is unknown to env.engine=envpool; closest: CartPole-v1"),
        (("env.options.colour=red",), "env.options.colour"),
        (("policy.hidden_sizes=[35184372088832]",), "hidden_sizes=[35184372088832] must be one or more widths"),
        (("credit.backend=triton",), "credit.backend=triton needs device=cuda"),
        (("env.engine=torch",), "env.num_threads=1 is read with env.engine=envpool or gymnasium only"),
        (("out=/proc/nope/run",), "out=/proc/nope/run: the run folder cannot be made"),
        (("resume=nowhere",), "resume=nowhere: there is no run"),
    ],
)
def test_a_refused_run_is_one_line_and_status_one_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
):
    assert command(monkeypatch, *TINY, *arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert named in output.err
    assert list(tmp_path.iterdir()) == []


def test_what_an_env_raises_of_no_file_comes_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(Collector, "collect", refuse)
    assert command(monkeypatch, *TINY) == 1
    errors = capsys.readouterr().err
    assert "in refuse" in errors
    assert "ConnectionRefusedError: [Errno 111] Connection refused" in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert command(monkeypatch, *TINY, "device=cuda") == 1
    assert capsys.readouterr().err.startswith("error: device=cuda: ")


def test_a_run_without_a_whole_checkpoint_is_refused_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command(monkeypatch, *TINY, "out=run") == 0
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    capsys.readouterr()
    checkpoint.write_bytes(b"")
    assert command(monkeypatch, "resume=run") == 1
    assert f"error: {checkpoint}: not a readable checkpoint" in capsys.readouterr().err


def test_the_composed_configuration_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command(monkeypatch, "env=CartPole", "--cfg", "job") == 0
    printed = from_yaml(capsys.readouterr().out)
    assert (printed.env.id, printed.num_envs) == ("CartPole", 64)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env.id=Pendulum-v1"], "env.id=Pendulum-v1 gets the settings of env=Ant; env=Pendulum chooses others"),
        (["env.id=Swimmer-v5"], "env.id=Swimmer-v5 gets the settings of env=Ant; env=<preset> chooses others"),
        (["env=Pendulum", "env.id=Swimmer-v5"], None),
        ([], None),
    ],
)
def test_an_id_without_a_preset_is_told_whose_settings_it_gets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str | None
):
    monkeypatch.setattr(script, "train", lambda config, base, continued: 0)
    assert command(monkeypatch, *arguments, "device=cpu") == 0
    assert capsys.readouterr().err == ("" if said is None else f"rollscan: {said}\n")


def test_a_run_whose_streams_are_closed_keeps_its_files_to_itself(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts/train.py"), *SMALL, "total_steps=100000000", "out=run"]
    process = subprocess.Popen(["bash", "-c", 'exec "$@" 2>&- >&-', "bash", *command], cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/metrics.jsonl").exists() or len(rows(tmp_path / "run")) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    assert [row["update"] for row in rows(tmp_path / "run")] == list(range(1, len(rows(tmp_path / "run")) + 1))
    assert "rollscan" not in (tmp_path / "run/.lock").read_text()
