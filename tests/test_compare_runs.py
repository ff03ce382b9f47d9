"""`scripts/compare_runs.py` as it is called: the page's panels, groups of runs, one-line refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_cases import EXAMPLES, compared, raw, write_run
from html_pages import Page, needs_nothing_else

from scripts import compare_runs
from scripts.compare_data import RunError
from scripts.compare_html import page
from trainer.timing import PHASES, UPDATE_PARTS

PANELS = ("returns", "phases", "throughput", "amdahl", "settings", "result")


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


def test_names_from_outside_are_text_and_never_markup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    odd = write_run(tmp_path / "a folder" / "<b>[red]&x", machine="<script>")
    assert run_main(monkeypatch, odd, write_run(tmp_path / "b"), "--html", tmp_path / "r.html") == 0
    html = (tmp_path / "r.html").read_text()
    assert "script" not in Page(html).tags
    assert "<b>" not in html
    assert "<b>[red]&x" in capsys.readouterr().out


def test_the_folder_of_a_sweep_stands_for_its_runs_in_the_order_of_their_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for job in (0, 2, 10):  # job 1 failed before it had a folder
        write_run(tmp_path / "sweep" / str(job), f"seed={job}")
    alone = write_run(tmp_path / "alone", "seed=5")
    assert compare_runs.runs_in(tmp_path / "sweep") == [tmp_path / "sweep" / job for job in ("0", "2", "10")]
    assert run_main(monkeypatch, tmp_path / "sweep", alone) == 0
    printed = capsys.readouterr().out
    places = [printed.index(name) for name in ("sweep/0", "sweep/2", "sweep/10", "alone")]
    assert places == sorted(places)
    assert run_main(monkeypatch, tmp_path) == 0, "a folder of runs that no sweep made"
    (tmp_path / "empty").mkdir()
    assert run_main(monkeypatch, tmp_path / "empty") == 1
    assert "config.yaml: there is no such file; give the folder of a run or a sweep" in capsys.readouterr().err


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


def test_a_run_alone_is_shown_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = tmp_path / "report.html"
    assert run_main(monkeypatch, EXAMPLES[0], "--html", report) == 0
    printed = capsys.readouterr().out
    assert all(title in printed for title in ("Phases", "Throughput", "Result"))
    assert not any(words in printed for words in ("relative to", "shortest run", "return at"))
    assert tuple(Page(report.read_text()).texts)[1:] == ("returns", "phases", "throughput", "result")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--group", "theirs"], "--group theirs: 1 runs under"),
        (["--group", "mine", "--project", "none"], "in the project none have wandb.group=mine"),
        (["--group", "mine", EXAMPLES[0]], "give one or more, or --group NAME without any"),
        ([], "0 run folders: give one or more"),
    ],
)
def test_no_run_a_group_of_one_or_folders_beside_a_group_are_refused(
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
        ("config.yaml", Path.unlink, "there is no such file; give the folder of a run"),
        ("metrics.jsonl", Path.unlink, "there is no such file; the run is under way or was killed"),
        ("summary.json", Path.unlink, "there is no such file; the run is under way or was killed"),
        ("config.yaml", lambda path: path.write_text(""), "empty"),
        ("config.yaml", lambda path: path.write_text("num_envs: [1"), "cannot be read"),
        ("config.yaml", lambda path: path.write_text("num_envs: many"), "num_envs=many is not a whole number"),
        ("metrics.jsonl", lambda path: path.write_text(""), "empty"),
        ("metrics.jsonl", lambda path: cut(path, 0.999), "line 9 of 9 is torn"),
        ("metrics.jsonl", lambda path: cut(path, 0.5), "is torn"),
        ("metrics.jsonl", drop_line, "it ends at update 8, but summary.json counts 9"),
        ("metrics.jsonl", lambda path: path.write_text("7\n"), "line 1 of 1 is torn"),
        ("metrics.jsonl", lambda path: path.write_text('{"update": 1}\n'), "line 1 has no number env_steps"),
        (
            "metrics.jsonl",
            lambda path: path.write_text(path.read_text().replace(": 90.0", ': "x"')),
            "line 9: episode_return is neither a number nor null",
        ),
        (
            "summary.json",
            lambda path: path.write_text(path.read_text().replace('"updates": 9', '"updates": null')),
            "updates is no whole number: None",
        ),
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
    with pytest.raises(RunError, match=f"--warmup {warmup}: [ab] made 9 updates; say 0 to 8"):
        compared(write_run(tmp_path / "a"), write_run(tmp_path / "b"), warmup=warmup)


def test_a_report_that_cannot_be_written_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_main(monkeypatch, *EXAMPLES, "--html", tmp_path) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
