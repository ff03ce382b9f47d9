"""Schedules as pure functions of progress; the one that follows the KL is in `kernels.step_guard`."""

from __future__ import annotations


def linear(initial: float, progress: float) -> float:
    """``initial * (1 - progress)``, with progress in [0, 1] = env steps done over ``total_steps``.

    It depends on nothing but the counter, so a resumed run continues where it was, and one that is resumed with a
    larger ``total_steps`` takes the value that the longer run would have had at that step. It never leaves ``[0,
    initial]``.
    """
    return initial * (1.0 - min(max(progress, 0.0), 1.0))
