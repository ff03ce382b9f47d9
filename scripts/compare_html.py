"""A comparison of runs as one self-contained HTML page: inline SVG and style, no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from scripts.compare_data import Comparison, Cost, Run, returns, throughput
from scripts.compare_tables import (
    Table,
    credit_table,
    number,
    phase_table,
    result_table,
    settings_table,
    throughput_table,
    updates,
)
from scripts.html_page import Colors, document, header, note, phase_key, section, table
from scripts.svg_charts import Bar, Line, Segment, bar_chart, line_chart
from trainer.console import count, duration
from trainer.timing import PHASES, UPDATE_PARTS

# (light, dark) pairs that keep 4.5 : 1 of contrast with the text that lies on or beside them
RUN_COLORS = (
    ("#0b63b0", "#62b0ff"),
    ("#c2410c", "#ff9a5c"),
    ("#0f7a5a", "#46cfa3"),
    ("#9333a8", "#df93f0"),
    ("#8a6400", "#e0bd4a"),
    ("#4b5563", "#b4bcc8"),
)
DASHES = ("none", "7 4", "2 3", "10 3 2 3")  #: runs differ without colour, too


def page(comparison: Comparison) -> str:
    """The whole page as text."""
    envs = ", ".join(dict.fromkeys(run.summary["env_id"] for run in comparison.runs))
    is_alone = len(comparison.runs) == 1
    title = f"A run on {envs}" if is_alone else f"{len(comparison.runs)} runs on {envs}"
    differences = [
        section("amdahl", "What the credit backend is worth", _credit(comparison)),
        section("settings", "Settings that differ", _settings(comparison)),
    ]
    body = [
        header(title, f"Costs are over {updates(comparison)}."),
        _run_cards(comparison),
        section("returns", "Returns", _returns(comparison.runs)),
        section("phases", "Where the time of an update goes", _phases(comparison)),
        section("throughput", "Throughput", _throughput(comparison)),
        *([] if is_alone else differences),
        section("result", "Result", _table(result_table(comparison))),
    ]
    runs = range(len(comparison.runs))
    colors: Colors = {f"run-{i}": RUN_COLORS[i % len(RUN_COLORS)] for i in runs}
    dashes = "\n".join(f".run-{i} {{ --dash: {DASHES[i % len(DASHES)]}; }}" for i in runs)
    return document(title, body, colors, dashes)


def _stroke(index: int) -> str:
    return (
        f'<svg class="run-{index}" viewBox="0 0 34 10" aria-hidden="true">'
        '<line class="line" x1="1" x2="33" y1="5" y2="5"/></svg>'
    )


def _run_cards(comparison: Comparison) -> str:
    cards = [
        _run_card(index, run, cost)
        for index, (run, cost) in enumerate(zip(comparison.runs, comparison.costs, strict=True))
    ]
    return f'<div class="runs">{"".join(cards)}</div>'


def _run_card(index: int, run: Run, cost: Cost) -> str:
    facts = {
        "return at the end": number(run.last.get("episode_return")),
        "env steps per second": count(cost.steps_per_second),
        "ms per update (mean)": number(cost.mean_ms["total"], 1),
        "of it credit": f"{cost.share('credit'):.2%}",
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    under = (
        f"credit on {run.credit}, {run.status}, {count(run.last['env_steps'])} steps in {duration(run.last['seconds'])}"
    )
    return f'<div class="run run-{index}"><h2>{_stroke(index)}{escape(run.name)}</h2>{note(under)}<dl>{rows}</dl></div>'


def _run_key(runs: list[Run]) -> str:
    items = "".join(f"<li>{_stroke(index)}{escape(run.name)}</li>" for index, run in enumerate(runs))
    return f'<ul class="key">{items}</ul>'


def _lines(runs: list[Run], points: list[list[tuple[float, float]]]) -> list[Line]:
    return [Line(run.name, f"run-{index}", points[index]) for index, run in enumerate(runs)]


def _returns(runs: list[Run]) -> str:
    charts = [
        line_chart(_lines(runs, [returns(run, x) for run in runs]), label, "mean return of the last episodes")
        for x, label in (("env_steps", "env steps"), ("seconds", "seconds"))
    ]
    about = note("Mean return of the last episodes (logging.episode_window), against env steps and against wall time.")
    return f'{about}{_run_key(runs)}<div class="pair">{"".join(charts)}</div>'


def _throughput(comparison: Comparison) -> str:
    runs = comparison.runs
    lines = _lines(runs, [throughput(run) for run in runs])
    chart = line_chart(lines, "env steps", "steps per second", from_zero=True)
    return f'{_run_key(runs)}<div class="pair">{chart}<div>{_table(throughput_table(comparison))}</div></div>'


def _phases(comparison: Comparison) -> str:
    parts = [part for part in UPDATE_PARTS if any(part in cost.mean_ms for cost in comparison.costs)]
    inside = f"<h3>Parts of update, on the same scale</h3>{_bars(comparison, parts, 'update')}" if parts else ""
    return (
        f"{note('Length: mean milliseconds per update. Percentages: share of the wall time.')}"
        f"{_bars(comparison, PHASES, 'total')}{inside}{_table(phase_table(comparison))}"
    )


def _bars(comparison: Comparison, phases: Sequence[str], whole: str) -> str:
    """A bar per run with its key; all such charts of the page have one scale."""
    bars = []
    for run, cost in zip(comparison.runs, comparison.costs, strict=True):
        segments = [_segment(cost, name) for name in phases if name in cost.mean_ms]
        bars.append(Bar(run.name, segments, f"{cost.mean_ms[whole]:.1f} ms" if segments else "not timed"))
    longest = max(cost.mean_ms["total"] for cost in comparison.costs)
    chart = bar_chart(bars, f"milliseconds per update: {', '.join(phases)}", longest)
    return f'{phase_key(phases)}<div class="bars">{chart}</div>'


def _segment(cost: Cost, name: str) -> Segment:
    share = f"{cost.share(name):.1%}"
    return Segment(f"phase-{name}", cost.mean_ms[name], share, f"{name}: {share}, {cost.mean_ms[name]:.2f} ms")


def _credit(comparison: Comparison) -> str:
    if not comparison.pairs:
        return note("All runs used the same credit backend.")
    return _table(credit_table(comparison))


def _settings(comparison: Comparison) -> str:
    found = settings_table(comparison)
    return _table(found) if found.rows else note("None: config.yaml is the same but for where the run is kept.")


def _table(content: Table) -> str:
    return f"{note(content.note)}{table(content.columns, content.rows)}"
