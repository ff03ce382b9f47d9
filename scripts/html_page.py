"""The frame of a self-contained HTML report: style, sections, tables, phase colours; no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from trainer.timing import PHASES, UPDATE_PARTS

#: A (light, dark) pair keeps 4.5 : 1 of contrast with the text that lies on or beside it.
Colors = dict[str, tuple[str, str]]

PHASE_COLORS: Colors = {
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


def document(title: str, body: Iterable[str], colors: Colors, css: str = "") -> str:
    """The whole page as text; phases have a class each, and so has every name in ``colors``."""
    phases = {f"phase-{name}": PHASE_COLORS[name] for name in (*PHASES, *UPDATE_PARTS)}
    content = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{_color_rules(colors | phases)}{css}</style>\n</head>\n"
        f"<body><main>\n{content}\n</main></body>\n</html>\n"
    )


def _color_rules(colors: Colors) -> str:
    """A class for every name, in light and in dark."""
    light = "\n".join(f".{name} {{ --color: {pair[0]}; }}" for name, pair in colors.items())
    dark = "\n".join(f".{name} {{ --color: {pair[1]}; }}" for name, pair in colors.items())
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def header(title: str, text: str) -> str:
    """The page's title and a line below it."""
    return f"<header><h1>{escape(title)}</h1><p>{escape(text)}</p></header>"


def section(anchor: str, title: str, content: str) -> str:
    """A card with a heading."""
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>\n{content}\n</section>'


def note(text: str) -> str:
    """A paragraph in small print."""
    return f'<p class="note">{escape(text)}</p>'


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of texts: the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["", *columns])
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def phase_key(phases: Iterable[str]) -> str:
    """Which colour is which phase."""
    items = "".join(f'<li class="phase-{name}"><i></i>{name}</li>' for name in phases)
    return f'<ul class="key">{items}</ul>'
