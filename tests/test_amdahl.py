"""`scripts/amdahl.py` as it is called: presets, what is measured and kept, refusals in one line."""

from __future__ import annotations

import csv
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from amdahl_cases import TINY, measured_at_once, preset_file, tiny_cell
from html_pages import Page

from scripts import amdahl, amdahl_cells
from scripts.amdahl_cells import PARTS, Cell, expand, parse_preset, read_preset, shard_of
from scripts.amdahl_measure import TIMED, EnvShelf, Measured
from scripts.amdahl_store import read_rows
from scripts.amdahl_tables import title
from trainer.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PANELS = ("summary", "prediction", "worth", "map", "phases", "figures", "clock", "origin")


@pytest.mark.parametrize("preset", ["smoke", "h200"])
def test_every_cell_of_a_preset_is_a_configuration_that_the_trainer_takes(preset: str):
    cells = list(expand(read_preset(preset), "cpu", 1))
    names = [title(cell.labels) for cell in cells]
    assert len(set(names)) == len(names)
    assert set(TIMED) == set(PARTS)
    assert all(len({variant.name for variant in cell.variants}) == len(cell.variants) >= 2 for cell in cells)


def test_sweeps_multiply_and_the_control_is_the_candidate_without_its_clock(tmp_path: Path):
    swept = TINY + "    sweep: {rollout_length: [4, 8, 16], policy.hidden_sizes: [[4], [8, 8]]}\n"
    text = swept.replace("{compare: credit, seconds: 0.1, warmup: 1}", "compare: credit")
    cells = list(expand(parse_preset(preset_file(tmp_path, text)), "cpu", 1))
    assert [(cell.labels.rollout_length, cell.labels.hidden) for cell in cells] == [
        (length, hidden) for length in (4, 8, 16) for hidden in ("4", "8-8")
    ]
    for cell in cells:
        assert [variant.name for variant in cell.variants] == ["torch loop", "torch scan", "torch scan, no clock"]
        assert cell.control is not None and cell.control.config == cell.candidate.config
        assert [variant.has_clock for variant in cell.variants] == [True, True, False]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seconds: 0.1", "second: 0.1", "second: there is no such key; did you mean seconds?"),
        ("seconds: 0.1", "seconds: long", "seconds: "),
        ("compare: credit", "compare: kredit", "cells.compare=kredit is not one of its comparisons: credit"),
        ("warmup: 1", "turn: 2, skip: 2", "cells.skip=2 must be less than cells.turn=2"),
        ("warmup: 1", "builds: 0", "cells.builds=0 must be 1 or more"),
        ("parts: [credit]", "parts: [credits]", "parts=credits is not one of credit, update, collect"),
        ("      torch loop: [credit.torch_mode=loop]\n", "", "comparisons.credit.variants: there must be two or more"),
        ("credit.torch_mode=loop", "credit.torch_mode=loop, ppo.gamma=1", "ppo.gamma"),
        ("credit.torch_mode=loop", "credit.torch_mode=lop", "credit.torch_mode=lop is not one of"),
        ("comparisons:", "comparisons: [", "tiny.yaml"),
    ],
)
def test_a_preset_that_cannot_be_is_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str):
    assert old in TINY
    with pytest.raises(ConfigError) as refused:
        tiny_cell(tmp_path, TINY.replace(old, new, 1))
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The command line in this process, with ``folder`` for its presets; its exit status."""
    monkeypatch.setattr(amdahl_cells, "PRESETS", folder)
    monkeypatch.setattr(sys, "argv", ["amdahl.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        amdahl.main()
    return int(stopped.value.code or 0)


def test_a_cell_that_fails_or_finds_no_time_is_listed_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    late = "  - {compare: credit, seconds: 1000}\n"
    failing = "  - {compare: credit, settings: [credit.backend=triton, rollout_length=4]}\n"
    preset_file(tmp_path, "seconds: 60" + TINY + late.replace("1000}", "1000, settings: [num_envs=4]}") + failing)
    assert run_main(monkeypatch, tmp_path, "preset=tiny", "device=cpu", f"out={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "of 60 s were spent" in printed
    assert "credit.backend=triton needs device=cuda" in printed
    rows, _ = read_rows(tmp_path / "amdahl.csv")
    assert sorted(bool(row.rounds) for row in rows) == [False, False, True, True]
    html = (tmp_path / "amdahl.html").read_text()
    assert run_main(monkeypatch, tmp_path, f"report={tmp_path / 'amdahl.csv'}") == 0
    assert (tmp_path / "amdahl.html").read_text() == html


def test_an_interrupt_ends_the_measuring_and_not_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    preset_file(tmp_path, TINY + "  - {compare: credit, sweep: {rollout_length: [4, 5, 6]}}\n")
    measured: list[Cell] = []

    def interrupted_at_the_second(cell: Cell, shelf: EnvShelf) -> Measured:
        measured.append(cell)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measured_at_once(cell, shelf)

    monkeypatch.setattr(amdahl, "measure", interrupted_at_the_second)
    assert run_main(monkeypatch, tmp_path, "preset=tiny", "device=cpu", f"out={tmp_path}") == 0
    rows, _ = read_rows(tmp_path / "amdahl.csv")
    assert [row.note for row in rows] == ["interrupted", "interrupted", "interrupted", "", ""], "shorter rollouts first"
    assert (tmp_path / "amdahl.html").exists()


def test_a_stopped_command_is_resumed_with_the_cells_that_it_did_not_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    preset_file(tmp_path, TINY.replace("warmup: 1}", "warmup: 1, sweep: {rollout_length: [4, 5, 6]}}"))
    measured: list[int] = []

    def counted(cell: Cell, shelf: EnvShelf) -> Measured:
        measured.append(cell.labels.rollout_length)
        return measured_at_once(cell, shelf)

    monkeypatch.setattr(amdahl, "measure", counted)
    common = ("preset=tiny", "device=cpu", f"out={tmp_path}")
    assert run_main(monkeypatch, tmp_path, *common, "shard=2/3") == 0
    assert run_main(monkeypatch, tmp_path, *common, "resume=true") == 0
    assert measured == [5, 4, 6]
    assert "resume=true: 1 of 3 cells were measured before" in capsys.readouterr().out
    rows, _ = read_rows(tmp_path / "amdahl.csv")
    assert [row.rollout_length for row in rows if row.is_pair] == [4, 5, 6]
    assert run_main(monkeypatch, tmp_path, *common, "resume=true") == 0
    assert len(measured) == 3, "there was nothing left to do but the report"


def test_shards_are_stretches_of_like_budgets_that_have_every_cell_once(tmp_path: Path):
    cell = tiny_cell(tmp_path)
    cells = [replace(cell, seconds=float(seconds)) for seconds in (20, 5, 5, 60, 10, 10, 30, 1, 8)]
    for count in (1, 2, 3, 7):
        shards = [shard_of(cells, f"{index + 1}/{count}") for index in range(count)]
        assert [id(cell) for shard in shards for cell in shard] == [id(cell) for cell in cells]
        budgets = [sum(cell.seconds for cell in shard) for shard in shards]
        assert all(abs(budget - 149 / count) <= 60 for budget in budgets), "no further off than one cell is long"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["preset=none"], "preset=none: there is no such preset under scripts/amdahl_presets: tiny"),
        (["preste=tiny"], "did you mean preset?"),
        (["preset=tiny", "only=nothing"], "only=nothing shard=1/1: preset=tiny has no such cell"),
        (["preset=tiny", "shard=2"], "shard=2 is not i/k with i from 1 to k, like 1/2"),
        (["preset=tiny", "shard=3/2"], "shard=3/2 is not i/k"),
        (["preset=tiny", "seconds=-1"], "seconds=-1.0 must be greater than 0"),
        (["preset=tiny", "seconds=nan"], "seconds=nan must be greater than 0"),
        (["preset=tiny", "device=gpu"], "device=gpu is not one of"),
        (["report=nowhere.csv"], "report=nowhere.csv: there is no such table"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
):
    preset_file(tmp_path, TINY)
    assert run_main(monkeypatch, tmp_path, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(("content", "said"), [("", "the table is empty"), ("date,algo\n1,ppo\n", "no column compare")])
def test_a_table_of_another_version_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
):
    preset_file(tmp_path, TINY)
    (tmp_path / "amdahl.csv").write_text(content)
    monkeypatch.setattr(amdahl, "measure", None)
    assert run_main(monkeypatch, tmp_path, "preset=tiny", "device=cpu", f"out={tmp_path}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "out=" in line


def test_the_smoke_preset_makes_the_whole_report_in_under_a_minute(tmp_path: Path):
    command = [sys.executable, "scripts/amdahl.py", "preset=smoke", "device=cpu", f"out={tmp_path}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime - before.ru_utime < 60  # seconds of CPU: the wall's are those of whatever else runs here
    assert all(
        name in done.stdout for name in ("prediction:", "noise:", "closure:", "clock:", "clock on by clock off:")
    )
    parsed = Page((tmp_path / "amdahl.html").read_text())
    assert tuple(parsed.texts)[1:] == PANELS
    with (tmp_path / "amdahl.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 10 and all(int(line["rounds"]) >= 5 for line in lines)
    assert {line["engine"] for line in lines} == {"torch", "envpool"}
