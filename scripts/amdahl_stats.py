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
from scripts.amdahl_measure import Measured, PartTimes, Rounds, Sample
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
    measured: float = math.nan  #: time per update by that of the candidate, median over rounds
    low: float = math.nan  #: of the 95 % interval of ``measured``
    high: float = math.nan
    share: float = math.nan  #: p: of the parts that differ, by this run's phase clock
    speedup: float = math.nan  #: s: of these parts alone, from this run to the candidate
    predicted: float = math.nan  #: ``1 / ((1 - p) + p / s)``
    rest: float = math.nan  #: time outside these parts by that of the candidate; 1 if nothing else differs
    clock_share: float = math.nan  #: number of phases times the cost of an empty one, by ``total_ms``
    interval: int = 1  #: of so many such updates a run of its own times one; here every one was timed
    clock: float = math.nan  #: time per update by that of the same run without phase clock, median over rounds
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
    def clock_in_a_run(self) -> float:
        """By how much timing slows a run of its own down, as a part: the updates between cost what those without clock
        do."""
        return (self.clock - 1.0) / self.interval

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
    cell, samples = measured.cell, measured.samples
    candidate = samples[cell.candidate.name]
    control = ratio(_walls(candidate), _walls(samples[cell.control.name])) if cell.control else Interval()
    rows = [_row(cell, name, samples[name], candidate, parts) for name, parts in measured.parts.items()]
    own = _common(cell, cell.candidate.name, candidate)
    return [*rows, Row(**own, clock=control.value, clock_low=control.low, clock_high=control.high)]


def not_measured(cell: Cell, reason: str) -> Row:
    """The row of a cell that could not be measured."""
    return Row(**vars(cell.labels), variant="", candidate=cell.candidate.name, note=reason)


def ratio(a: Times, b: Times) -> Interval:
    """Median over rounds of ``a / b``, both ``[R]`` from the same R rounds, with a 95 % interval.

    What slows both times of a round down cancels in their ratio, which a ratio of medians would not have. The interval
    is the percentile bootstrap (Efron 1979) over rounds.
    """
    ratios = a / b
    draws = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Interval(float(np.median(ratios)), float(low), float(high))


def _mean_of(rounds: Rounds, figure: Callable[[Sample], float]) -> Times:
    """``[R]``: a figure of an update, the mean of each round."""
    return np.array([statistics.fmean(map(figure, samples)) for samples in rounds])


def _walls(rounds: Rounds) -> Times:
    """``[R]``: milliseconds per update in each round."""
    return _mean_of(rounds, lambda sample: sample.wall_ms)


def _phases(rounds: Rounds, *names: str) -> Times:
    """``[R]``: milliseconds per update of these phases together."""
    return _mean_of(rounds, lambda sample: sum(sample.phases_ms[name] for name in names))


def _common(cell: Cell, name: str, rounds: Rounds) -> dict[str, Any]:
    """What a row says of its own run."""
    walls, total = _walls(rounds), _phases(rounds, "total")
    return {
        **vars(cell.labels),
        "variant": name,
        "candidate": cell.candidate.name,
        "rounds": len(walls),
        "total_ms": float(np.median(walls)),
        "closure": float(np.median(total / walls)),
        "named": float(np.median((total - _phases(rounds, "other")) / walls)),
        "clock_share": float(np.median(_mean_of(rounds, lambda sample: sample.clock_ms) / walls)),
        "interval": round(np.median(_mean_of(rounds, lambda sample: sample.interval))),
        **{f"{phase}_ms": float(np.median(_phases(rounds, phase))) for phase in PHASES},
    }


def _row(cell: Cell, name: str, baseline: Rounds, candidate: Rounds, parts: Sequence[dict[str, PartTimes]]) -> Row:
    measured = ratio(_walls(baseline), _walls(candidate))
    total = _phases(baseline, "total")
    shares = {part: float(np.median(_phases(baseline, *PARTS[part]) / total)) for part in cell.parts}
    speedups = {part: _speedup([timing[part] for timing in parts]) for part in cell.parts}
    share = sum(shares.values())
    speedup = share / sum(shares[part] / speedups[part] for part in cell.parts)
    differing = [phase for part in cell.parts for phase in PARTS[part]]
    outside = [_phases(rounds, "total") - _phases(rounds, *differing) for rounds in (baseline, candidate)]
    return Row(
        **_common(cell, name, baseline),
        measured=measured.value,
        low=measured.low,
        high=measured.high,
        share=share,
        speedup=speedup,
        predicted=amdahl(share, speedup),
        rest=ratio(*outside).value,
    )


def _speedup(timings: Sequence[PartTimes]) -> float:
    return statistics.median(t.baseline_ms for t in timings) / statistics.median(t.candidate_ms for t in timings)
