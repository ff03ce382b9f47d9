"""The report of `scripts/amdahl.py` as one self-contained HTML page: inline SVG and style, no script, no network.

The same chart and table for a page in Markdown are `picture` and `markdown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from scripts.amdahl_stats import Row
from scripts.amdahl_tables import (
    CHECKS,
    FACTS,
    NEAR,
    cells_of,
    check_rows,
    closing_lines,
    figure_rows,
    missed,
    ratio_text,
    table_markdown,
    title,
)
from scripts.html_page import Colors, document, header, note, phase_key, section, table
from scripts.svg_charts import Bar, Dot, DotRow, Mark, Segment, bar_chart, diagonal_chart, dot_chart, standalone
from trainer.timing import PHASES

#: (light, dark) of the marks, by how sure the difference is.
MARKS: Colors = {"mark-noise": ("#8a94a3", "#8a94a3"), "mark-sure": ("#c62f4b", "#ff8099")}
#: (light, dark) of the baselines, in their order.
BASELINES = (
    ("#c2410c", "#ff9a5c"),
    ("#8a6400", "#e0bd4a"),
    ("#0b63b0", "#62b0ff"),
    ("#9333a8", "#df93f0"),
    ("#0f7a5a", "#46cfa3"),
)
#: Pairs up to this ratio are drawn a second time on a scale of their own.
SMALL = 1.1
#: The dot chart's axis ends here; larger ratios are written.
HIGHEST = 1.3
#: Of an update, what a phase must differ by to be named.
VISIBLE = 0.005
#: What the table of checks means.
CLOCK_NOTE = (
    "Phases by wall time: their sum by the host's clock, in the run of the cell in which it is least. Clock on by off: "
    "the candidate by the same run whose clock is switched off, where every update is timed. A run of its own times "
    "one of several; those between cost what they do without clock."
)

CSS = """
.diagonal { stroke: var(--soft); stroke-dasharray: 5 4; } .whisker { stroke: var(--color); stroke-width: 1.5; }
.mark { fill: var(--color); } .map td { text-align: center; padding: 6px 10px; min-width: 7em; }
.map td.worth { background: color-mix(in srgb, #1b7f6b var(--worth), transparent); }
.map td.cost { background: color-mix(in srgb, #c2410c var(--worth), transparent); }
.map td.noise { color: var(--soft); }
"""
#: Of the picture that stands alone: what the page's style says of the same classes.
PICTURE_CSS = """
.grid { stroke: #dfe3e8; } .axis { stroke: #5a6472; } .tick, .label, .value { fill: #5a6472; } .name { fill: #1b2028; }
.whisker { stroke: var(--color); stroke-width: 1.5; } .mark { fill: var(--color); }
"""


def page(rows: Sequence[Row], origin: dict[str, str]) -> str:
    """The whole page as text.

    Args:
        rows: one per run of each cell.
        origin: where they come from (`scripts.provenance`), shown as it is.
    """
    pairs = [row for row in rows if row.is_pair]
    about = f"{len(pairs)} pairs of runs in {len(cells_of(rows))} cells on {origin.get('gpu') or origin.get('cpu')}"
    name = "What a faster part is worth"
    body = [
        header(name, about),
        section("summary", "In short", "".join(note(line) for line in closing_lines(rows))),
        section("prediction", "Predicted against measured", _prediction(rows)),
        section("worth", "What it is worth", _worth(pairs)),
        section("map", "Where it matters", _map(rows)),
        section("phases", "Where the time of an update goes", _phases(rows)),
        section("figures", "Figures", _figures(rows)),
        section("clock", "What the clock says of itself", _clock(rows)),
        section("origin", "Where the figures come from", table(["value"], [(k, [v]) for k, v in origin.items()])),
    ]
    return document(name, body, MARKS | _baseline_colors(pairs), CSS)


def picture(rows: Sequence[Row], origin: dict[str, str]) -> str:
    """What the credit backend is worth in each cell, as an SVG file of its own."""
    pairs = [row for row in rows if row.is_pair and row.compare == "credit"]
    colors = _baseline_colors(pairs)
    css = "".join(f".{name} {{ --color: {pair[0]}; }}" for name, pair in colors.items()) + PICTURE_CSS
    key = [(name, f"against {baseline}") for name, baseline in zip(colors, _baselines(pairs), strict=True)]
    return standalone(_worth_chart(pairs), css, key, f"95 % intervals. {_from(origin)}")


def markdown(rows: Sequence[Row], origin: dict[str, str]) -> str:
    """The summary and the table of figures as a page in Markdown."""
    about = (
        f"`{origin.get('command')}`, {_from(origin)}. How the figures came about and how to read them: "
        "[What a faster part is worth](../amdahl.md). The whole report is `amdahl.html`."
    )
    lines = "\n".join(f"- {line}" for line in closing_lines(rows))
    parts = (
        "# What a faster part is worth: figures",
        about,
        "![times faster](amdahl.svg)",
        lines,
        table_markdown([name for name, _ in FACTS], figure_rows(rows)),
        CLOCK_NOTE,
        table_markdown([name for name, _ in CHECKS], check_rows(rows)),
    )
    return "\n\n".join(parts) + "\n"


def _from(origin: dict[str, str]) -> str:
    where = origin.get("gpu") or origin.get("cpu")
    return f"{where}, {origin.get('cores')} cores, commit {origin.get('commit')}, {origin.get('date')}"


def _baselines(pairs: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.variant for row in pairs))


def _baseline_colors(pairs: Sequence[Row]) -> Colors:
    """A class for each baseline; those of other comparisons share its place."""
    return {f"base-{number}": BASELINES[number % len(BASELINES)] for number in range(len(_baselines(pairs)))}


def _prediction(rows: Sequence[Row]) -> str:
    pairs = [row for row in rows if row.is_pair]
    about = note(
        "Each point is a pair of runs that took turns; across: 1 / ((1 - p) + p / s), from the share p in the slower "
        "setting and the speed-up s of the part alone; up: time per update, baseline by candidate, with its 95 % "
        "bootstrap interval. On the dashed line the prediction is right. Grey: the interval holds 1."
    )
    if not pairs:
        return about
    small = [row for row in pairs if max(row.predicted, row.measured) <= SMALL]
    scales = [(pairs, ""), (small, f", up to {SMALL}x")] if 0 < len(small) < len(pairs) else [(pairs, "")]
    charts = "".join(_chart(some, what) for some, what in scales)
    candidates = {row.labels: row for row in rows if row.variant == row.candidate}
    off = "".join(
        note(
            f"Off by more than {NEAR:.0%}: {title(row)}, {row.variant}: {row.error:+.1%}. "
            f"{_explained(row, candidates[row.labels])}"
        )
        for row in missed(pairs)
    )
    return f'{about}<div class="pair">{charts}</div>{off}'


def _explained(row: Row, candidate: Row) -> str:
    if row.low <= row.predicted <= row.high:
        return "The prediction is inside the interval: the rounds are too noisy to tell."
    longer = {phase: row.phases_ms[phase] - candidate.phases_ms[phase] for phase in PHASES}
    longer = {phase: ms for phase, ms in longer.items() if abs(ms) > VISIBLE * row.total_ms}
    return (
        f"Phases outside the part stand at {ratio_text(row.rest)}. By how many ms each is longer than in "
        f"{row.candidate}: {', '.join(f'{phase} {ms:+.2f}' for phase, ms in longer.items())}."
    )


def _chart(pairs: Sequence[Row], what: str) -> str:
    marks = [
        Mark(
            "mark-noise" if row.is_noise else "mark-sure",
            row.predicted,
            row.measured,
            row.low,
            row.high,
            _told(row),
        )
        for row in pairs
    ]
    return diagonal_chart(marks, f"predicted{what}", "measured")


def _worth(pairs: Sequence[Row]) -> str:
    about = note(
        "How many times faster an update is with the candidate (triton, triton loss, graphs) than with each baseline, "
        "with 95 % intervals; an interval that crosses the line at 1 is within noise."
    )
    if not pairs:
        return about
    items = "".join(
        f'<li class="base-{number}"><i></i>against {escape(name)}</li>' for number, name in enumerate(_baselines(pairs))
    )
    return f'{about}<ul class="key">{items}</ul><div class="bars">{_worth_chart(pairs)}</div>'


def _worth_chart(pairs: Sequence[Row]) -> str:
    classes = {name: f"base-{number}" for number, name in enumerate(_baselines(pairs))}
    rows = [
        DotRow(name, [Dot(classes[row.variant], row.measured, row.low, row.high, _told(row)) for row in found])
        for name, found in cells_of(pairs).items()
    ]
    return dot_chart(rows, "times faster", reference=1.0, highest=HIGHEST)


def _told(row: Row) -> str:
    ratios = f"predicted {ratio_text(row.predicted)}, measured {ratio_text(row.measured)}"
    return f"{title(row)}: against {row.variant}, {ratios}"


def _map(rows: Sequence[Row]) -> str:
    about = note(
        "How many times faster an update is with the candidate (the last variant) than with the baseline of the column."
        " Green: faster; orange: slower; grey: within noise, which includes every cell where the answer is nothing."
    )
    pairs = {(title(row), row.variant): row for row in rows if row.is_pair}
    columns = list(dict.fromkeys(variant for _, variant in pairs))
    head = "".join(f'<th scope="col">{escape(f"against {name}")}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_tile(pairs.get((name, column))) for column in columns)}</tr>'
        for name in dict.fromkeys(name for name, _ in pairs)
    )
    grid = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{about}<div class="scroll map">{grid}</div>'


def _tile(row: Row | None) -> str:
    if row is None:
        return "<td></td>"
    kind = "noise" if row.is_noise else "worth" if row.measured > 1.0 else "cost"
    strength = min(abs(row.measured - 1.0) * 200.0, 70.0)
    words = f"{ratio_text(row.measured)} within noise" if row.is_noise else ratio_text(row.measured)
    return f'<td class="{kind}" style="--worth: {strength:.0f}%">{escape(words)}</td>'


def _phases(rows: Sequence[Row]) -> str:
    about = note("Median milliseconds per update; each cell has a scale of its own. Percentages: share of the update.")
    charts = "".join(
        f'<h3>{escape(name)}</h3><div class="bars">{_bars(name, runs)}</div>' for name, runs in cells_of(rows).items()
    )
    return f"{about}{phase_key(PHASES)}{charts}"


def _bars(name: str, runs: Sequence[Row]) -> str:
    bars = [Bar(row.variant, [_segment(row, phase) for phase in PHASES], f"{row.total_ms:.2f} ms") for row in runs]
    return bar_chart(bars, f"milliseconds per update: {name}", max(sum(row.phases_ms.values()) for row in runs))


def _segment(row: Row, phase: str) -> Segment:
    share = f"{row.phases_ms[phase] / row.total_ms:.1%}"
    return Segment(f"phase-{phase}", row.phases_ms[phase], share, f"{phase}: {share}, {row.phases_ms[phase]:.3f} ms")


def _figures(rows: Sequence[Row]) -> str:
    about = note(
        "p: share of the parts that differ, in the baseline. s: their speed-up, timed alone on the same tensors. rest: "
        "time outside of them, baseline by candidate; where it is not 1, something else differed. ms: of the baseline."
    )
    return f"{about}{table([name for name, _ in FACTS], figure_rows(rows))}"


def _clock(rows: Sequence[Row]) -> str:
    return f"{note(CLOCK_NOTE)}{table([name for name, _ in CHECKS], check_rows(rows))}"
