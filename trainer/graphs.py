"""CUDA graphs: a step that only launches work on static tensors is captured once and then replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

#: Eager calls before the capture: they load kernels, make workspaces and the optimizer's state.
_WARM_UP_CALLS = 3


class GraphedStep:
    """Calls a step eagerly a few times, then captures it in a CUDA graph and replays that.

    The step must read and write tensors that stay where they are, and never wait for the device. A replay costs the
    host one launch.
    """

    def __init__(self, step: Callable[[], None]):
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def reset(self) -> None:
        """Forget the graph: tensors that it used have moved."""
        self._calls, self._graph = 0, None

    def __call__(self) -> None:
        """One step, in the order of the current stream."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self._calls < _WARM_UP_CALLS:
            self._calls += 1
            self._step()
            return
        self._graph = self._capture()
        self._graph.replay()  # capturing ran nothing

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a collection could free device memory in the middle of the capture
        try:
            # other threads (engines, wandb) may go on: only this thread's calls are restricted
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        finally:
            if collecting:
                gc.enable()
        return graph
