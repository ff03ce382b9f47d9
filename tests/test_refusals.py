"""What ends a script in one line: errors of other libraries, signals, letters that a locale lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from compare_cases import write_run

from envs.base import EnvError
from scripts import bench_loop, export_policy
from scripts.overrides import check_overrides, composed, parse_options
from scripts.refusals import tell, told_in_one_line
from trainer.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Options:
    """As a script has them."""

    folder: str = ""
    out: str | None = None
    episodes: int = 1
    env: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "error", [EnvError("no such env"), ConfigError("lr=x"), FileNotFoundError(2, "gone", "a.csv"), KeyError("boom")]
)
def test_what_a_user_can_mend_is_one_line_and_status_one(error: Exception, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, told_in_one_line(KeyError):
        raise error
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_nobody_needs_to_read_what_a_script_says(monkeypatch: pytest.MonkeyPatch):
    told = 0
    with open("/dev/full", "w") as full, told_in_one_line():
        monkeypatch.setattr(sys, "stdout", full)
        for line in ("return 9", "saved"):
            tell(line)
            told += 1
    assert told == 2, "a full disk keeps a script from nothing"


def test_an_error_of_no_file_keeps_its_traceback():
    with pytest.raises(OSError, match="odd"), told_in_one_line():
        raise OSError("odd")


def test_ctrl_c_ends_an_export_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_policy, "run", interrupt)
    monkeypatch.setattr(sys, "argv", ["export_policy.py", "checkpoint=run"])
    with pytest.raises(SystemExit) as end:
        export_policy.main()
    assert end.value.code == 130


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["num_envs=0"], "num_envs=0 must be at least 1"),
        (["env=Nosuch"], "env=Nosuch: there is no such preset under configs/env"),
        (["--against", "seed=1", "seed=x"], "seed=x is not a whole number"),
    ],
)
def test_a_wrong_row_of_the_loop_benchmark_is_refused_before_anything_is_measured(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["bench_loop.py", *arguments])
    monkeypatch.setattr(bench_loop, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as end:
        bench_loop.main()
    assert end.value.code == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["007", "1e5", "12:30", "0x1F", "true", "a: b", "[a", "@x", "a # b", "a=b", "*x", "ü"])
def test_a_text_is_taken_as_it_stands(text: str):
    assert parse_options(Options, [f"folder={text}", f"out='{text}'", "episodes=3"]) == Options(text, text, 3)


def test_options_that_are_no_texts_are_read_as_yaml():
    options = parse_options(Options, ["env.options.a=3", "env.id=Ant", "out=null"])
    assert options == Options(env={"options": {"a": 3}, "id": "Ant"})


@pytest.mark.parametrize(
    ("argument", "named"),
    [("env.id=@", "env.id=@: "), ("episodes=[", "episodes=[: "), ("folder=a\udcc3", "set PYTHONUTF8=1")],
)
def test_what_yaml_or_the_locale_cannot_read_is_named(argument: str, named: str):
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")) as refused:
        parse_options(Options, [argument])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["a=b", "~/x", "ü"])
def test_a_text_that_hydra_cannot_read_comes_with_its_quotes(value: str):
    assert f"\"out='{value}'\"" in (check_overrides([f"out={value}"]) or "")
    assert check_overrides([f"out='{value}'"]) is None


@pytest.mark.parametrize("override", ["seed=[1", "seed=1,2", "CartPole", "env=Nosuch"])
def test_an_override_that_a_benchmark_cannot_take_is_named(override: str):
    with pytest.raises(ConfigError, match=re.escape(override)):
        composed([override])


def test_a_sweep_is_no_run_to_resume_but_holds_some(tmp_path: Path):
    for job in range(2):
        write_run(tmp_path / str(job))
    problem = check_overrides([f"resume={tmp_path}"]) or ""
    assert problem.endswith(f"there is no run (no config.yaml); it is a folder of runs, such as resume={tmp_path}/0")


def test_runs_are_compared_in_a_locale_that_lacks_their_letters(tmp_path: Path):
    run = write_run(tmp_path / "run", "wandb.name='für alle'")
    command = [sys.executable, str(ROOT / "scripts" / "compare_runs.py"), str(run)]
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
