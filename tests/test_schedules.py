"""Learning-rate schedules by their numbers."""

import math

import pytest
import torch

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


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.0161, 3e-4 / 1.5),
        (0.016, 3e-4),
        (0.008, 3e-4),
        (0.004, 3e-4),
        (0.0039, 3e-4 * 1.5),
        (0.0, 3e-4 * 1.5),
        (math.nan, 3e-4),
        (math.inf, 3e-4),
    ],
)
def test_the_adaptive_rate_moves_by_half_away_from_a_wrong_kl(kl: float, expected: float) -> None:
    rate = torch.tensor(3e-4, dtype=torch.float64)
    schedules.adapt_to_kl_(rate, torch.tensor(kl, dtype=torch.float64), 0.008, 1e-5, 1e-2)
    assert float(rate) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("kl", "limit"), [(1.0, 1e-5), (0.0, 1e-2)])
def test_the_adaptive_rate_stops_at_its_limits(kl: float, limit: float) -> None:
    rate = torch.tensor(3e-4)
    for _ in range(30):
        schedules.adapt_to_kl_(rate, torch.tensor(kl), 0.008, 1e-5, 1e-2)
    assert float(rate) == pytest.approx(limit)
