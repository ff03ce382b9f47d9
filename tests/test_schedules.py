"""Learning-rate schedules by their numbers."""

import pytest

from trainer import schedules


@pytest.mark.parametrize(
    ("update", "updates", "expected"),
    [(0, 1000, 3e-4), (399, 1000, 1.803e-4), (400, 1000, 1.8e-4), (999, 1000, 3e-7), (400, 2000, 2.4e-4)],
)
def test_the_linear_rate_depends_on_the_share_of_the_run_alone(update: int, updates: int, expected: float) -> None:
    assert schedules.linear(3e-4, update / updates) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("progress", "expected"), [(1.0, 0.0), (1.001, 0.0), (-0.1, 3e-4)])
def test_the_linear_rate_never_leaves_its_range(progress: float, expected: float) -> None:
    assert schedules.linear(3e-4, progress) == expected
