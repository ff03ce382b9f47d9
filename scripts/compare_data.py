"""Run folders read for a comparison, and its arithmetic; `scripts/compare_runs.py` shows it."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainer.metrics import Metrics, read_metrics
from trainer.probe import amdahl
from trainer.run_folder import RunFolder
from trainer.schema import read_yaml, to_dict
from trainer.timing import PHASES, UPDATE_PARTS

T = TypeVar("T")
Point = tuple[float, float]

#: Where a run is kept; it differs for any two runs.
PLACE = ("out", "resume")
#: Settings that change nothing of what a run computes.
COSMETIC = (*PLACE, "logging.", "wandb.", "checkpoint.")
CREDIT_BACKEND = ("credit.backend", "credit.torch_mode")
NUMBERS = ("update", "env_steps", "seconds", *(f"time/{name}_ms" for name in (*PHASES, "total")))
#: Numbers, or null until the first episode has ended.
UNTIL_KNOWN = ("episode_return", "episode_length")
SUMMARY_KEYS = ("status", "env_id", "credit_backend", "updates", "machine", "torch")


class RunError(ValueError):
    """A run that cannot be compared; the message is one line that begins with the file or the run."""


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    settings: dict[str, Any]  #: by dotted key
    rows: list[Metrics]  #: one per update, not empty
    summary: Metrics

    @property
    def last(self) -> Metrics:
        """The newest update."""
        return self.rows[-1]

    @property
    def credit(self) -> str:
        """The credit backend that was used: ``triton``, ``torch loop``, ``torch auto``."""
        backend = self.summary["credit_backend"]
        return f"torch {self.settings['credit.torch_mode']}" if backend == "torch" else backend

    @property
    def status(self) -> str:
        """How the run ended, or that it was resumed after its summary was written."""
        return self.summary["status"] if self.last["update"] == self.summary["updates"] else "resumed, not ended"


@dataclass(frozen=True)
class Cost:
    """What the phases of a run cost per update, in milliseconds, over some updates.

    The names are ``PHASES``, ``total``, and the parts of ``update`` that were timed.
    """

    mean_ms: dict[str, float]  #: sums over the updates, divided by their number
    median_ms: dict[str, float]
    steps_per_second: float  #: valid env steps of these updates by their wall time

    def share(self, name: str) -> float:
        """A phase's part of the wall time: its sum of milliseconds by the sum of the totals."""
        return self.mean_ms[name] / self.mean_ms["total"]


@dataclass(frozen=True)
class CreditPair:
    """Two runs that differ in the credit backend: what Amdahl's law predicts, and what was measured."""

    slow: Run  #: whose credit phase takes longer
    fast: Run
    share: float  #: p, of credit in the slow run
    speedup: float  #: s, of the credit phase alone
    measured: float  #: time per update, slow by fast, from sums
    measured_median: float  #: the same from medians
    rest: float  #: time per update outside credit, slow by fast; 1 if the backend alone made the difference
    also_differ: list[str]  #: other settings (cosmetic ones left out), the machine, the version of torch

    @property
    def predicted(self) -> float:
        """Amdahl (1967): ``1 / ((1 - p) + p / s)``."""
        return amdahl(self.share, self.speedup)


@dataclass(frozen=True)
class Comparison:
    """Everything that tables and panels show."""

    runs: list[Run]
    warmup: int  #: first updates that the costs leave out
    last_update: int  #: of the shortest run: costs are over updates ``warmup + 1`` to this one, in every run
    costs: list[Cost]
    common_steps: int  #: env steps of the run that made the fewest
    differences: dict[str, list[Any]]  #: settings that differ, a value per run
    pairs: list[CreditPair]


def read_run(path: Path, name: str) -> Run:
    """A run folder's configuration, metrics and summary.

    Raises:
        RunError: a file is missing, torn, or lacks what the comparison needs.
    """
    folder = RunFolder(path)
    run = Run(name, read_settings(folder.config), _read(folder.metrics, _rows), _read(folder.summary, _summary))
    if run.last["update"] < run.summary["updates"]:
        raise RunError(
            f"{folder.metrics}: it ends at update {run.last['update']}, but summary.json counts "
            f"{run.summary['updates']}"
        )
    return run


def _read(path: Path, parse: Callable[[Path], T]) -> T:
    if not path.is_file():
        raise RunError(f"{path}: there is no such file; {_missing(path)}")
    try:
        return parse(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}") from error


def _missing(path: Path) -> str:
    """What a user does about a file that a run folder lacks."""
    if not (path.parent / "config.yaml").is_file():
        return "give the folder of a run or a sweep, as `out` named it"
    return f"the run is under way or was killed, and `scripts/train.py resume={path.parent}` ends it"


def read_settings(path: Path) -> dict[str, Any]:
    """A ``config.yaml`` by dotted keys.

    Raises:
        RunError: it is missing, torn, or refused.
    """
    return _read(path, _settings)


def _settings(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("the file is empty")  # a mapping without keys would be the defaults
    return dict(_flatten(to_dict(read_yaml(text))))


def _flatten(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _rows(path: Path) -> list[Metrics]:
    rows = read_metrics(path)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if len(rows) < lines or not rows:
        raise ValueError(f"line {len(rows) + 1} of {lines} is torn" if lines else "the file is empty")
    for number, row in enumerate(rows, start=1):
        missing = [key for key in NUMBERS if not isinstance(row.get(key), int | float)]
        if missing:
            raise ValueError(f"line {number} has no number {missing[0]}")
        worded = [key for key in UNTIL_KNOWN if not isinstance(row.get(key), int | float | None)]
        if worded:
            raise ValueError(f"line {number}: {worded[0]} is neither a number nor null")
    return rows


def _summary(path: Path) -> Metrics:
    try:
        summary = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(f"the file is torn: {error}") from error
    missing = [key for key in SUMMARY_KEYS if not isinstance(summary, dict) or key not in summary]
    if missing:
        raise ValueError(f"there is no {missing[0]}")
    if type(summary["updates"]) is not int:
        raise ValueError(f"updates is no whole number: {summary['updates']}")
    return summary


def compare(runs: list[Run], warmup: int) -> Comparison:
    """Compare runs; costs are over the updates that all of them made, without the first ``warmup``.

    Raises:
        RunError: a run is not longer than the warm-up.
    """
    shortest = min(runs, key=lambda run: run.last["update"])
    last_update = shortest.last["update"]
    if not 0 <= warmup < last_update:
        raise RunError(f"--warmup {warmup}: {shortest.name} made {last_update} updates; say 0 to {last_update - 1}")
    costs = [cost(run, warmup, last_update) for run in runs]
    return Comparison(
        runs,
        warmup,
        last_update,
        costs,
        common_steps=min(run.last["env_steps"] for run in runs),
        differences=differing_settings(runs, PLACE),
        pairs=credit_pairs(runs, costs),
    )


def cost(run: Run, warmup: int, last_update: int) -> Cost:
    """What updates ``warmup + 1`` to ``last_update`` cost."""
    before = [row for row in run.rows if row["update"] <= warmup]
    rows = [row for row in run.rows if warmup < row["update"] <= last_update]
    timed = [part for part in UPDATE_PARTS if all(f"time/{part}_ms" in row for row in rows)]
    milliseconds = {name: [row[f"time/{name}_ms"] for row in rows] for name in (*PHASES, *timed, "total")}
    steps = rows[-1]["env_steps"] - (before[-1]["env_steps"] if before else 0)
    return Cost(
        mean_ms={name: statistics.fmean(values) for name, values in milliseconds.items()},
        median_ms={name: statistics.median(values) for name, values in milliseconds.items()},
        steps_per_second=steps / (sum(milliseconds["total"]) / 1e3),
    )


def differing_settings(runs: list[Run], ignored: tuple[str, ...]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all runs, except those that begin as one of ``ignored``."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if not key.startswith(ignored))
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def credit_pairs(runs: list[Run], costs: list[Cost]) -> list[CreditPair]:
    """Every two runs of different credit backends; only those that differ in nothing else, if there are any."""
    pairs = []
    for two in itertools.combinations(zip(runs, costs, strict=True), 2):
        (fast, fast_cost), (slow, slow_cost) = sorted(two, key=lambda item: item[1].mean_ms["credit"])
        if slow.credit != fast.credit:
            pairs.append(_credit_pair(slow, slow_cost, fast, fast_cost))
    return [pair for pair in pairs if not pair.also_differ] or pairs


def _credit_pair(slow: Run, slow_cost: Cost, fast: Run, fast_cost: Cost) -> CreditPair:
    def ratio(slow_ms: float, fast_ms: float) -> float:
        return slow_ms / fast_ms if fast_ms else math.inf

    a, b = slow_cost.mean_ms, fast_cost.mean_ms
    settings = differing_settings([slow, fast], (*COSMETIC, *CREDIT_BACKEND))
    surroundings = [key for key in ("machine", "torch") if slow.summary[key] != fast.summary[key]]
    return CreditPair(
        slow,
        fast,
        share=slow_cost.share("credit"),
        speedup=ratio(a["credit"], b["credit"]),
        measured=ratio(a["total"], b["total"]),
        measured_median=ratio(slow_cost.median_ms["total"], fast_cost.median_ms["total"]),
        rest=ratio(a["total"] - a["credit"], b["total"] - b["credit"]),
        also_differ=[*settings, *surroundings],
    )


def at_steps(run: Run, key: str, steps: float) -> float | None:
    """A metric when the run had made so many env steps, linear between updates; None before its first value."""
    known = [(row["env_steps"], row[key]) for row in run.rows if row.get(key) is not None]
    if not known or steps < known[0][0]:
        return None
    known_steps, values = zip(*known, strict=True)
    return float(np.interp(steps, known_steps, values))


def _thinned(rows: list[Metrics], most: int) -> list[Metrics]:
    """At most so many evenly spaced rows, the last one included."""
    stride = max(1, -(-len(rows) // most))
    return rows[::-1][::stride][::-1]


def returns(run: Run, x: str, most: int = 400) -> list[Point]:
    """The mean return of the last episodes against ``env_steps`` or ``seconds``."""
    known = [row for row in run.rows if row.get("episode_return") is not None]
    return [(row[x], row["episode_return"]) for row in _thinned(known, most)]


def throughput(run: Run, most: int = 100) -> list[Point]:
    """Env steps per second of wall time against env steps; exact over the updates between two points."""
    start: Metrics = {"env_steps": 0, "seconds": 0.0}
    marks = [start, *_thinned(run.rows, most)]
    return [
        (after["env_steps"], (after["env_steps"] - before["env_steps"]) / (after["seconds"] - before["seconds"]))
        for before, after in itertools.pairwise(marks)
        if after["seconds"] > before["seconds"]
    ]
