"""The Amdahl report: paired ratios against known answers, runs that take turns with the same seeds, one whole page."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from html_pages import Page, needs_nothing_else
from small_runs import small_config

from scripts import amdahl, amdahl_cells
from scripts.amdahl_cells import PARTS, Cell, Variant, expand, parse_preset, read_preset
from scripts.amdahl_html import markdown, page, picture
from scripts.amdahl_measure import TIMED, EnvShelf, Measured, PartTimes, Run, Sample, measure
from scripts.amdahl_stats import Row, not_measured, ratio, read_rows, rows_of
from scripts.amdahl_tables import closing_lines, missed, title, verdict
from scripts.svg_charts import Dot, DotRow, Mark, diagonal_chart, dot_chart
from trainer.config import ConfigError
from trainer.loop import Trainer
from trainer.timing import PHASES

ROOT = Path(__file__).resolve().parent.parent
PANELS = ("summary", "prediction", "worth", "map", "phases", "figures", "origin")
ORIGIN = {"gpu": "a GPU", "commit": "abc", "date": "2026-11-29"}
TINY = """
settings: [env=CartPole, num_envs=8, rollout_length=8, policy=mlp_small, ppo.num_minibatches=2, ppo.update_epochs=1,
  env.engine=torch, wandb.mode=disabled]
comparisons:
  credit:
    parts: [credit]
    variants:
      torch loop: [credit.torch_mode=loop]
      torch scan: [credit.torch_mode=scan]
cells:
  - {compare: credit, seconds: 0.1, warmup: 1}
"""


def preset_file(folder: Path, text: str) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def tiny_cell(folder: Path, text: str = TINY) -> Cell:
    return next(expand(parse_preset(preset_file(folder, text)), "cpu", seed=3))


def made_up(parts: Sequence[str] = ("credit",), rounds: int = 9, noise: float = 0.0, **times: Any) -> Measured:
    """A cell whose candidate spends ``times`` ms in its phases and whose baseline four times as long in the parts.

    Everything of one round is slowed down by the same random factor.
    """
    random = np.random.default_rng(1)
    phases = {**dict.fromkeys(PHASES, 1.0), "credit": 2.0, "update": 8.0, **times}
    differing = {phase for part in parts for phase in PARTS[part]}
    slow = {phase: ms * (4.0 if phase in differing else 1.0) for phase, ms in phases.items()}
    config = small_config()
    cell = Cell("credit", tuple(parts), (Variant("slow", config),), Variant("fast", config), None, 1.0, 0, 1, 0)
    runs = {variant.name: Run(variant, trainer=None) for variant in cell.variants}  # type: ignore[arg-type]
    for factor in np.exp(noise * random.standard_normal(rounds)):
        for name, kind in (("slow", slow), ("fast", phases)):
            scaled = {phase: ms * factor for phase, ms in kind.items()}
            total = sum(scaled.values())
            runs[name].rounds.append([Sample(total, {**scaled, "total": total}, total / 500)])
    return Measured(cell, runs, {"slow": [{part: PartTimes(4.0, 1.0) for part in parts}] * 3})


def some_rows() -> list[Row]:
    """Two pairs with their candidates, one of them noise, and a cell that was not measured."""
    slow, fast = rows_of(made_up())
    noise = replace(slow, env="Ant", measured=1.01, low=0.98, high=1.04, predicted=1.005)
    missing = replace(not_measured(made_up().cell, "400 of 400 s were spent"), env="<b>&")
    return [slow, replace(fast, clock=1.004, clock_low=0.99, clock_high=1.01), noise, replace(fast, env="Ant"), missing]


def test_a_ratio_of_paired_times_is_exact_whatever_slowed_the_rounds_down():
    b = np.exp(np.random.default_rng(0).standard_normal(12))
    assert ratio(2 * b, b) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_holds_the_true_ratio_about_nineteen_times_of_twenty():
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        shared = np.exp(0.5 * random.standard_normal(30))
        a, b = (factor * shared * np.exp(0.05 * random.standard_normal(30)) for factor in (1.1, 1.0))
        found = ratio(a, b)
        held += found.low <= 1.1 <= found.high
        assert found.low <= found.value <= found.high
    assert held >= 180, "a binomial of 200 and 0.95 is below 180 once in 500 times, with too small an interval always"


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("parts", [["credit"], ["update"], ["collect", "update"]])
def test_where_only_the_parts_differ_the_prediction_is_the_measured_ratio(parts: list[str], noise: float):
    slow, fast = rows_of(made_up(parts, noise=noise))
    phases = {name for part in parts for name in PARTS[part]}
    times = {**dict.fromkeys(PHASES, 1.0), "credit": 2.0, "update": 8.0}
    part = sum(times[name] for name in phases)
    whole = sum(times.values())
    assert slow.measured == pytest.approx((whole + 3 * part) / whole)
    assert slow.share == pytest.approx(4 * part / (whole + 3 * part))
    assert slow.speedup == pytest.approx(4.0)
    assert slow.predicted == pytest.approx(slow.measured)
    assert slow.rest == pytest.approx(1.0)
    assert slow.error == pytest.approx(0.0, abs=1e-9)
    assert (slow.rounds, slow.closure) == (9, pytest.approx(1.0))
    assert slow.named == pytest.approx(1 - 1 / (whole + 3 * part))
    assert slow.clock_share == pytest.approx(1 / 500)
    assert not slow.is_noise and slow.is_pair and not fast.is_pair


def test_the_mean_of_a_turn_is_one_round():
    measured = made_up(rounds=3)
    for run in measured.runs.values():
        run.rounds[:] = [[run.rounds[0][0], run.rounds[1][0]], [run.rounds[2][0]]]
    slow, _ = rows_of(measured)
    assert slow.rounds == 2
    assert slow.measured == pytest.approx(rows_of(made_up())[0].measured)


def test_verdicts_and_closing_lines_say_what_is_noise_what_was_missed_and_what_is_missing():
    rows = some_rows()
    assert [verdict(row) for row in rows if row.is_pair] == [f"{rows[0].measured - 1:+.1%}", "within noise"]
    assert missed(rows) == []
    text = "\n".join(closing_lines(rows))
    assert "prediction: 2 of 2 pairs within 3% (100%)" in text
    assert "noise: 1 of 2 pairs" in text
    assert "an empty one is 0.20% of the update (median of 4 runs), at most 0.20%" in text
    assert "clock on by clock off: +0.40%" in text
    assert "not measured: <b>& envpool 8x8" in text and "400 of 400 s were spent" in text
    wrong = [replace(rows[0], predicted=rows[0].measured * 1.05)]
    assert missed(wrong) == wrong


def test_the_page_has_every_panel_needs_nothing_else_and_shows_names_as_text():
    html = page(some_rows(), ORIGIN)
    parsed = Page(html)
    assert parsed.open == []
    assert tuple(parsed.texts)[1:] == PANELS
    assert all(any(parsed.texts[panel]) for panel in PANELS)
    assert needs_nothing_else(html)
    assert "<b>" not in html.split("<body>")[1] and "<b>&" in " ".join(parsed.texts["summary"])
    assert html.count('class="diagonal"') == 2, "all pairs, and the small ones on a scale of their own"
    assert "1.010x within noise" in parsed.texts["map"]
    assert {"a GPU", "abc"} <= set(parsed.texts["origin"])


def test_the_picture_stands_alone_and_the_markdown_has_every_pair():
    rows = some_rows()
    drawing = ElementTree.fromstring(picture(rows, ORIGIN))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert picture(rows, ORIGIN).count('class="mark"') == 3, "two pairs, and the key of their one baseline"
    text = markdown(rows, ORIGIN)
    assert all(f"| {title(row)}: slow | fast | 9 |" in text for row in rows if row.is_pair)
    assert "not measured: <b>&" in text and "a GPU" in text


def test_a_ratio_beyond_the_axis_is_written_beside_its_dot():
    rows = [DotRow("near", [Dot("a", 1.02, 1.01, 1.03, "")]), DotRow("far", [Dot("a", 7.125, 7.0, 7.2, "")])]
    chart = dot_chart(rows, "times faster", reference=1.0, highest=1.3)
    assert ">7.12<" in chart and ">1.02<" not in chart
    near, far = (float(piece.split('cx="')[1].split('"')[0]) for piece in chart.split("<circle")[1:])
    assert near < far


def test_a_page_without_a_single_pair_still_says_why():
    rows = [row for row in some_rows() if not row.rounds]
    assert "400 of 400 s were spent" in " ".join(Page(page(rows, ORIGIN)).texts["summary"])


def test_points_whose_coordinates_are_equal_lie_on_the_diagonal():
    marks = [Mark("mark-sure", value, value, value, value, "") for value in (0.97, 1.0, 1.31)]
    chart = diagonal_chart(marks, "predicted", "measured")
    ends = [
        float(chart.split('class="diagonal"')[1].split(f'{name}="')[1].split('"')[0])
        for name in ("x1", "y1", "x2", "y2")
    ]
    for piece in chart.split("<circle")[1:]:
        x, y = (float(piece.split(f'{name}="')[1].split('"')[0]) for name in ("cx", "cy"))
        along = (x - ends[0]) / (ends[2] - ends[0])
        assert y == pytest.approx(ends[1] + along * (ends[3] - ends[1]), abs=0.11), "pixels have one decimal"


def test_a_table_that_was_written_is_read_back_as_it_was(tmp_path: Path):
    rows = some_rows()
    path = tmp_path / "amdahl.csv"
    older = [replace(rows[0], measured=9.0)]
    for origin, some in (({**ORIGIN, "date": "2026-11-28"}, older), (ORIGIN, rows)):
        amdahl.append_rows(path, [{**origin, **asdict(row)} for row in some])
    found, origin = read_rows(path)
    assert origin == ORIGIN
    assert [repr(row) for row in found] == [repr(row) for row in rows]
    assert page(found, origin) == page(rows, ORIGIN)


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


def test_runs_of_a_cell_take_turns_and_learn_the_same_from_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[int] = []
    losses: dict[int, list[float]] = {}
    original = Trainer.train_one_update

    def spied(trainer: Trainer) -> dict[str, Any]:
        metrics = original(trainer)
        order.append(id(trainer))
        losses.setdefault(id(trainer), []).append(metrics["loss/total"])
        return metrics

    monkeypatch.setattr(Trainer, "train_one_update", spied)
    shelf = EnvShelf()
    measured = measure(tiny_cell(tmp_path), shelf)
    shelf.close()
    a, b, c = dict.fromkeys(order)
    assert order[:9] == [a, b, c, a, b, c, c, b, a], "one warm-up each, then turns, forward and backward"
    assert measured.rounds == 5
    assert len(losses[a]) == 6
    assert losses[a] == pytest.approx(losses[b], rel=1e-4), "loop and scan round differently"
    assert losses[b] == losses[c], "the control differs in its clock alone"


def test_a_run_without_clock_has_no_phases_and_one_with_it_accounts_for_its_time(tmp_path: Path):
    shelf = EnvShelf()
    measured = measure(tiny_cell(tmp_path), shelf)
    shelf.close()
    control = [sample for samples in measured.runs["torch scan, no clock"].rounds for sample in samples]
    assert all(sample.phases_ms["other"] == sample.phases_ms["total"] for sample in control)
    for row in rows_of(measured):
        assert 0.95 < row.closure <= 1.0 + 1e-3
        assert row.total_ms > 0
    assert [len(times) for times in measured.parts.values()] == [3], "of five rounds, every second one"


@pytest.mark.gpu
def test_runs_on_a_gpu_take_turns_under_graphs_with_every_part_timed(tmp_path: Path):
    text = TINY.replace("credit.torch_mode=loop", "cuda_graphs=false").replace(
        "credit.torch_mode=scan", "credit.backend=triton"
    )
    shelf = EnvShelf()
    cell = next(expand(parse_preset(preset_file(tmp_path, text.replace("[credit]", "[collect, update]"))), "cuda", 1))
    slow, fast = rows_of(measure(cell, shelf))
    shelf.close()
    assert slow.rounds == fast.rounds >= 5
    assert 0.9 < fast.closure <= 1.01
    assert slow.speedup > 1.0 and slow.measured > 1.0, "graphs are faster than launches one by one"


@pytest.mark.parametrize(("engine", "shared"), [("torch", True), ("envpool", False)])
def test_envs_outlive_a_cell_and_those_with_a_state_serve_all_of_its_runs(engine: str, shared: bool):
    shelf = EnvShelf()
    configs = [
        small_config(f"env.engine={engine}", f"num_envs={n}", f"rollout_length={t}")
        for n, t in ((4, 2), (4, 5), (6, 2))
    ]
    first, second = shelf.take(configs[0], 0), shelf.take(configs[0], 1)
    assert (first is second) == shared
    assert shelf.take(configs[1], 0) is first
    assert shelf.take(configs[2], 0) is not first
    shelf.close()
    with pytest.raises((ValueError, IndexError)):
        first.step(torch.zeros(4, dtype=torch.int64))


def test_runs_that_share_an_env_each_go_on_with_episodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rollouts: dict[int, list[torch.Tensor]] = {}
    original = Trainer.train_one_update

    def spied(trainer: Trainer) -> dict[str, Any]:
        metrics = original(trainer)
        assert trainer.newest is not None
        rollouts.setdefault(id(trainer), []).append(trainer.newest[0].observations.clone())
        return metrics

    monkeypatch.setattr(Trainer, "train_one_update", spied)
    shelf = EnvShelf()
    measure(tiny_cell(tmp_path), shelf)
    shelf.close()
    for windows in rollouts.values():
        for window, following in itertools.pairwise(windows):
            assert torch.equal(window[-1], following[0])


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
    assert [bool(row.rounds) for row in rows] == [True, True, False, False]
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
        return measure(cell, shelf)

    monkeypatch.setattr(amdahl, "measure", interrupted_at_the_second)
    assert run_main(monkeypatch, tmp_path, "preset=tiny", "device=cpu", f"out={tmp_path}") == 0
    rows, _ = read_rows(tmp_path / "amdahl.csv")
    assert [row.note for row in rows] == ["", "", "interrupted", "interrupted", "interrupted"]
    assert (tmp_path / "amdahl.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["preset=none"], "preset=none: there is no such preset under scripts/amdahl_presets: tiny"),
        (["preste=tiny"], "did you mean preset?"),
        (["preset=tiny", "only=nothing"], "only=nothing: no cell"),
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


def test_the_smoke_preset_makes_the_whole_report_in_under_a_minute(tmp_path: Path):
    command = [sys.executable, "scripts/amdahl.py", "preset=smoke", "device=cpu", f"out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(
        name in done.stdout for name in ("prediction:", "noise:", "closure:", "clock:", "clock on by clock off:")
    )
    parsed = Page((tmp_path / "amdahl.html").read_text())
    assert tuple(parsed.texts)[1:] == PANELS
    with (tmp_path / "amdahl.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 10 and all(int(line["rounds"]) >= 5 for line in lines)
    assert {line["engine"] for line in lines} == {"torch", "envpool"}
