"""The update benchmark measures what it says, on a batch small enough for a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from scripts import bench_update, update_roofline
from scripts.update_problems import PROBLEMS, fixed_batch
from scripts.update_variants import VARIANTS, ours

SMALL = PROBLEMS["ant"]._replace(steps=4, envs=16, hidden_sizes=(8, 4))


def test_eager_updates_are_measured_and_checked_against_float32() -> None:
    rows = list(bench_update.measure(SMALL, fixed_batch(SMALL, "cpu"), "bf16", 3, "cpu"))
    assert rows[0]["variant"] == "eager"
    assert 0 < rows[0]["p20_ms"] <= rows[0]["p50_ms"] <= rows[0]["p80_ms"]
    assert 0 < float(rows[0]["error"]) <= bench_update.TOLERANCES["bf16"]


def test_a_variant_that_takes_another_step_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench_update.TOLERANCES, "bf16", 0.0)
    monkeypatch.setitem(PROBLEMS, "ant", SMALL)
    command = ["bench_update.py", "--problems", "ant", "--precisions", "bf16", "fp32", "--device", "cpu", "--no-save"]
    monkeypatch.setattr("sys.argv", [*command, "--repeats", "2"])
    with pytest.raises(SystemExit, match=r"^ant, bf16, eager: steps differ by \de-\d\d > 0.0$"):
        bench_update.main()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed if words[:1] == ["ant"]] == ["fp32"]


def test_every_variant_starts_from_the_same_parameters_and_batch() -> None:
    batches = [fixed_batch(SMALL, "cpu") for _ in range(2)]
    assert torch.equal(batches[0].rollout.actions, batches[1].rollout.actions)
    made = [ours(SMALL, batch, VARIANTS["eager"], "fp32", SMALL.ppo()).parameters for batch in batches]
    for name, x in made[0].items():
        assert torch.equal(x, made[1][name]), name


def test_ratios_are_to_the_baselines_that_ran() -> None:
    rows = [{"variant": "eager", "p50_ms": 9.0}, {"variant": "graph", "p50_ms": 3.0}]
    assert [row["÷ eager"] for row in bench_update.with_ratios(rows)] == ["1.00", "3.00"]


def test_the_operations_of_an_update_are_those_of_its_products() -> None:
    expected = 0
    for outputs in (SMALL.actions, 1):
        pairs = list(itertools.pairwise([SMALL.observations, *SMALL.hidden_sizes, outputs]))
        forward = sum(2 * x * y for x, y in pairs)
        input_gradients = forward - 2 * pairs[0][0] * pairs[0][1]
        expected += SMALL.rows * (2 * forward + input_gradients)
    assert update_roofline.operations(SMALL) == SMALL.update_epochs * expected
