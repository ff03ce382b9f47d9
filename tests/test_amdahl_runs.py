"""Runs of a cell: they take turns with the same seeds, and none disturbs another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from amdahl_cases import TINY, preset_file, tiny_cell
from small_runs import small_config

from kernels.operations import Backend
from scripts.amdahl_cells import expand, parse_preset
from scripts.amdahl_measure import EnvShelf, measure
from scripts.amdahl_stats import rows_of
from trainer import episodes
from trainer.console import QuietConsole
from trainer.loop import Trainer


def test_runs_of_a_cell_take_turns_and_learn_the_same_from_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[Trainer] = []
    losses: dict[Trainer, list[float]] = {}
    original = Trainer.train_one_update

    def spied(trainer: Trainer) -> dict[str, Any]:
        metrics = original(trainer)
        order.append(trainer)
        losses.setdefault(trainer, []).append(metrics["loss/total"])
        return metrics

    monkeypatch.setattr(Trainer, "train_one_update", spied)
    shelf = EnvShelf()
    measured = measure(tiny_cell(tmp_path), shelf)
    shelf.close()
    a, b, c, d, e, f = dict.fromkeys(order)
    first, second = [a, a, b, b, c, c] + 3 * [a, b, c, c, b, a], [d, d, e, e, f, f] + 3 * [d, e, f, f, e, d]
    assert order == first + second, "a warm-up of two each, rounds there and back, and then once more in another order"
    assert [trainer.config.credit.torch_mode for trainer in (a, b, c, d, e, f)] == ["loop", *["scan"] * 4, "loop"]
    assert measured.rounds == 6
    assert {len(samples) for rounds in measured.samples.values() for samples in rounds} == {2}
    assert losses[a] == pytest.approx(losses[b], rel=1e-4), "loop and scan round differently"
    assert losses[b] == losses[c] and losses[d] == losses[e], "the control differs in its clock alone"


def test_a_run_without_clock_has_no_phases_and_one_with_it_accounts_for_its_time(tmp_path: Path):
    shelf = EnvShelf()
    measured = measure(tiny_cell(tmp_path), shelf)
    shelf.close()
    control = [sample for samples in measured.samples["torch scan, no clock"] for sample in samples]
    assert all(sample.phases_ms["other"] == sample.phases_ms["total"] for sample in control)
    for row in rows_of(measured):
        assert 0.95 < row.closure <= 1.0 + 1e-3
        assert row.total_ms > 0
    assert [len(times) for times in measured.parts.values()] == [measured.rounds]


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


@pytest.mark.gpu
def test_runs_of_different_credit_backends_count_episodes_by_the_same_one(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    original = episodes.episodic_prefix_sum

    def spied(*tensors: torch.Tensor, backend: Backend, **rest: Any) -> Any:
        called.append(backend)
        return original(*tensors, backend=backend, **rest)

    monkeypatch.setattr(episodes, "episodic_prefix_sum", spied)
    for backend in ("torch", "triton"):
        trainer = Trainer(small_config("device=cuda", f"credit.backend={backend}"), QuietConsole())
        assert trainer.train_one_update()["credit_backend"] == backend
        trainer.close()
    assert set(called) == {"triton"}


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
    rollouts: dict[Trainer, list[torch.Tensor]] = {}
    original = Trainer.train_one_update

    def spied(trainer: Trainer) -> dict[str, Any]:
        metrics = original(trainer)
        assert trainer.newest is not None
        rollouts.setdefault(trainer, []).append(trainer.newest[0].observations.clone())
        return metrics

    monkeypatch.setattr(Trainer, "train_one_update", spied)
    shelf = EnvShelf()
    measure(tiny_cell(tmp_path), shelf)
    shelf.close()
    for windows in rollouts.values():
        for window, following in itertools.pairwise(windows):
            assert torch.equal(window[-1], following[0])
