"""Runs side by side: the arithmetic against independent sums, the page's panels, and one-line refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import compare_runs
from scripts.compare_data import Comparison, Run, RunError, at_steps, compare, read_run, returns, throughput
from scripts.compare_html import page
from scripts.compare_tables import tables
from scripts.svg_charts import tick_labels, ticks
from tests.html_pages import Page, needs_nothing_else
from tests.small_runs import small_config
from trainer.schema import to_yaml
from trainer.timing import PHASES, UPDATE_PARTS

EXAMPLES = [
    Path(__file__).resolve().parents[1] / "docs" / "results" / "example_runs" / name for name in ("loop", "scan")
]
PANELS = ("returns", "phases", "throughput", "amdahl", "settings", "result")


def write_run(
    folder: Path,
    *overrides: str,
    updates: int = 9,
    credit_ms: float = 3.0,
    seed: int = 0,
    parts: bool = True,
    change: Callable[[dict[str, Any]], Any] = lambda row: None,
    **summary: Any,
) -> Path:
    """A run folder as the trainer leaves it; phases last random times, credit always ``credit_ms``."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(small_config(f"out='{folder.name}'", *overrides)))
    rows: list[dict[str, Any]] = []
    env_steps, seconds = 0, 0.0
    for update in range(1, updates + 1):
        times = {phase: float(random.uniform(1, 20)) for phase in PHASES} | {"credit": credit_ms}
        total = sum(times.values())
        times |= dict.fromkeys(UPDATE_PARTS, times["update"] / 4) if parts else {}
        steps = int(random.integers(50, 65))
        env_steps, seconds = env_steps + steps, seconds + total / 1e3
        row = {
            "update": update,
            "env_steps": env_steps,
            "seconds": seconds,
            "steps_per_second": steps / (total / 1e3),
            "episode_return": None if update < 3 else 10.0 * update,
            "time/total_ms": total,
            **{f"time/{name}_ms": value for name, value in times.items()},
        }
        change(row)
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {"status": "finished", "env_id": "CartPole-v1", "credit_backend": "torch", "updates": updates}
    (folder / "summary.json").write_text(json.dumps({**facts, "machine": "4 cores", "torch": "2.13", **summary}))
    return folder


def raw(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, read without the project's reader."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def compared(*folders: Path, warmup: int = 2) -> Comparison:
    return compare([read_run(folder, folder.name) for folder in folders], warmup)


def cells(comparison: Comparison, title: str) -> dict[str, list[str]]:
    """The rows of one table, figure spaces as plain ones."""
    table = next(table for table in tables(comparison) if table.title == title)
    return {name: [" ".join(cell.split()) for cell in row] for name, row in table.rows}


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    """The command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    try:
        compare_runs.main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_the_committed_runs_give_a_page_with_every_panel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = tmp_path / "report.html"
    assert run_main(monkeypatch, *EXAMPLES, "--html", report) == 0
    html = report.read_text()
    parsed = Page(html)
    assert parsed.open == []
    assert tuple(parsed.texts)[1:] == PANELS
    assert all(any(parsed.texts[panel]) for panel in PANELS)
    assert html.count("<polyline") == 3 * len(EXAMPLES)
    printed = capsys.readouterr().out
    assert all(title in printed for title in ("Settings that differ", "Phases", "Throughput", "Amdahl", "Result"))


def test_the_page_shows_numbers_of_an_independent_computation():
    parsed = Page(page(compared(*EXAMPLES, warmup=5)))
    for folder in EXAMPLES:
        rows = raw(folder)[5:]
        total = np.array([row["time/total_ms"] for row in rows])
        for phase in (*PHASES, *UPDATE_PARTS):
            times = np.array([row[f"time/{phase}_ms"] for row in rows])
            assert f"{100 * times.sum() / total.sum():.1f}% {np.median(times):.2f} ms" in parsed.texts["phases"]
        assert f"{total.mean():.2f} ms" in parsed.texts["phases"]
        steps = rows[-1]["env_steps"] - raw(folder)[4]["env_steps"]
        assert f"{steps / total.sum():.3g} k" in parsed.texts["throughput"]
        assert f"{rows[-1]['env_steps']:,}" in parsed.texts["result"]
    slow, fast = (np.array([[r["time/credit_ms"], r["time/total_ms"]] for r in raw(f)[5:]]).mean(0) for f in EXAMPLES)
    share, speedup = slow[0] / slow[1], slow[0] / fast[0]
    assert f"{1 / ((1 - share) + share / speedup):.4f}x" in parsed.texts["amdahl"]
    assert f"{slow[1] / fast[1]:.4f}x" in parsed.texts["amdahl"]
    assert parsed.texts["settings"].count("credit.torch_mode") == 1


def test_the_page_loads_nothing_and_runs_nothing():
    assert needs_nothing_else(page(compared(*EXAMPLES)))


def test_costs_are_over_the_same_updates_of_every_run_without_the_warm_up(tmp_path: Path):
    short, long = write_run(tmp_path / "short", updates=5), write_run(tmp_path / "long", updates=9, seed=1)
    comparison = compared(short, long, warmup=2)
    for folder, cost in zip((short, long), comparison.costs, strict=True):
        assert cost.mean_ms["update"] == pytest.approx(sum(row["time/update_ms"] for row in raw(folder)[2:5]) / 3)
        assert sum(cost.share(phase) for phase in PHASES) == pytest.approx(1.0)
    note = next(table.note for table in tables(comparison) if table.title == "Phases")
    assert "3 updates of each run (updates 3 to 5, the first 2 left out as warm-up)" in note


def test_runs_of_different_length_are_compared_at_the_steps_of_the_shortest(tmp_path: Path):
    short, long = write_run(tmp_path / "short", updates=5), write_run(tmp_path / "long", updates=9, seed=1)
    steps = raw(short)[-1]["env_steps"]
    after = next(i for i, row in enumerate(raw(long)) if row["env_steps"] >= steps)
    low, high = raw(long)[after - 1], raw(long)[after]
    weight = (steps - low["env_steps"]) / (high["env_steps"] - low["env_steps"])
    result = cells(compared(short, long), "Result")
    expected = (1 - weight) * low["episode_return"] + weight * high["episode_return"]
    assert result[f"return at {steps:,} steps"] == ["50.00", f"{expected:.2f}"]
    expected = (1 - weight) * low["seconds"] + weight * high["seconds"]
    assert result[f"seconds to {steps:,} steps"][1] == f"{expected:.2f}"
    assert result["return"] == ["50.00", "90.00"]


def test_nothing_is_read_before_the_first_episode_ended(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"), "run")
    assert at_steps(run, "episode_return", run.rows[1]["env_steps"]) is None
    assert returns(run, "env_steps")[0] == (run.rows[2]["env_steps"], 30.0)


def test_a_run_in_which_no_episode_ended_has_no_curve_and_no_return(tmp_path: Path):
    runs = [
        write_run(tmp_path / name, change=lambda row: row.update(episode_return=None), seed=seed)
        for seed, name in enumerate("ab")
    ]
    comparison = compared(*runs)
    assert cells(comparison, "Result")["return"] == ["-", "-"]
    assert "There is nothing to draw" in page(comparison)


def test_a_thinned_throughput_curve_still_counts_every_step_and_second(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", updates=23), "run")
    points = throughput(run, most=7)
    assert len(points) <= 7
    steps = np.diff([0, *(x for x, _ in points)])
    assert sum(steps) == run.last["env_steps"]
    assert sum(steps / [rate for _, rate in points]) == pytest.approx(run.last["seconds"])


def test_amdahl_predicts_exactly_where_credit_alone_differs(tmp_path: Path):
    slow = write_run(tmp_path / "slow", "credit.torch_mode=loop", credit_ms=30.0)
    fast = write_run(tmp_path / "fast", "credit.torch_mode=scan", credit_ms=2.0)
    (pair,) = compared(fast, slow).pairs
    assert (pair.slow.name, pair.fast.name, pair.also_differ) == ("slow", "fast", [])
    assert pair.speedup == pytest.approx(15.0)
    assert pair.rest == pytest.approx(1.0)
    assert pair.measured > 1.2
    assert pair.predicted == pytest.approx(pair.measured)


def test_what_else_differs_is_said_beside_the_prediction(tmp_path: Path):
    a = write_run(tmp_path / "a", "credit.torch_mode=loop", "wandb.mode=offline", machine="8 cores")
    b = write_run(tmp_path / "b", "credit.torch_mode=scan", "seed=2", credit_ms=1.0)
    assert compared(a, b).pairs[0].also_differ == ["seed", "machine"]


def test_among_many_runs_only_those_that_differ_in_the_backend_alone_are_paired(tmp_path: Path):
    runs = [
        write_run(tmp_path / f"{mode}-{seed}", f"credit.torch_mode={mode}", f"seed={seed}")
        for seed in (1, 2)
        for mode in ("loop", "scan")
    ]
    names = [{pair.slow.name, pair.fast.name} for pair in compared(*runs).pairs]
    assert names == [{"loop-1", "scan-1"}, {"loop-2", "scan-2"}]


def test_runs_of_one_backend_have_no_prediction(tmp_path: Path):
    comparison = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", "seed=2"))
    assert comparison.pairs == []
    assert "All runs used the same credit backend" in page(comparison)


def test_only_settings_that_differ_are_shown_and_the_folder_is_not_one(tmp_path: Path):
    a = write_run(tmp_path / "a", "ppo.clip_range=0.1", "policy.hidden_sizes=[8]")
    b = write_run(tmp_path / "b", "ppo.value_clip_range=0.3", "policy.hidden_sizes=[16,16]")
    assert compared(a, b).differences == {
        "policy.hidden_sizes": [[8], [16, 16]],
        "ppo.clip_range": [0.1, 0.2],
        "ppo.value_clip_range": [None, 0.3],
    }


def test_parts_of_update_that_a_cuda_graph_hides_are_not_timed(tmp_path: Path):
    comparison = compared(write_run(tmp_path / "eager"), write_run(tmp_path / "graph", parts=False))
    assert cells(comparison, "Phases")["update: backward"][1] == "not timed"
    assert "not timed" in Page(page(comparison)).texts["phases"]


def test_a_run_that_went_on_after_its_summary_is_not_called_finished(tmp_path: Path):
    comparison = compared(write_run(tmp_path / "a", updates=9), write_run(tmp_path / "b", updates=9))
    stale = Run("b", comparison.runs[1].settings, comparison.runs[1].rows, {**comparison.runs[1].summary, "updates": 4})
    assert (comparison.runs[0].status, stale.status) == ("finished", "resumed, not ended")


def test_names_from_outside_are_text_and_never_markup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    odd = write_run(tmp_path / "<b>[red]&x", machine="<script>")
    assert run_main(monkeypatch, odd, write_run(tmp_path / "b"), "--html", tmp_path / "r.html") == 0
    html = (tmp_path / "r.html").read_text()
    assert "script" not in Page(html).tags
    assert "<b>" not in html
    assert "<b>[red]&x" in capsys.readouterr().out


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path: Path):
    assert compare_runs.names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == [
        str(tmp_path / "x" / "run"),
        str(tmp_path / "y" / "run"),
    ]
    with pytest.raises(RunError, match="given twice"):
        compare_runs.names([tmp_path / "run", tmp_path / "x" / ".." / "run"])


def test_the_runs_of_a_wandb_group_are_found_at_any_depth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for path, project, group in (
        ("day1/a", "rollscan", "mine"),
        ("day2/sweep/b", "rollscan", "mine"),
        ("day2/c", "other", "mine"),
        ("day2/d", "rollscan", "theirs"),
    ):
        write_run(tmp_path / path, f"wandb.group={group}", f"wandb.project={project}")
    copy = tmp_path / "day1" / "a" / "wandb" / "offline-run-1" / "files" / "config.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text("wandb_version: 1")
    found = compare_runs.runs_of_group(tmp_path, "mine", None)
    assert [path.name for path in found] == ["a", "c", "b"]
    assert [path.name for path in compare_runs.runs_of_group(tmp_path, "mine", "rollscan")] == ["a", "b"]
    assert run_main(monkeypatch, "--group", "mine", "--project", "rollscan", "--under", tmp_path, "--warmup", 2) == 0
    assert "Throughput" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--group", "theirs"], "--group theirs: 1 runs under"),
        (["--group", "mine", "--project", "none"], "in the project none have wandb.group=mine"),
        (["--group", "mine", EXAMPLES[0]], "give two or more, or --group NAME without any"),
        ([EXAMPLES[0]], "1 run folders: give two or more"),
        ([], "0 run folders: give two or more"),
    ],
)
def test_fewer_than_two_runs_or_folders_beside_a_group_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[Any],
    said: str,
):
    for name, group in (("a", "mine"), ("b", "mine"), ("c", "theirs")):
        write_run(tmp_path / name, f"wandb.group={group}")
    assert run_main(monkeypatch, *arguments, "--under", tmp_path) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def drop_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("config.yaml", Path.unlink, "there is no such file"),
        ("metrics.jsonl", Path.unlink, "there is no such file"),
        ("summary.json", Path.unlink, "there is no such file"),
        ("config.yaml", lambda path: path.write_text(""), "empty"),
        ("config.yaml", lambda path: path.write_text("num_envs: [1"), "cannot be read"),
        ("config.yaml", lambda path: path.write_text("num_envs: 0"), "num_envs=0"),
        ("metrics.jsonl", lambda path: path.write_text(""), "empty"),
        ("metrics.jsonl", lambda path: cut(path, 0.999), "line 9 of 9 is torn"),
        ("metrics.jsonl", lambda path: cut(path, 0.5), "is torn"),
        ("metrics.jsonl", drop_line, "it ends at update 8, but summary.json counts 9"),
        ("metrics.jsonl", lambda path: path.write_text("7\n"), "line 1 has no number update"),
        ("metrics.jsonl", lambda path: path.write_text('{"update": 1}\n'), "line 1 has no number env_steps"),
        ("metrics.jsonl", lambda path: path.write_bytes(b"\xff\xfe"), "decode"),
        ("summary.json", lambda path: cut(path, 0.5), "torn"),
        ("summary.json", lambda path: path.write_text("{}"), "there is no status"),
    ],
)
def test_a_missing_or_torn_file_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    harm: Callable[[Path], Any],
    said: str,
):
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad")
    harm(bad / file)
    report = tmp_path / "report.html"
    assert run_main(monkeypatch, good, bad, "--html", report) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert str(bad / file) in line
    assert said in line
    assert not report.exists()


@pytest.mark.parametrize("warmup", [-1, 9, 50])
def test_a_warm_up_that_leaves_no_update_is_refused(tmp_path: Path, warmup: int):
    with pytest.raises(RunError, match="made 9 updates"):
        compared(write_run(tmp_path / "a"), write_run(tmp_path / "b"), warmup=warmup)


def test_a_report_that_cannot_be_written_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_main(monkeypatch, *EXAMPLES, "--html", tmp_path) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e6))
def test_ticks_are_few_even_and_cover_the_range(low: float, relative_width: float):
    high = low + relative_width * max(abs(low), 1e-3)
    values = ticks(low, high)
    slack = 1e-6 * (values[1] - values[0])
    assert values[0] <= low + slack and values[-1] >= high - slack
    assert 2 <= len(values) <= 9
    assert np.allclose(np.diff(values), values[1] - values[0], rtol=1e-4, atol=1e-12 * abs(high))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 20_000, 40_000], ["0", "20 k", "40 k"]),
        ([12_300, 12_350, 12_400], ["12.30 k", "12.35 k", "12.40 k"]),
        ([-1.0, -0.5, 0.0], ["-1.0", "-0.5", "0"]),
        ([0, 1e6, 2e6], ["0", "1 M", "2 M"]),
    ],
)
def test_tick_labels_tell_neighbours_apart(values: list[float], labels: list[str]):
    assert tick_labels(values) == labels


def test_one_value_alone_still_has_an_axis():
    assert ticks(500.0, 500.0)[0] < 500.0 < ticks(500.0, 500.0)[-1]
    assert ticks(0.0, 0.0)[0] < 0.0 < ticks(0.0, 0.0)[-1]
