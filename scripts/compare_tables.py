"""A comparison of runs as tables of text, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.compare_data import Comparison, Cost, CreditPair, Run, at_steps
from trainer.console import count, duration
from trainer.timing import PHASES, UPDATE_PARTS


class Table(NamedTuple):
    """Names down the side, runs (or pairs of runs) along the top."""

    title: str
    note: str  #: how the figures came about
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def number(value: float | None, digits: int = 2) -> str:
    """``-`` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def updates(comparison: Comparison) -> str:
    """Which updates the costs are over."""
    used = comparison.last_update - comparison.warmup
    left_out = f"the first {comparison.warmup} left out as warm-up" if comparison.warmup else "none left out"
    return f"{used} updates of each run (updates {comparison.warmup + 1} to {comparison.last_update}, {left_out})"


def result_table(comparison: Comparison) -> Table:
    """How each run ended, and several of them at the same number of env steps."""
    steps = comparison.common_steps
    note = "Return: mean of the last episodes."
    facts: list[tuple[str, Callable[[Run], str]]] = [
        ("env", lambda run: run.summary["env_id"]),
        ("credit", lambda run: run.credit),
        ("status", lambda run: run.status),
        ("updates", lambda run: str(run.last["update"])),
        ("env steps", lambda run: f"{run.last['env_steps']:,}"),
        ("time", lambda run: f"{duration(run.last['seconds'])} ({run.last['seconds']:.1f} s)"),
        ("steps/s, whole run", lambda run: count(run.last["env_steps"] / run.last["seconds"])),
        ("return", lambda run: number(run.last.get("episode_return"))),
        ("machine", lambda run: run.summary["machine"]),
        ("torch", lambda run: run.summary["torch"]),
    ]
    if len(comparison.runs) > 1:
        note += f" {steps:,} env steps is where the shortest run ended; figures there are interpolated between updates."
        facts += [
            (f"return at {steps:,} steps", lambda run: number(at_steps(run, "episode_return", steps))),
            (f"seconds to {steps:,} steps", lambda run: number(at_steps(run, "seconds", steps))),
        ]
    return Table(
        "Result",
        note,
        [run.name for run in comparison.runs],
        [(name, [fact(run) for run in comparison.runs]) for name, fact in facts],
    )


def _share_and_ms(cost: Cost, phase: str) -> str:
    aligned = f"{cost.share(phase):6.1%}{cost.median_ms[phase]:10.2f}".replace(" ", "\N{FIGURE SPACE}")
    return f"{aligned}\N{NO-BREAK SPACE}ms"  # figure spaces are as wide as digits in any font


def phase_table(comparison: Comparison) -> Table:
    """Share and median milliseconds of each phase, then of the parts of ``update``."""
    costs = comparison.costs

    def row(label: str, phase: str) -> tuple[str, list[str]]:
        return label, [_share_and_ms(cost, phase) if phase in cost.mean_ms else "not timed" for cost in costs]

    return Table(
        "Phases",
        f"Over {updates(comparison)}. Share: sum of the phase by the sum of all time. ms: median per update; medians "
        "do not add up to the median of the total. Forward, backward and optimizer are parts of update.",
        [run.name for run in comparison.runs],
        [
            *(row(phase, phase) for phase in PHASES),
            row("total", "total"),
            *(row(f"update: {part}", part) for part in UPDATE_PARTS),
            ("total, mean", [f"{cost.mean_ms['total']:.2f} ms" for cost in costs]),
        ],
    )


def throughput_table(comparison: Comparison) -> Table:
    """Env steps per second over the compared updates and over everything; several runs' ratios to the first."""
    rates = [cost.steps_per_second for cost in comparison.costs]
    whole = [run.last["env_steps"] / run.last["seconds"] for run in comparison.runs]
    ratios = (f"relative to {comparison.runs[0].name}", [f"{rate / rates[0]:.3f}x" for rate in rates])
    return Table(
        "Throughput",
        f"Valid env steps per second of wall time, everything included, over {updates(comparison)}.",
        [run.name for run in comparison.runs],
        [
            ("steps/s", [count(rate) for rate in rates]),
            *([ratios] if len(rates) > 1 else []),
            ("steps/s, whole run", [count(rate) for rate in whole]),
        ],
    )


def credit_table(comparison: Comparison) -> Table:
    """Amdahl's prediction beside the measured ratio, a column for each two runs of different credit backends."""
    facts: list[tuple[str, Callable[[CreditPair], str]]] = [
        ("slower credit", lambda pair: pair.slow.credit),
        ("faster credit", lambda pair: pair.fast.credit),
        ("p, share of credit", lambda pair: f"{pair.share:.2%}"),
        ("s, speed-up of credit", lambda pair: f"{pair.speedup:.2f}x"),
        ("predicted 1/((1-p)+p/s)", lambda pair: f"{pair.predicted:.4f}x"),
        ("measured, time per update", lambda pair: f"{pair.measured:.4f}x"),
        ("measured, medians", lambda pair: f"{pair.measured_median:.4f}x"),
        ("the phases outside credit", lambda pair: f"{pair.rest:.4f}x"),
        ("what else differs", lambda pair: ", ".join(pair.also_differ) or "none"),
    ]
    return Table(
        "Amdahl",
        f"Ratios of time per update, slower credit by faster, over {updates(comparison)}. Were credit the only thing "
        "that differed, the phases outside it would stand at 1 and measured at predicted; how far they are from 1 is "
        "the machine's noise or another setting, not the backend's doing.",
        [f"{pair.slow.name} / {pair.fast.name}" for pair in comparison.pairs],
        [(name, [fact(pair) for pair in comparison.pairs]) for name, fact in facts],
    )


def settings_table(comparison: Comparison) -> Table:
    """The keys that are not the same in all runs."""

    def text(value: Any) -> str:
        return "null" if value is None else str(value)

    return Table(
        "Settings that differ",
        "All other keys of config.yaml are the same; out and resume, where a run is kept, are left out.",
        [run.name for run in comparison.runs],
        [(key, [text(value) for value in values]) for key, values in comparison.differences.items()],
    )


def tables(comparison: Comparison) -> list[Table]:
    """All tables that have something to show, in the terminal's order."""
    found = [settings_table, phase_table, throughput_table, credit_table, result_table]
    return [table for table in (make(comparison) for make in found) if table.rows and table.columns]
