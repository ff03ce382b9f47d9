"""From measured rounds to rows of a table: paired ratios with bootstrap intervals beside Amdahl's prediction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scripts.amdahl_cells import PARTS, Cell, Labels
from scripts.amdahl_measure import Measured, PartTimes, Run, Sample
from trainer.probe import amdahl
from trainer.timing import PHASES

Times = NDArray[np.float64]

RESAMPLES = 4000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A ratio with its bootstrap interval."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Row(Labels):
    """One run of a cell, compared with the cell's candidate; what does not apply is NaN.

    A cell that was not measured is one row without rounds, whose note says why.
    """

    variant: str
    candidate: str
    note: str = ""
    rounds: int = 0
    total_ms: float = math.nan  #: median time per update, end to end, by the host's clock
    closure: float = math.nan  #: sum of the phases, ``other`` among them, by ``total_ms``
    named: float = math.nan  #: the same without ``other``
    measured: float = math.nan  #: total_ms by that of the candidate
    low: float = math.nan  #: of the 95 % interval of ``measured``
    high: float = math.nan
    share: float = math.nan  #: p: of the parts that differ, by this run's phase clock
    speedup: float = math.nan  #: s: of these parts alone, from this run to the candidate
    predicted: float = math.nan  #: ``1 / ((1 - p) + p / s)``
    rest: float = math.nan  #: time outside these parts by that of the candidate; 1 if nothing else differs
    clock_share: float = math.nan  #: number of phases times the cost of an empty one, by ``total_ms``
    clock: float = math.nan  #: total_ms by that of the same run without phase clock
    clock_low: float = math.nan
    clock_high: float = math.nan
    env_step_ms: float = math.nan
    transfer_ms: float = math.nan
    inference_ms: float = math.nan
    credit_ms: float = math.nan
    update_ms: float = math.nan
    normalize_ms: float = math.nan
    log_ms: float = math.nan
    other_ms: float = math.nan

    @property
    def labels(self) -> Labels:
        """The cell that this is a run of."""
        return Labels(**{field.name: getattr(self, field.name) for field in fields(Labels)})

    @property
    def is_pair(self) -> bool:
        """Whether this is a run that was compared with the candidate."""
        return not math.isnan(self.measured)

    @property
    def error(self) -> float:
        """How far the prediction is above the measured ratio, as a part of it."""
        return self.predicted / self.measured - 1.0

    @property
    def is_noise(self) -> bool:
        """Whether a ratio of 1 is within the interval: the rounds show no difference."""
        return self.low <= 1.0 <= self.high

    @property
    def phases_ms(self) -> dict[str, float]:
        """Median time per update of each phase."""
        return {name: getattr(self, f"{name}_ms") for name in PHASES}


def rows_of(measured: Measured) -> list[Row]:
    """A row for each run of a cell but the control."""
    cell, runs = measured.cell, measured.runs
    candidate = runs[cell.candidate.name]
    control = ratio(_walls(candidate), _walls(runs[cell.control.name])) if cell.control else Interval()
    rows = [_row(cell, runs[name], candidate, parts) for name, parts in measured.parts.items()]
    own = Row(**_common(cell, candidate), clock=control.value, clock_low=control.low, clock_high=control.high)
    return [*rows, own]


def not_measured(cell: Cell, reason: str) -> Row:
    """The row of a cell that could not be measured."""
    return Row(**vars(cell.labels), variant="", candidate=cell.candidate.name, note=reason)


def ratio(a: Times, b: Times) -> Interval:
    """Median of ``a`` by median of ``b``, both ``[R]`` from the same R rounds, with a 95 % interval.

    The interval is the percentile bootstrap (Efron 1979) over rounds: a round is drawn with both of its times, so that
    what slows both of them down cancels.
    """
    draws = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    ratios = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    low, high = np.quantile(ratios, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high))


def _mean_of(run: Run, figure: Callable[[Sample], float]) -> Times:
    """``[R]``: a figure of an update, the mean of each round."""
    return np.array([statistics.fmean(map(figure, samples)) for samples in run.rounds])


def _walls(run: Run) -> Times:
    """``[R]``: milliseconds per update in each round."""
    return _mean_of(run, lambda sample: sample.wall_ms)


def _phases(run: Run, *names: str) -> Times:
    """``[R]``: milliseconds per update of these phases together."""
    return _mean_of(run, lambda sample: sum(sample.phases_ms[name] for name in names))


def _common(cell: Cell, run: Run) -> dict[str, Any]:
    """What a row says of its own run."""
    walls, total = _walls(run), _phases(run, "total")
    return {
        **vars(cell.labels),
        "variant": run.variant.name,
        "candidate": cell.candidate.name,
        "rounds": len(walls),
        "total_ms": float(np.median(walls)),
        "closure": float(np.median(total / walls)),
        "named": float(np.median((total - _phases(run, "other")) / walls)),
        "clock_share": float(np.median(_mean_of(run, lambda sample: sample.clock_ms) / walls)),
        **{f"{name}_ms": float(np.median(_phases(run, name))) for name in PHASES},
    }


def _row(cell: Cell, baseline: Run, candidate: Run, parts: Sequence[dict[str, PartTimes]]) -> Row:
    measured = ratio(_walls(baseline), _walls(candidate))
    total = _phases(baseline, "total")
    shares = {name: float(np.median(_phases(baseline, *PARTS[name]) / total)) for name in cell.parts}
    speedups = {name: _speedup([timing[name] for timing in parts]) for name in cell.parts}
    share = sum(shares.values())
    speedup = share / sum(shares[name] / speedups[name] for name in cell.parts)
    differing = [phase for name in cell.parts for phase in PARTS[name]]
    outside = [np.median(_phases(run, "total") - _phases(run, *differing)) for run in (baseline, candidate)]
    return Row(
        **_common(cell, baseline),
        measured=measured.value,
        low=measured.low,
        high=measured.high,
        share=share,
        speedup=speedup,
        predicted=amdahl(share, speedup),
        rest=float(outside[0] / outside[1]),
    )


def _speedup(timings: Sequence[PartTimes]) -> float:
    return statistics.median(t.baseline_ms for t in timings) / statistics.median(t.candidate_ms for t in timings)
