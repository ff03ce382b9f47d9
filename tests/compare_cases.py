"""Run folders to compare, written and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from small_runs import small_config

from scripts.compare_data import Comparison, compare, read_run
from scripts.compare_tables import tables
from trainer.schema import to_yaml
from trainer.timing import PHASES, UPDATE_PARTS

EXAMPLES = [
    Path(__file__).resolve().parents[1] / "docs" / "results" / "example_runs" / name for name in ("loop", "scan")
]


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
