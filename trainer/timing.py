"""The clock of the loop: what each phase costs, so that the phases sum to the wall time of the update.

On CUDA a stamp is an event on the current stream, read once per update; nothing in the loop synchronizes. On a CPU it
is the monotonic clock. A lap is one turn of the loop; the time of a lap that no phase claims is ``other``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

PHASES: tuple[str, ...] = ("env_step", "transfer", "inference", "credit", "update", "normalize", "log", "other")
#: Parts of ``update``: reported beside it, not added to the sum.
UPDATE_PARTS: tuple[str, ...] = ("forward", "backward", "optimizer")

Stamp = torch.cuda.Event | int
_EMPTY_PHASES = 50


class _Lap(NamedTuple):
    spans: list[tuple[str, Stamp, Stamp]]
    phases: int  #: how many were timed
    start: Stamp
    end: Stamp


class PhaseClock:
    """Times phases, each with its own name, over laps.

    A phase that is opened inside another one takes its time out of the outer one, except the parts of ``update``,
    which stay inside it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._events: list[torch.cuda.Event] = []  # events to use again
        self._spans: list[tuple[str, Stamp, Stamp]] = []
        self._open: list[str] = []
        self._lap_start: Stamp | None = None
        self._phases = 0
        self._previous_laps: list[_Lap] = []
        self._phase_ms = 0.0  # what timing one phase costs
        #: milliseconds that the clock itself took of the laps last read: their phases times the cost of an empty one
        self.cost_ms = 0.0

    def _stamp(self) -> Stamp:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as the phase ``name``; what is captured in a CUDA graph is timed when it is replayed."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
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
            self._spans.append((name, start, end))
            if name not in UPDATE_PARTS:
                # counted backwards: the same span is taken out of the phases around it
                self._spans += [(outer, end, start) for outer in self._enclosing()]

    def _enclosing(self) -> Iterator[str]:
        """The phase around what is open now, after the parts of it that are open."""
        for name in reversed(self._open):
            yield name
            if name not in UPDATE_PARTS:
                return

    def start(self) -> None:
        """Begin the first turn of the loop; what was timed before is forgotten."""
        self._phase_ms = self._phase_ms or self._measure_phase()
        self._spans, self._phases, self._previous_laps = [], 0, []
        self._lap_start = self._stamp()

    def lap(self) -> None:
        """End a turn of the loop and start the next."""
        now = self._stamp()
        if self._lap_start is not None:
            self._previous_laps.append(_Lap(self._spans, self._phases, self._lap_start, now))
        self._spans, self._phases, self._lap_start = [], 0, now

    def _measure_phase(self) -> float:
        """Milliseconds of an empty phase; on CUDA those of the device while it has more to do than the host."""
        if self._device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # cycles: the device is busy until all phases below were issued
        start = self._stamp()
        for _ in range(_EMPTY_PHASES):
            with self.phase("other"):
                pass
        end = self._stamp()
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        self._use_again(stamp for _, *stamps in self._spans for stamp in stamps)
        return _elapsed_ms(start, end) / _EMPTY_PHASES

    def _use_again(self, stamps: Iterable[Stamp]) -> None:
        self._events += {id(stamp): stamp for stamp in stamps if isinstance(stamp, torch.cuda.Event)}.values()

    def read(self) -> dict[str, float]:
        """Milliseconds per phase of the laps since the last read, and their ``total``; waits for the device once.

        Parts of ``update`` are there only if they were timed: inside of a CUDA graph they cannot be.
        """
        milliseconds = dict.fromkeys((*PHASES, "total"), 0.0)
        for lap in self._previous_laps:
            if isinstance(lap.end, torch.cuda.Event):
                lap.end.synchronize()
            for name, start, end in lap.spans:
                milliseconds[name] = milliseconds.get(name, 0.0) + _elapsed_ms(start, end)
            milliseconds["total"] += _elapsed_ms(lap.start, lap.end)
            self._use_again([lap.start, *(stamp for _, *stamps in lap.spans for stamp in stamps)])
        self.cost_ms = self._phase_ms * sum(lap.phases for lap in self._previous_laps)
        self._previous_laps = []
        named = sum(value for name, value in milliseconds.items() if name not in (*UPDATE_PARTS, "total"))
        milliseconds["other"] += milliseconds["total"] - named
        return milliseconds


def _elapsed_ms(start: Stamp, end: Stamp) -> float:
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end)
    raise TypeError("a span's two stamps come from one clock")
