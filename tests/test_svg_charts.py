"""Charts: axes with few round numbers, and marks where their values are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.svg_charts import Dot, DotRow, Mark, diagonal_chart, dot_chart, tick_labels, ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e6))
def test_ticks_are_few_even_and_cover_the_range(low: float, relative_width: float):
    high = low + relative_width * max(abs(low), 1e-3)
    values = ticks(low, high)
    slack = 1e-6 * (values[1] - values[0])
    assert values[0] <= low + slack and values[-1] >= high - slack
    assert 2 <= len(values) <= 9
    assert np.allclose(np.diff(values), values[1] - values[0], rtol=1e-4, atol=1e-12 * abs(high))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 20_000, 40_000], ["0", "20 k", "40 k"]),
        ([12_300, 12_350, 12_400], ["12.30 k", "12.35 k", "12.40 k"]),
        ([-1.0, -0.5, 0.0], ["-1.0", "-0.5", "0"]),
        ([0, 1e6, 2e6], ["0", "1 M", "2 M"]),
    ],
)
def test_tick_labels_tell_neighbours_apart(values: list[float], labels: list[str]):
    assert tick_labels(values) == labels


def test_one_value_alone_still_has_an_axis():
    assert ticks(500.0, 500.0)[0] < 500.0 < ticks(500.0, 500.0)[-1]
    assert ticks(0.0, 0.0)[0] < 0.0 < ticks(0.0, 0.0)[-1]


def test_ratios_beyond_the_axis_are_written_beside_their_row():
    far_dots = [Dot("a", 7.125, 7.0, 7.2, ""), Dot("b", 1.01, 1.0, 1.02, ""), Dot("c", 1.5, 1.4, 1.6, "")]
    rows = [DotRow("near", [Dot("a", 1.02, 1.01, 1.03, "")]), DotRow("far", far_dots)]
    chart = dot_chart(rows, "times faster", reference=1.0, highest=1.3)
    assert ">7.12, 1.50<" in chart and "1.02<" not in chart
    near, far, *_ = (float(piece.split('cx="')[1].split('"')[0]) for piece in chart.split("<circle")[1:])
    assert near < far


def test_points_whose_coordinates_are_equal_lie_on_the_diagonal():
    marks = [Mark("mark-sure", value, value, value, value, "") for value in (0.97, 1.0, 1.31)]
    chart = diagonal_chart(marks, "predicted", "measured")
    ends = [
        float(chart.split('class="diagonal"')[1].split(f'{name}="')[1].split('"')[0])
        for name in ("x1", "y1", "x2", "y2")
    ]
    for piece in chart.split("<circle")[1:]:
        x, y = (float(piece.split(f'{name}="')[1].split('"')[0]) for name in ("cx", "cy"))
        along = (x - ends[0]) / (ends[2] - ends[0])
        assert y == pytest.approx(ends[1] + along * (ends[3] - ends[1]), abs=0.11), "pixels have one decimal"
