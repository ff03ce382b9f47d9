"""The scripts that measure credit kernels: what they write into tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("triton")

from scripts import bench_credit, tune_credit
from scripts.credit_report import summarize
from scripts.provenance import provenance


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_the_columns_of_the_table_that_it_is_added_to() -> None:
    where = provenance(["triton"])
    row = bench_credit.table_row({"operation": "gae", "hot_p50": 4.5}, where)
    assert list(row) == list(bench_credit.COLUMNS) == list(table(bench_credit.RESULTS / "credit.csv")[0])
    assert (row["hot_p50"], row["cold_p50"], row["commit"]) == (4.5, "", where["commit"])
    assert all(row[name] for name in ("torch", "triton", "python", "date"))


def test_a_search_for_tiles_adds_rows_as_they_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled, tried = [], []

    def measure(problem: object, tile: object) -> dict[str, object]:
        tried.append(tile)
        if len(tried) % 2:
            raise ValueError("a tile that this GPU cannot hold")
        return {"problem": "gae 128x64 time", "p50": len(table(out)) if out.exists() else 0}

    monkeypatch.setattr(tune_credit, "compile_tiles", compiled.extend)
    monkeypatch.setattr(tune_credit, "measure", measure)
    out = tmp_path / "credit_tiles.csv"
    for _ in range(2):  # the second search leaves the first one's rows
        tune_credit.tune(["gae"], out, 60, [(128, 64)], ["time"])
    rows = table(out)
    assert len(compiled) == len(tried) == 2 * len(rows) > 4
    assert [row["p50"] for row in rows] == [str(i) for i in range(len(rows))]
    assert all(row["commit"] == provenance()["commit"] for row in rows)


def test_torch_baselines_without_kernels_beside_them_have_an_empty_summary() -> None:
    row = {"operation": "gae", "envs": 8, "steps": 4, "layout": "time", "dtype": "float32", "backend": "torch-scan"}
    assert summarize([row]) == ""
