"""What another credit backend would be worth here: timed on the run's own tensors while it trains (``credit.probe``).

Credit that takes a share p of an update and gets s times faster makes the update ``1 / ((1 - p) + p / s)`` times faster
(Amdahl 1967). p is what the clock measures; s is measured here, by calling both backends on the same live tensors, in
the place where a run does: with as much work ahead of them as the device has there.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.operations import Backend
from trainer.config import CreditConfig
from trainer.estimator import Estimate, Estimator, estimate
from trainer.graphs import WARM_UP_CALLS, Graphs, Part
from trainer.rollout import Rollout
from trainer.timing import PhaseClock

#: Timed calls of each backend, in turns; their median counts.
_REPEATS = 3
#: Of the largest magnitude: a float32 sum over the 100 steps of gamma 0.99, some roundings of 6e-8 each.
TOLERANCE = 1e-4


def amdahl(share: float, speedup: float) -> float:
    """How many times faster the whole gets where ``share`` of it gets ``speedup`` times faster: ``1/((1-p)+p/s)``."""
    return 1.0 / ((1.0 - share) + share / speedup)


def phase_shares(times: dict[str, float]) -> dict[str, float]:
    """Each phase's share p of the update's time, from the clock's milliseconds; the probe's own time counts nowhere."""
    total = times["total"] - times.get("probe", 0.0)
    return {name: value / total for name, value in times.items() if name not in ("probe", "total")} if total else {}


class CreditTimes(NamedTuple):
    """Two backends on the same tensors."""

    used_ms: float
    other_ms: float
    difference: float  #: largest difference of their results by the largest magnitude; inf where one is not finite
    unfinished_ms: float  #: for how long the device had work before each call

    @property
    def speedup(self) -> float:
        """s: how many times faster the other backend is; below 1 where it is slower."""
        return self.used_ms / self.other_ms


def estimator_of(config: CreditConfig, backend: Backend) -> Estimator:
    """The credit call of a run with these settings."""
    return partial(estimate, config=config, backend=backend)


def other_credit(config: CreditConfig, backend: Backend, device: torch.device) -> tuple[CreditConfig, Backend]:
    """What a run's credit is compared with: Triton with torch and torch with Triton; on a CPU, loop with scan."""
    if device.type == "cuda":
        return config, "torch" if backend == "triton" else "triton"
    return replace(config, torch_mode="scan" if config.torch_mode == "loop" else "loop"), "torch"


def compare_credit(
    used: Estimator, other: Estimator, rollout: Rollout, rewards: Tensor, unfinished_ms: float, graphed: bool = False
) -> CreditTimes:
    """Time two estimators on the same tensors by the loop's clock.

    Both are called some times before, so that compilation and cold caches are left out. Waits for the device.

    Args:
        used, other: what is compared.
        rollout: ``[T, N]``, read only.
        rewards: ``[T, N]``.
        unfinished_ms: for how long the device has other work before each call. Where that is longer than launching the
            call, the call costs what the device takes; otherwise it costs at least what the host takes.
        graphed: time replays of CUDA graphs, as a run's own calls are where ``cuda_graphs`` is on.
    """
    device = rewards.device
    difference = _difference(used(rollout, rewards), other(rollout, rewards))
    graphs = Graphs(enabled=graphed)
    calls = [
        graphs.step(name, Part(None, partial(_discard, estimator, rollout, rewards)))
        for name, estimator in (("the run's credit", used), ("the other credit", other))
    ]
    for _ in range(WARM_UP_CALLS):
        for call in calls:
            call()
    launching_ms = max(map(_launch, calls, itertools.repeat(device)))
    busy_ms = min(unfinished_ms, 2 * launching_ms)  # more would change nothing but how long this takes
    clock = PhaseClock(device)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_REPEATS):
        for found, call in zip(times, calls, strict=True):
            synchronize(device)
            clock.start()
            _keep_busy(device, busy_ms)
            with clock.phase("credit"):
                call()
            clock.lap()
            found.append(clock.read()["credit"])
    graphs.close()
    used_ms, other_ms = map(statistics.median, times)
    return CreditTimes(used_ms, other_ms, difference, unfinished_ms)


def _discard(estimator: Estimator, rollout: Rollout, rewards: Tensor) -> None:
    estimator(rollout, rewards)


def _launch(call: Callable[[], None], device: torch.device) -> float:
    """Milliseconds that a call takes the host, the second of two: the first may capture."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _wait(device: torch.device) -> float:
    """Wait for the device; for how many milliseconds it had work left."""
    start = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _keep_busy(device: torch.device, milliseconds: float) -> None:
    """Give the device work for so long; a CPU has no work but what its caller waits for."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * _cycles_per_ms(device)))


@functools.cache
def _cycles_per_ms(device: torch.device) -> float:
    """How many cycles of `torch.cuda._sleep` take a millisecond."""
    cycles, borders = 1_000_000, [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for border in borders:  # the first of two stretches is cold
        border.record(torch.cuda.current_stream(device))
        torch.cuda._sleep(cycles)
    borders[-1].synchronize()
    return cycles / borders[1].elapsed_time(borders[2])


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do; a CPU never has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _difference(used: Estimate, other: Estimate) -> float:
    """The largest one over advantages and value targets, each by its largest finite magnitude or 1."""
    return max(
        _relative_difference(a, b)
        for a, b in ((used.advantages, other.advantages), (used.value_targets, other.value_targets))
    )


def _relative_difference(a: Tensor, b: Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    scale = torch.where(b.isfinite(), b.abs(), 0.0).max().clamp(min=1.0)
    difference = (a - b).abs() / scale
    return float(torch.where(same, 0.0, torch.where(difference.isnan(), torch.inf, difference)).max())


class CreditProbe:
    """Compares a run's credit with another estimator, every ``interval`` updates, as either would run in its place:
    with as much work of the device before it.

    Results are compared and thrown away: training is the same with and without it, but for the time that it takes,
    which the clock shows as the phase ``probe``.

    Args:
        used: the run's own.
        other: what it could switch to.
        name: of the other one.
        graphed: whether the run's own calls are replays of CUDA graphs.
        interval: updates from one comparison to the next.
    """

    def __init__(self, used: Estimator, other: Estimator, name: str, graphed: bool = False, interval: int = 1):
        self._used, self._other, self._name, self._graphed, self._interval = used, other, name, graphed, interval
        self.times: CreditTimes | None = None  #: of the last update, if it had a turn

    def __call__(self, rollout: Rollout, rewards: Tensor, update: int) -> None:
        """Compare, if it is this update's turn; ``update`` counts those done before."""
        self.times = None
        if update % self._interval == 0:
            unfinished_ms = _wait(rewards.device)
            self.times = compare_credit(self._used, self._other, rollout, rewards, unfinished_ms, self._graphed)
            _keep_busy(rewards.device, unfinished_ms)  # so that the run's own call finds it as it would have

    def metrics(self, share: float) -> dict[str, Any]:
        """What to log of this update, nothing if it had no turn.

        Args:
            share: p, of credit in this update without the probe's own time.
        """
        times = self.times
        if times is None:
            return {}
        return {
            "probe/other_backend": self._name,
            "probe/used_ms": times.used_ms,
            "probe/other_ms": times.other_ms,
            "probe/unfinished_ms": times.unfinished_ms,
            "probe/speedup": times.speedup,
            "probe/predicted_speedup": amdahl(share, times.speedup),
            "probe/difference": times.difference,
            "probe/agrees": float(times.difference <= TOLERANCE),
        }


def make_probe(config: CreditConfig, backend: Backend, device: torch.device, graphed: bool) -> CreditProbe:
    """The probe of a run with these settings."""
    other, other_backend = other_credit(config, backend, device)
    name = other_backend if other_backend == "triton" else f"torch {other.torch_mode}"
    estimators = estimator_of(config, backend), estimator_of(other, other_backend)
    return CreditProbe(*estimators, name, graphed, config.probe_interval)
