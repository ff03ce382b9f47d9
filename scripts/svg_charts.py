"""Line, scatter and bar charts as SVG text for a page's own style sheet: no library, no script, no network.

Colours come from the page: a line or segment carries a CSS class, the drawing uses the classes ``line``, ``end``,
``segment``, ``mark``, ``whisker``, ``diagonal``, ``grid``, ``axis``, ``tick``, ``label``, ``name``, ``inside`` and
``value``. Lengths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 44
BAR_WIDTH, BAR_HEIGHT, BAR_PITCH, BAR_LEFT, BAR_RIGHT = 1060, 34, 48, 170, 100
INSIDE_WIDTH = 46  #: a segment this wide has room for its text
NAME_LETTERS = 22
DOT_LEFT, DOT_RIGHT, DOT_PITCH, DOT_BOTTOM = 500, 110, 30, 40


class Line(NamedTuple):
    """One curve."""

    name: str
    css_class: str
    points: Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """One point of a scatter chart, with an interval along y."""

    css_class: str
    x: float
    y: float
    low: float
    high: float
    hint: str  #: shown under the pointer


class Dot(NamedTuple):
    """One value of a dot chart's row, with its interval."""

    css_class: str
    value: float
    low: float
    high: float
    hint: str  #: shown under the pointer


class DotRow(NamedTuple):
    """One line of a dot chart."""

    name: str
    dots: Sequence[Dot]


class Segment(NamedTuple):
    """One part of a bar."""

    css_class: str
    value: float
    text: str  #: written inside where there is room
    hint: str  #: shown under the pointer


class Bar(NamedTuple):
    """One stacked bar."""

    name: str
    segments: Sequence[Segment]
    text: str  #: written after the bar


class Scale(NamedTuple):
    """Maps values from ``low`` to ``high`` onto pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """A value's pixel."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def tick_step(low: float, high: float, most: int = 6) -> float:
    """A step of 1, 2 or 5 times a power of ten that fits at most ``most`` times."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def ticks(low: float, high: float) -> list[float]:
    """Round values from the last at or below ``low`` to the first at or above ``high``; equal ends are widened."""
    if math.isclose(low, high, rel_tol=1e-9):
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    step = tick_step(low, high)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Values with one unit and as many decimals as tell them apart."""
    largest = max(abs(value) for value in values)
    scale, unit = next(pair for pair in ((1e9, " G"), (1e6, " M"), (1e3, " k"), (0.0, "")) if largest >= pair[0])
    scale = scale or 1.0
    decimals = max(0, -math.floor(math.log10((values[1] - values[0]) / scale) + 1e-9))
    return [f"{value / scale:.{decimals}f}{unit}" if value else "0" for value in values]


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, from_zero: bool = False) -> str:
    """Curves over one pair of axes; x begins at 0, and so does y with ``from_zero``. Empty curves are left out."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return f'<p class="note">There is nothing to draw: no run has a value for {escape(y_label)}.</p>'
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points] + ([0.0] if from_zero else [])
    x_ticks, y_ticks = ticks(0.0, max(xs)), ticks(min(ys), max(ys))
    x_scale = Scale(0.0, max(xs) or 1.0, LEFT, WIDTH - RIGHT)
    y_scale = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    body = [
        *_y_axis(y_scale, y_ticks),
        *_x_axis(x_scale, x_ticks),
        *_labels(x_label, y_label),
        *(_curve(line, x_scale, y_scale) for line in drawn),
    ]
    return _svg(WIDTH, HEIGHT, f"{y_label} against {x_label}", body)


def _y_axis(scale: Scale, values: Sequence[float]) -> list[str]:
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(value):.1f}" y2="{scale(value):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{scale(value) + 4:.1f}" text-anchor="end">{label}</text>'
        for value, label in zip(values, tick_labels(values), strict=True)
    ]


def _x_axis(scale: Scale, values: Sequence[float]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    return [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'] + [
        f'<line class="axis" x1="{scale(value):.1f}" x2="{scale(value):.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        f'<text class="tick" x="{scale(value):.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
        for value, label in zip(values, tick_labels(values), strict=True)
        if value <= scale.high
    ]


def _curve(line: Line, x_scale: Scale, y_scale: Scale) -> str:
    path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in line.points)
    end_x, end_y = path.rsplit(" ", 1)[-1].split(",")
    return (
        f'<g class="{line.css_class}"><title>{escape(line.name)}</title>'
        f'<polyline class="line" points="{path}"/><circle class="end" cx="{end_x}" cy="{end_y}" r="3.5"/></g>'
    )


def diagonal_chart(marks: Sequence[Mark], x_label: str, y_label: str) -> str:
    """Points over two axes of one scale, with the diagonal where x equals y; intervals end at the frame."""
    spread = [value for mark in marks for value in (mark.x, mark.y)]
    values = ticks(min(spread), max(spread))
    x_scale = Scale(values[0], values[-1], LEFT, WIDTH - RIGHT)
    y_scale = Scale(values[0], values[-1], HEIGHT - BOTTOM, TOP)
    body = [
        *_y_axis(y_scale, values),
        *_x_axis(x_scale, values),
        *_labels(x_label, y_label),
        f'<line class="diagonal" x1="{x_scale.start}" y1="{y_scale.start}" x2="{x_scale.end}" y2="{y_scale.end}"/>',
        *(_mark(mark, x_scale, y_scale) for mark in marks),
    ]
    return _svg(WIDTH, HEIGHT, f"{y_label} against {x_label}", body)


def _labels(x_label: str, y_label: str) -> list[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        f'<text class="label" x="0" y="12">{escape(y_label)}</text>',
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
    ]


def _mark(mark: Mark, x_scale: Scale, y_scale: Scale) -> str:
    x, y = x_scale(mark.x), y_scale(mark.y)
    low, high = (y_scale(min(max(value, y_scale.low), y_scale.high)) for value in (mark.low, mark.high))
    return (
        f'<g class="{mark.css_class}"><title>{escape(mark.hint)}</title>'
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/></g>'
    )


def dot_chart(rows: Sequence[DotRow], x_label: str, reference: float, highest: float) -> str:
    """A row of dots for each name, over one axis with a line at ``reference``; what exceeds ``highest`` is written
    beside it, from the upper dot to the lower."""
    found = [reference, *(value for row in rows for dot in row.dots for value in (dot.value, dot.low, dot.high))]
    values = ticks(min(found), min(highest, max(found)))
    scale = Scale(values[0], values[-1], DOT_LEFT, BAR_WIDTH - DOT_RIGHT)
    bottom = len(rows) * DOT_PITCH
    axis = [
        f'<line class="grid" x1="{scale(value):.1f}" x2="{scale(value):.1f}" y1="0" y2="{bottom}"/>'
        f'<text class="tick" x="{scale(value):.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
        for value, label in zip(values, tick_labels(values), strict=True)
    ]
    at = f"{scale(reference):.1f}"
    body = [
        *axis,
        f'<line class="axis" x1="{at}" x2="{at}" y1="0" y2="{bottom}"/>',
        f'<text class="label" x="{(scale.start + scale.end) / 2}" y="{bottom + 36}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
        *(part for number, row in enumerate(rows) for part in _dots(row, scale, (number + 0.5) * DOT_PITCH)),
    ]
    return _svg(BAR_WIDTH, bottom + DOT_BOTTOM, x_label, body)


def _dots(row: DotRow, scale: Scale, middle: float) -> list[str]:
    """The dots of a row one below the other, so that their intervals do not hide each other."""
    parts = [f'<text class="name" x="{DOT_LEFT - 14}" y="{middle + 4}" text-anchor="end">{escape(row.name)}</text>']
    spread = DOT_PITCH / (len(row.dots) + 1)
    for number, dot in enumerate(row.dots):
        y = middle - DOT_PITCH / 2 + (number + 1) * spread
        low, value, high = (scale(min(max(x, scale.low), scale.high)) for x in (dot.low, dot.value, dot.high))
        parts.append(
            f'<g class="{dot.css_class}"><title>{escape(dot.hint)}</title>'
            f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="mark" cx="{value:.1f}" cy="{y:.1f}" r="3.5"/></g>'
        )
    if beyond := [f"{dot.value:.2f}" for dot in row.dots if dot.value > scale.high]:
        parts.append(f'<text class="value" x="{scale.end + 7:.1f}" y="{middle + 4}">{", ".join(beyond)}</text>')
    return parts


def standalone(svg: str, css: str, key: Sequence[tuple[str, str]], foot: str) -> str:
    """A chart as a file of its own, on white: with its style, a key of classes and names, and a line of text below."""
    width, height = (float(number) for number in svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split())
    column, sized = width / max(len(key), 1), f'<svg width="{width}" height="{height}" '
    names = [
        f'<g class="{css_class}"><circle class="mark" cx="{column * number + 5:.0f}" cy="{height + 16}" r="4"/>'
        f'<text class="name" x="{column * number + 16:.0f}" y="{height + 20}">{escape(name)}</text></g>'
        for number, (css_class, name) in enumerate(key)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {width + 24} {height + 72}" font-size="12" '
        f'font-family="system-ui, sans-serif"><style>{css}</style>'
        f'<rect x="-12" y="-12" width="{width + 24}" height="{height + 72}" fill="#fff"/>'
        f"{svg.replace('<svg ', sized, 1)}{''.join(names)}"
        f'<text class="tick" x="0" y="{height + 48}">{escape(foot)}</text></svg>\n'
    )


def bar_chart(bars: Sequence[Bar], title: str, longest: float) -> str:
    """Stacked horizontal bars, where ``longest`` would fill the width; values below 0 are drawn as 0."""
    scale = Scale(0.0, longest or 1.0, BAR_LEFT, BAR_WIDTH - BAR_RIGHT)
    body = [part for row, bar in enumerate(bars) for part in _bar(bar, scale, row * BAR_PITCH)]
    return _svg(BAR_WIDTH, len(bars) * BAR_PITCH - (BAR_PITCH - BAR_HEIGHT), title, body)


def _bar(bar: Bar, scale: Scale, top: float) -> list[str]:
    middle = top + BAR_HEIGHT / 2 + 4.5
    name = bar.name if len(bar.name) <= NAME_LETTERS else f"…{bar.name[1 - NAME_LETTERS :]}"
    ends = list(accumulate((max(segment.value, 0.0) for segment in bar.segments), initial=0.0))
    parts = [
        f'<text class="name" x="{BAR_LEFT - 12}" y="{middle}" text-anchor="end">{escape(name)}'
        f"<title>{escape(bar.name)}</title></text>"
    ]
    for segment, start, end in zip(bar.segments, ends[:-1], ends[1:], strict=True):
        left, width = scale(start), scale(end) - scale(start)
        parts.append(
            f'<g class="{segment.css_class}"><title>{escape(segment.hint)}</title>'
            f'<rect class="segment" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BAR_HEIGHT}"/>'
        )
        if width >= INSIDE_WIDTH:
            parts.append(
                f'<text class="inside" x="{left + width / 2:.1f}" y="{middle}" text-anchor="middle">'
                f"{escape(segment.text)}</text>"
            )
        parts.append("</g>")
    parts.append(f'<text class="value" x="{scale(ends[-1]) + 10:.1f}" y="{middle}">{escape(bar.text)}</text>')
    return parts


def _svg(width: float, height: float, title: str, body: Sequence[str]) -> str:
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(body)}</svg>'
