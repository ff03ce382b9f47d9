"""The clock of the loop: what each phase costs, so that the phases sum to the wall time of the update.

On CUDA a stamp is an event on the current stream, read once per update; nothing in the loop synchronizes. On a CPU it
is the monotonic clock. A lap is one turn of the loop; the time of a lap that no phase claims is ``other``. Where laps
are short only some of them are timed phase by phase, so that timing stays cheap.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

PHASES: tuple[str, ...] = ("env_step", "transfer", "inference", "credit", "update", "normalize", "log", "other")
#: Parts of ``update``: reported beside it, not added to the sum.
UPDATE_PARTS: tuple[str, ...] = ("forward", "backward", "optimizer")

#: Of many equal turns about so many are timed on CUDA, where an event costs as much time as a small step takes.
_TIMED_TURNS = 4
#: On CUDA the stamps of a timed lap take at most this part of the time until the next one is timed. Reading them and
#: the gaps that they leave between launches cost up to four times as much again: with those it is below a hundredth.
_BUDGET = 0.0015

Stamp = torch.cuda.Event | int
_BATCHES, _EMPTY_PHASES = 5, 50


@dataclass(eq=False)
class _Turns:
    """Equal turns of which some were timed."""

    start: Stamp
    end: Stamp | None = None


class _Span(NamedTuple):
    name: str
    start: Stamp
    end: Stamp
    turns: _Turns | None  #: among which it was one of several


class _Lap(NamedTuple):
    spans: list[_Span]
    settled: dict[str, float]  #: milliseconds of phases that were read already
    phases: int  #: how many were timed
    rests: bool  #: none was to be timed
    start: Stamp
    end: Stamp


class PhaseClock:
    """Times phases, each with its own name, over laps.

    A phase that is opened inside another one takes its time out of the outer one, except the parts of ``update``,
    which stay inside it.

    Args:
        device: whose time counts.
        timed_turns: about how many turns of `turns` are timed; None times all.
        budget: of the time from one timed lap to the next, the part that its stamps may take. The laps between rest: of
            them only the whole is timed, and the phases of the last timed lap fill it in their ratio. None times all.
    """

    def __init__(self, device: torch.device, timed_turns: int | None = None, budget: float | None = None):
        self._device, self._timed_turns, self._budget = device, timed_turns, budget
        self._events: list[torch.cuda.Event] = []  # events to use again
        self._spans: list[_Span] = []
        self._settled: dict[str, float] = {}
        self._turns: _Turns | None = None  # under way, with only some of them timed
        self._is_silent = False  # within a turn that is not timed
        self._rests = False  # within a lap that is not timed
        self._laps_since_timed = 1
        self._shares = {"other": 1.0}  # of the last timed lap: parts of its total
        self._open: list[str] = []
        self._lap_start: Stamp | None = None
        self._phases = 0
        self._previous_laps: list[_Lap] = []
        self._phase_ms = 0.0  # what timing one phase costs
        #: milliseconds that the clock itself took of the laps last read: their phases times the cost of an empty one
        self.cost_ms = 0.0
        self.interval = 1  #: laps from one that is timed to the next, by what the last one cost
        self.may_rest = True  #: False times every lap, whatever the budget

    def _stamp(self) -> Stamp:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as the phase ``name``; what is captured in a CUDA graph is timed when it is replayed."""
        if self._rests or self._is_silent or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
            return
        start = self._stamp()
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            end = self._stamp()
            self._phases += 1
            self._spans.append(_Span(name, start, end, self._turns))
            if name not in UPDATE_PARTS:
                # counted backwards: the same span is taken out of the phases around it
                self._spans += [_Span(outer, end, start, self._turns) for outer in self._enclosing()]

    def turns(self, count: int) -> Iterator[int]:
        """``0 .. count - 1``, for as many turns that do the same.

        Where more than ``timed_turns`` are to come, only evenly spaced ones of them are timed, and their phases are
        scaled to fill the time that all turns took: between the phases of a timed turn there are the stamps, which the
        other turns do not have. What each phase took is then an estimate, the sum is not.
        """
        stride = -(-count // self._timed_turns) if self._timed_turns else 1
        if stride == 1 or self._rests:
            yield from range(count)
            return
        turns = self._turns = _Turns(self._stamp())
        try:
            for number in range(count):
                self._is_silent = number % stride != stride - 1
                yield number
        finally:
            turns.end = self._stamp()
            self._turns, self._is_silent = None, False

    def _enclosing(self) -> Iterator[str]:
        """The phase around what is open now, after the parts of it that are open."""
        for name in reversed(self._open):
            yield name
            if name not in UPDATE_PARTS:
                return

    def start(self) -> None:
        """Begin the first turn of the loop; what was timed before is forgotten."""
        self._rests = False
        self._phase_ms = self._phase_ms or self._measure_phase()
        self._previous_laps = []
        self._begin(self._stamp())

    def lap(self) -> None:
        """End a turn of the loop and start the next."""
        now = self._stamp()
        if self._lap_start is not None:
            lap = _Lap(self._spans, self._settled, self._phases, self._rests, self._lap_start, now)
            self._previous_laps.append(lap)
            self._laps_since_timed = self._laps_since_timed + 1 if self._rests else 1
        self._begin(now)

    def _begin(self, start: Stamp) -> None:
        """A lap, which is timed if enough others have rested."""
        self._spans, self._settled, self._phases, self._lap_start = [], {}, 0, start
        self._rests = self.may_rest and self._laps_since_timed < self.interval

    def settle(self) -> None:
        """Read what was timed of turns that are over, so that `read` has less to do; waits until the device has done
        them, and is called while it has something else to do."""
        over = [span for span in self._spans if span.turns is not None and span.turns.end is not None]
        if over:
            self._spans = [span for span in self._spans if span.turns is None or span.turns.end is None]
            self._add(over, self._settled)

    def _measure_phase(self) -> float:
        """Milliseconds of an empty phase; on CUDA those of the device while it has more to do than the host."""
        if self._device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # cycles: the device is busy until all phases below were issued
        borders = [self._stamp()]
        for _ in range(_BATCHES):
            for _ in range(_EMPTY_PHASES):
                with self.phase("other"):
                    pass
            borders.append(self._stamp())
        if isinstance(borders[-1], torch.cuda.Event):
            borders[-1].synchronize()
        self._use_again([*borders, *(stamp for span in self._spans for stamp in (span.start, span.end))])
        # the median: the first batch is cold, and others may be interrupted
        return median(_elapsed_ms(*batch) for batch in itertools.pairwise(borders)) / _EMPTY_PHASES

    def _use_again(self, stamps: Iterable[Stamp | None]) -> None:
        self._events += {id(stamp): stamp for stamp in stamps if isinstance(stamp, torch.cuda.Event)}.values()

    def read(self) -> dict[str, float]:
        """Milliseconds per phase of the laps since the last read, and their ``total``; waits for the device once.

        Parts of ``update`` are there only if they were timed: inside of a CUDA graph they cannot be.
        """
        milliseconds = dict.fromkeys((*PHASES, "total"), 0.0)
        self.cost_ms = 0.0
        for lap in self._previous_laps:
            for name, lap_ms in self._read_lap(lap).items():
                milliseconds[name] = milliseconds.get(name, 0.0) + lap_ms
        self._previous_laps = []
        return milliseconds

    def _read_lap(self, lap: _Lap) -> dict[str, float]:
        """Milliseconds of a lap's phases and its ``total``."""
        _wait_for(lap.end)
        total = _elapsed_ms(lap.start, lap.end)
        self._use_again([lap.start])
        if lap.rests:
            return {**{name: share * total for name, share in self._shares.items()}, "total": total}
        times = dict(lap.settled)
        self._add(lap.spans, times)
        named = sum(value for name, value in times.items() if name not in UPDATE_PARTS)
        times["other"] = times.get("other", 0.0) + total - named
        cost_ms = self._phase_ms * lap.phases
        self.cost_ms += cost_ms
        if total > 0.0:
            self._shares = {name: value / total for name, value in times.items()}
            self.interval = max(1, math.ceil(cost_ms / (self._budget * total))) if self._budget else 1
        return {**times, "total": total}

    def _add(self, spans: list[_Span], milliseconds: dict[str, float]) -> None:
        """Add what these spans took, whose stamps are used again."""
        for turns in {span.turns for span in spans}:
            _wait_for(turns and turns.end)
        spent = [(span, _elapsed_ms(span.start, span.end)) for span in spans]
        scales = _scales(spent)
        for span, spent_ms in spent:
            scale = scales[span.turns] if span.turns is not None else 1.0
            milliseconds[span.name] = milliseconds.get(span.name, 0.0) + scale * spent_ms
        self._use_again(stamp for some in (*spans, *scales) for stamp in (some.start, some.end))


def _wait_for(stamp: Stamp | None) -> None:
    if isinstance(stamp, torch.cuda.Event):
        stamp.synchronize()


def _scales(spent: Iterable[tuple[_Span, float]]) -> dict[_Turns, float]:
    """For turns of which some were timed: all turns' time by that of the phases in the timed ones."""
    timed: dict[_Turns, float] = {}
    for span, spent_ms in spent:
        if span.turns is not None and span.name not in UPDATE_PARTS:
            timed[span.turns] = timed.get(span.turns, 0.0) + spent_ms
    return {some: _elapsed_ms(some.start, some.end) / total if total else 1.0 for some, total in timed.items()}


def make_clock(device: torch.device, detailed: bool = False) -> PhaseClock:
    """A clock for this device; ``detailed`` times every turn of every lap also where that is dear."""
    return PhaseClock(device, _TIMED_TURNS, _BUDGET) if device.type == "cuda" and not detailed else PhaseClock(device)


def _elapsed_ms(start: Stamp, end: Stamp | None) -> float:
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end)
    raise TypeError("a span's two stamps come from one clock")
