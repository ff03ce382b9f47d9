"""Cells and rows of the Amdahl report for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from small_runs import small_config

from scripts.amdahl_cells import PARTS, Cell, Variant, expand, parse_preset
from scripts.amdahl_measure import EnvShelf, Measured, PartTimes, Sample
from scripts.amdahl_stats import Row, not_measured, rows_of
from trainer.timing import PHASES

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
    cell = Cell("credit", tuple(parts), (Variant("slow", config),), Variant("fast", config), None, 1.0, 1, 0, 1, 0)
    measured = Measured(cell)
    for factor in np.exp(noise * random.standard_normal(rounds)):
        for name, kind in (("slow", slow), ("fast", phases)):
            scaled = {phase: ms * factor for phase, ms in kind.items()}
            total = sum(scaled.values())
            measured.samples[name].append([Sample(total, {**scaled, "total": total}, total / 500)])
    measured.parts["slow"] = [{part: PartTimes(4.0, 1.0) for part in parts}] * 3
    return measured


def measured_at_once(cell: Cell, shelf: EnvShelf) -> Measured:
    """In place of `measure`: all runs of a cell take 15 ms."""
    sample = Sample(15.0, {**dict.fromkeys(PHASES, 1.0), "update": 8.0, "total": 15.0}, 0.1)
    samples = {variant.name: [[sample]] * 3 for variant in cell.variants}
    return Measured(cell, samples, {run.name: [{"credit": PartTimes(1.0, 1.0)}] for run in cell.baselines})


def some_rows() -> list[Row]:
    """Two pairs with their candidates, one of them noise, and a cell that was not measured."""
    slow, fast = rows_of(made_up())
    noise = replace(slow, env="Ant", measured=1.01, low=0.98, high=1.04, predicted=1.005)
    missing = replace(not_measured(made_up().cell, "400 of 400 s were spent"), env="<b>&")
    controlled = replace(fast, clock=1.004, clock_low=0.99, clock_high=1.01, interval=4)
    return [slow, controlled, noise, replace(fast, env="Ant"), missing]
