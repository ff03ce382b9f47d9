"""CUDA graphs: steps that only launch work on static tensors are captured once and then replayed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from envs.base import NullClock
from trainer.timing import UPDATE_PARTS, PhaseClock

#: Eager calls before the capture: they load kernels, make workspaces and the optimizer's state.
WARM_UP_CALLS = 3


class Part(NamedTuple):
    """A part of a step: launches work, and never waits for the device."""

    phase: str | None  #: what the clock calls it; None where a phase is open around the step
    run: Callable[[], None]


@dataclass(frozen=True)
class Graphs:
    """Whether and how the steps of a run become CUDA graphs."""

    clock: PhaseClock | NullClock = field(default_factory=NullClock)
    enabled: bool = False
    detail: bool = False  #: cut graphs also at the parts of ``update``, to time them apart
    notice: Callable[[str], None] = print
    generators: tuple[torch.Generator, ...] = ()  #: that steps draw from, beside the device's default one
    _pools: dict[str, Any] = field(default_factory=dict)
    _steps: list[GraphedStep] = field(default_factory=list)

    def step(self, name: str, *parts: Part, capturable: bool = True) -> GraphedStep:
        """A step of these parts, in this order.

        Args:
            name: what a message calls the step; steps of one name share memory, and must be called in the same order
                every time.
            parts: read and write tensors that stay where they are.
            capturable: False for a step that always runs eagerly.
        """
        self._steps.append(GraphedStep(name, parts, self, self.enabled and capturable))
        return self._steps[-1]

    def close(self) -> None:
        """Forget all graphs: NCCL does not let ranks part while there are graphs that hold sums over them."""
        for step in self._steps:
            step.reset()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """What these graphs are captured on, and no others: captures on one stream share a workspace of cuBLAS, which
        graphs that are replayed side by side would spoil. Kernels are as urgent as on the stream of the first capture.
        """
        return torch.cuda.Stream(priority=torch.cuda.current_stream().priority)

    def pool(self, name: str) -> Any:
        """The memory of the graphs of one name."""
        if name not in self._pools:
            self._pools[name] = torch.cuda.graph_pool_handle()
        return self._pools[name]


class GraphedStep:
    """Runs its parts eagerly a few times, then captures them in CUDA graphs and replays those.

    There is one graph for each stretch of parts with the same phase, so that the clock reads phases between replays. A
    replay costs the host one launch. A step that cannot be captured says so once and goes on eagerly.
    """

    def __init__(self, name: str, parts: tuple[Part, ...], graphs: Graphs, enabled: bool):
        self._name, self._parts, self._graphs = name, parts, graphs
        self._enabled = enabled
        self.reset()

    def reset(self) -> None:
        """Forget the graphs: tensors that they used have moved."""
        self._calls = 0
        self._replays: list[Part] = []

    def __call__(self) -> None:
        """One step, in the order of the current stream."""
        if self._enabled and self._calls == WARM_UP_CALLS:
            self._capture()
        self._calls += 1
        for phase, run in self._replays or self._parts:
            if phase is None:
                run()
            else:
                with self._graphs.clock.phase(phase):
                    run()

    def _capture(self) -> None:
        try:
            stretches = itertools.groupby(self._parts, self._phase_between_replays)
            self._replays = [
                Part(phase, capture([part.run for part in parts], self._graphs, self._name))
                for phase, parts in stretches
            ]
        except RuntimeError as error:
            self._enabled, self._replays = False, []
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self._graphs.notice(f"cuda_graphs=true: {self._name} cannot be captured and runs eagerly: {reason}")

    def _phase_between_replays(self, part: Part) -> str | None:
        return None if part.phase in UPDATE_PARTS and not self._graphs.detail else part.phase


def capture(steps: list[Callable[[], None]], graphs: Graphs, name: str) -> Callable[[], None]:
    """Capture the steps, one after another, as one CUDA graph, without running them; returns its replay.

    Args:
        steps: what to capture.
        graphs: whose stream, memory and generators are used.
        name: graphs of one name share memory, and are replayed in the order of their capture.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    for generator in graphs.generators:
        graph.register_generator_state(generator)
    pool, own = graphs.pool(name), graphs.stream
    collecting = gc.isenabled()
    gc.disable()  # a collection could free device memory in the middle of the capture
    try:
        # other threads (engines, wandb) may go on: only this thread's calls are restricted
        with torch.cuda.graph(graph, pool=pool, stream=own, capture_error_mode="thread_local"):
            for step in steps:
                step()
    except RuntimeError:
        _leave_capture(stream, own)
        raise
    finally:
        # a capture begins by resetting the random generators on its own stream: before a replay sets them on this one
        stream.wait_stream(own)
        if collecting:
            gc.enable()
    return graph.replay


def _leave_capture(stream: torch.cuda.Stream, own: torch.cuda.Stream) -> None:
    """After a capture that failed torch stays on its stream, and random generators count for the graph that never was:
    a whole capture ends that."""
    torch.cuda.set_stream(stream)
    number = torch.zeros(1, device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=own, capture_error_mode="thread_local"):
        number += 1
