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
PHASE_COLORS = {
    "env_step": ("#1b7f6b", "#58c7ae"),
    "transfer": ("#8a6400", "#e0bd4a"),
    "inference": ("#1f74ad", "#6cb8ee"),
    "credit": ("#c62f4b", "#ff8099"),
    "update": ("#46529e", "#a0abf2"),
    "normalize": ("#7a4f2a", "#d3a077"),
    "log": ("#8a4fa8", "#cf9ae8"),
    "other": ("#5f6875", "#aab3bf"),
    "forward": ("#5a66b3", "#b4bdf7"),
    "backward": ("#46529e", "#a0abf2"),
    "optimizer": ("#333d80", "#8792e0"),
}

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2028; --soft: #5a6472; --rule: #dfe3e8;
  --on-phase: #fff; --shadow: 0 1px 2px rgb(20 30 50 / 7%), 0 4px 16px rgb(20 30 50 / 5%); }
@media screen and (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1b1f26; --ink: #e8ebf0;
  --soft: #9fa9b6; --rule: #323944; --on-phase: #12151a; --shadow: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-print-color-adjust: exact;
  print-color-adjust: exact; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 40px 20px 56px; }
h1 { font-size: 27px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 6px; }
h2 { font-size: 17px; margin: 0 0 4px; }
header p, .note { color: var(--soft); margin: 0; }
.note { font-size: 13px; max-width: 92ch; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; box-shadow: var(--shadow);
  padding: 22px 24px; margin-top: 20px; }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 16px; margin-top: 24px; }
.run { background: var(--card); border: 1px solid var(--rule); border-top: 4px solid var(--color); border-radius: 12px;
  box-shadow: var(--shadow); padding: 14px 18px 16px; min-width: 0; }
.run h2 { display: flex; align-items: center; gap: 10px; overflow-wrap: anywhere; }
.run h2 svg, .key svg { width: 34px; height: 10px; flex: none; }
.run dl { display: grid; grid-template-columns: 1fr 1fr; gap: 10px 16px; margin: 12px 0 0; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.key { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; margin: 10px 0 14px; padding: 0;
  font-size: 13px; }
.key li { display: inline-flex; align-items: center; gap: 7px; overflow-wrap: anywhere; }
.key i { width: 12px; height: 12px; border-radius: 3px; background: var(--color); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 12px 24px; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 12px;
  font-variant-numeric: tabular-nums; }
.scroll, .bars { overflow-x: auto; margin-top: 12px; }
.bars { margin: 0 0 20px; } .bars svg { min-width: 640px; }
h3 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 20px 0 8px; }
table { border-collapse: collapse; min-width: min(100%, 600px); font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 0 6px 24px; text-align: right; border-bottom: 1px solid var(--rule);
  overflow-wrap: break-word; vertical-align: baseline; }
th:first-child { text-align: left; padding-left: 0; font-weight: 400; color: var(--soft); white-space: nowrap; }
thead th { font-weight: 600; color: var(--ink); border-bottom-color: var(--soft); }
tbody tr:last-child > * { border-bottom: 0; }
.line { fill: none; stroke: var(--color); stroke-width: 2; stroke-linejoin: round; stroke-dasharray: var(--dash); }
.end, .segment { fill: var(--color); }
.segment { stroke: var(--card); stroke-width: 1; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.tick, .label, .value { fill: var(--soft); } .name { fill: var(--ink); }
.label { font-size: 12.5px; } .name, .value, .inside { font-size: 13px; } .name { font-weight: 600; }
.inside { fill: var(--on-phase); font-weight: 600; pointer-events: none; }
@media print { @page { margin: 12mm; } :root { --page: #fff; } body { font-size: 11px; }
  main { max-width: none; padding: 0; } section, .run { box-shadow: none; padding: 12px 14px; margin-top: 12px; }
  section { border-radius: 6px; } .pair { grid-template-columns: 1fr 1fr; } .run, svg, tr,
  section:not(#phases) { break-inside: avoid; } h2, h3, .note, .key { break-after: avoid; } .key { font-size: 11px; }
  .scroll, .bars { overflow: visible; } .bars svg { min-width: 0; }
  table { font-size: 10px; min-width: 0; width: 100%; } th, td { padding: 3px 0 3px 10px; } .note { font-size: 10px; }
  th:first-child { white-space: normal; } .runs { gap: 10px; margin-top: 12px; } dd { font-size: 15px; } }
"""


def page(comparison: Comparison) -> str:
    """The whole page as text."""
    envs = ", ".join(dict.fromkeys(run.summary["env_id"] for run in comparison.runs))
    title = escape(f"{len(comparison.runs)} runs on {envs}")
    body = "\n".join(
        [
            f"<header><h1>{title}</h1><p>Costs are over {escape(updates(comparison))}.</p></header>",
            _run_cards(comparison),
            _section("returns", "Returns", _returns(comparison.runs)),
            _section("phases", "Where the time of an update goes", _phases(comparison)),
            _section("throughput", "Throughput", _throughput(comparison)),
            _section("amdahl", "What the credit backend is worth", _credit(comparison)),
            _section("settings", "Settings that differ", _settings(comparison)),
            _section("result", "Result", _table(result_table(comparison))),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}{_colors(len(comparison.runs))}</style>\n</head>\n"
        f"<body><main>\n{body}\n</main></body>\n</html>\n"
    )


def _colors(runs: int) -> str:
    """A class for every run and phase, in light and in dark."""
    pairs = {f"run-{i}": RUN_COLORS[i % len(RUN_COLORS)] for i in range(runs)}
    pairs |= {f"phase-{name}": PHASE_COLORS[name] for name in (*PHASES, *UPDATE_PARTS)}
    light = "\n".join(f".{name} {{ --color: {pair[0]}; }}" for name, pair in pairs.items())
    dark = "\n".join(f".{name} {{ --color: {pair[1]}; }}" for name, pair in pairs.items())
    dashes = "\n".join(f".run-{i} {{ --dash: {DASHES[i % len(DASHES)]}; }}" for i in range(runs))
    return f"{light}\n{dashes}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _section(anchor: str, title: str, content: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>\n{content}\n</section>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


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
    return (
        f'<div class="run run-{index}"><h2>{_stroke(index)}{escape(run.name)}</h2>{_note(under)}<dl>{rows}</dl></div>'
    )


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
    note = _note("Mean return of the last episodes (logging.episode_window), against env steps and against wall time.")
    return f'{note}{_run_key(runs)}<div class="pair">{"".join(charts)}</div>'


def _throughput(comparison: Comparison) -> str:
    runs = comparison.runs
    lines = _lines(runs, [throughput(run) for run in runs])
    chart = line_chart(lines, "env steps", "steps per second", from_zero=True)
    return f'{_run_key(runs)}<div class="pair">{chart}<div>{_table(throughput_table(comparison))}</div></div>'


def _phases(comparison: Comparison) -> str:
    parts = [part for part in UPDATE_PARTS if any(part in cost.mean_ms for cost in comparison.costs)]
    inside = f"<h3>Parts of update, on the same scale</h3>{_bars(comparison, parts, 'update')}" if parts else ""
    return (
        f"{_note('Length: mean milliseconds per update. Percentages: share of the wall time.')}"
        f"{_bars(comparison, PHASES, 'total')}{inside}{_table(phase_table(comparison))}"
    )


def _bars(comparison: Comparison, phases: Sequence[str], whole: str) -> str:
    """A bar per run with its key; all such charts of the page have one scale."""
    key = "".join(f'<li class="phase-{name}"><i></i>{name}</li>' for name in phases)
    bars = []
    for run, cost in zip(comparison.runs, comparison.costs, strict=True):
        segments = [_segment(cost, name) for name in phases if name in cost.mean_ms]
        bars.append(Bar(run.name, segments, f"{cost.mean_ms[whole]:.1f} ms" if segments else "not timed"))
    longest = max(cost.mean_ms["total"] for cost in comparison.costs)
    chart = bar_chart(bars, f"milliseconds per update: {', '.join(phases)}", longest)
    return f'<ul class="key">{key}</ul><div class="bars">{chart}</div>'


def _segment(cost: Cost, name: str) -> Segment:
    share = f"{cost.share(name):.1%}"
    return Segment(f"phase-{name}", cost.mean_ms[name], share, f"{name}: {share}, {cost.mean_ms[name]:.2f} ms")


def _credit(comparison: Comparison) -> str:
    if not comparison.pairs:
        return _note("All runs used the same credit backend.")
    return _table(credit_table(comparison))


def _settings(comparison: Comparison) -> str:
    table = settings_table(comparison)
    return _table(table) if table.rows else _note("None: config.yaml is the same but for where the run is kept.")


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["", *table.columns])
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in table.rows
    )
    grid = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{_note(table.note)}<div class="scroll">{grid}</div>'
