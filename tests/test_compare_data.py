"""Runs side by side: the arithmetic against independent sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_cases import cells, compared, raw, write_run
from html_pages import Page

from scripts.compare_data import Run, at_steps, read_run, returns, throughput
from scripts.compare_html import page
from scripts.compare_tables import tables
from trainer.timing import PHASES


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


def test_runs_are_compared_where_their_env_cannot_be_imported_or_a_value_is_refused_by_now(tmp_path: Path):
    run = write_run(tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("module: null", "module: far_away").replace("seed: 1", "seed: -1"))
    assert read_run(run, "run").settings["env.module"] == "far_away"


def test_a_run_in_which_no_episode_ended_has_no_curve_and_no_return(tmp_path: Path):
    runs = [
        write_run(tmp_path / name, change=lambda row: row.update(episode_return=None), seed=seed)
        for seed, name in enumerate("ab")
    ]
    comparison = compared(*runs)
    assert cells(comparison, "Result")["return"] == ["-", "-"]
    assert "There is nothing to draw" in page(comparison)


def test_runs_of_one_update_of_another_algorithm_or_that_failed_stand_beside_any_other(tmp_path: Path):
    def diverged(row: dict[str, Any]) -> None:
        row.update({key: None for key in row if key.startswith(("loss/", "episode_"))})

    folders = [
        write_run(tmp_path / "a run", updates=9),
        write_run(tmp_path / "short", updates=1, seed=1),
        write_run(tmp_path / "other", "algo=impala", "credit.estimator=vtrace", "credit.torch_mode=loop", seed=2),
        write_run(tmp_path / "failed", change=diverged, status="failed", seed=3),
    ]
    comparison = compared(*folders, warmup=0)
    assert comparison.last_update == 1
    result = cells(comparison, "Result")
    assert result["status"] == ["finished", "finished", "finished", "failed"]
    assert result["return"] == ["90.00", "-", "90.00", "-"]
    assert {"algo", "credit.estimator"} <= comparison.differences.keys()
    assert all("algo" in pair.also_differ for pair in comparison.pairs)
    assert Page(page(comparison)).open == []


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
