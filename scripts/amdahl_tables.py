"""Rows of `scripts/amdahl.py` as words: names of cells, the table of figures, and what closes the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from scripts.amdahl_cells import Labels
from scripts.amdahl_stats import Row

#: A prediction this near to the measured ratio is called right.
NEAR = 0.03
#: Phases must explain so much of the wall time, and timing them may cost so much.
CLOSURE, CLOCK = 0.98, 0.01


def title(labels: Labels) -> str:
    """A cell's name: env, engine, envs x steps, network, algorithm with its passes, what is compared."""
    algorithm = f"{labels.algo} {labels.epochs}x{labels.minibatches}"
    anew = f", credit per {labels.recompute}" if labels.recompute != "rollout" else ""
    what = f", {labels.compare}" if labels.compare != "credit" else ""
    shape = f"{labels.num_envs}x{labels.rollout_length}"
    return f"{labels.env} {labels.engine} {shape}, {labels.hidden}, {algorithm}{anew}{what}"


def cells_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each cell that was measured, by its name."""
    cells: dict[str, list[Row]] = {}
    for row in rows:
        if row.rounds:
            cells.setdefault(title(row), []).append(row)
    return cells


def ratio_text(value: float) -> str:
    """``1.0234x``."""
    return f"{value:.3f}x"


def verdict(row: Row) -> str:
    """A pair in words: what the candidate is worth, or that the rounds cannot tell."""
    return "within noise" if row.is_noise else f"{row.measured - 1:+.1%}"


#: Columns of the table of figures.
FACTS: list[tuple[str, Callable[[Row], str]]] = [
    ("against", lambda row: row.candidate),
    ("rounds", lambda row: str(row.rounds)),
    ("ms", lambda row: f"{row.total_ms:.2f}"),
    ("p", lambda row: f"{row.share:.2%}"),
    ("s", lambda row: f"{row.speedup:.2f}"),
    ("predicted", lambda row: ratio_text(row.predicted)),
    ("measured", lambda row: ratio_text(row.measured)),
    ("95 % interval", lambda row: f"{row.low:.3f} to {row.high:.3f}"),
    ("off by", lambda row: f"{row.error:+.1%}"),
    ("rest", lambda row: ratio_text(row.rest)),
    ("worth", verdict),
]


def figure_rows(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Every pair with its facts."""
    return [(f"{title(row)}: {row.variant}", [fact(row) for _, fact in FACTS]) for row in rows if row.is_pair]


def figures_text(rows: Sequence[Row]) -> str:
    """The table of figures, aligned."""
    lines = [["", *(name for name, _ in FACTS)], *([name, *cells] for name, cells in figure_rows(rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) for cells in lines)


def table_markdown(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of cells and their figures for a page in Markdown."""
    lines = [["cell", *columns], ["---", *("--:" for _ in columns)], *([name, *cells] for name, cells in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


#: What a cell says of the clock itself; the clock's cost is that of the candidate, which also ran without.
CHECKS: list[tuple[str, Callable[[Sequence[Row], Row], str]]] = [
    ("phases by wall time", lambda runs, _: f"{min(row.closure for row in runs):.2%}"),
    ("without other", lambda runs, _: f"{min(row.named for row in runs):.2%}"),
    ("clock on by off", lambda _, own: _signed(own.clock - 1.0)),
    ("95 % interval", lambda _, own: _signed(own.clock_low - 1.0, own.clock_high - 1.0)),
    ("updates per timed one", lambda _, own: str(own.interval)),
    ("cost in a run", lambda _, own: _signed(own.clock_in_a_run)),
]


def _signed(*parts: float) -> str:
    return "-" if math.isnan(sum(parts)) else " to ".join(f"{part:+.2%}" for part in parts)


def check_rows(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Every cell with its checks of the clock."""
    return [
        (name, [check(runs, own) for _, check in CHECKS])
        for name, runs in cells_of(rows).items()
        for own in runs
        if own.variant == own.candidate
    ]


def is_precise(row: Row) -> bool:
    """Whether a pair's interval is narrow enough to judge a prediction by."""
    return max(row.high / row.measured, row.measured / row.low) <= 1.0 + NEAR


def missed(rows: Sequence[Row]) -> list[Row]:
    """Pairs whose prediction is not near."""
    return [row for row in rows if row.is_pair and abs(row.error) > NEAR]


def closing_lines(rows: Sequence[Row]) -> list[str]:
    """How the report's own claims came out: predictions, noise, closure, the clock's cost, what is missing."""
    pairs = [row for row in rows if row.is_pair]
    runs = [row for row in rows if row.rounds]
    controlled = [row for row in runs if not math.isnan(row.clock)]
    lines = _prediction_lines(pairs) if pairs else []
    lines += [_closure_line(runs), _clock_line(runs)] if runs else []
    lines += [_control_line(controlled)] if controlled else []
    return lines + [f"not measured: {title(row)}: {row.note}" for row in rows if not row.rounds]


def _prediction_lines(pairs: Sequence[Row]) -> list[str]:
    precise = [row for row in pairs if is_precise(row)]
    noise = sum(row.is_noise for row in pairs)
    error = statistics.median(abs(row.error) for row in pairs)
    rests = [row.rest for row in pairs]
    return [
        f"prediction: {_near(pairs)}, median error {error:.2%}; of the pairs whose interval is as narrow as that, "
        f"{_near(precise)}",
        f"noise: {noise} of {len(pairs)} pairs show no difference, their interval holds 1",
        f"rest: the other phases stand at {ratio_text(statistics.median(rests))} (median of {len(rests)} pairs), "
        f"{ratio_text(min(rests))} to {ratio_text(max(rests))}",
    ]


def _near(pairs: Sequence[Row]) -> str:
    near = len(pairs) - len(missed(pairs))
    share = f" ({near / len(pairs):.0%})" if pairs else ""
    return f"{near} of {len(pairs)} pairs within {NEAR:.0%}{share}"


def _closure_line(runs: Sequence[Row]) -> str:
    least = min(runs, key=lambda row: row.named)
    closed = sum(row.named >= CLOSURE for row in runs)
    return (
        f"closure: the phases sum to at least {min(row.closure for row in runs):.2%} of the wall time; without `other` "
        f"to at least {least.named:.2%} ({title(least)}: {least.variant}), in {closed} of {len(runs)} runs to "
        f"{CLOSURE:.0%}"
    )


def _clock_line(runs: Sequence[Row]) -> str:
    dearest, typical = max(runs, key=lambda row: row.clock_share), statistics.median(row.clock_share for row in runs)
    return (
        f"clock: the number of phases times the cost of an empty one is {typical:.2%} of the update (median of "
        f"{len(runs)} runs), at most {dearest.clock_share:.2%} ({title(dearest)}: {dearest.variant})"
    )


def _control_line(controlled: Sequence[Row]) -> str:
    slowed = max(controlled, key=lambda row: row.clock)
    dearest = max(controlled, key=lambda row: row.clock_in_a_run)
    typical = statistics.median(row.clock_in_a_run for row in controlled)
    cheap = sum(row.clock_in_a_run <= CLOCK for row in controlled)
    return (
        f"clock on by clock off: {statistics.median(row.clock for row in controlled) - 1:+.2%} (median of "
        f"{len(controlled)} cells), at most {slowed.clock - 1:+.2%} ({title(slowed)}), where every update is timed; a "
        f"run times one of some, which costs {typical:+.2%}, at most {dearest.clock_in_a_run:+.2%} ({title(dearest)}), "
        f"in {cheap} of {len(controlled)} no more than {CLOCK:.0%}"
    )
