"""What the credit benchmarks share: inputs of a given layout, the bytes that must move, and how a call is timed."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from kernels.operations import FLAGS, INTEGERS, OPERATIONS, Operation

Call = Callable[[], Any]
BY_NAME = {operation.name: operation for operation in OPERATIONS}
L2_BYTES = 64 * 2**20  # more than an H200 has (60 MB)
CALLS_PER_GRAPH = 20


class Problem(NamedTuple):
    """One row of the benchmark: an operation on a rollout of ``steps`` by ``envs``."""

    operation: str
    envs: int
    steps: int
    layout: str = "time"  #: ``time`` or ``env`` major
    dtype: str = "float32"
    actions: int = 4
    truncation: bool = True

    @property
    def spec(self) -> Operation:
        """The operation's signature."""
        return BY_NAME[self.operation]

    def inputs(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        """Random arguments by name: episodes of about 100 steps, a third of them truncated, real log-probs."""
        generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)

        def lay(x: Tensor) -> Tensor:
            return x.transpose(0, 1).contiguous().transpose(0, 1) if self.layout == "env" and x.dim() > 1 else x

        def draw(name: str, axes: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
            sizes = {"T": self.steps, "N": self.envs, "A": self.actions}
            shape = [sizes[axis] for axis in axes]
            if dtypes is FLAGS:
                rate = 0.0067 if name == "terminated" else 0.0033
                return lay(torch.rand(shape, generator=generator, device=device) < rate)
            if dtypes is INTEGERS:
                return lay(torch.randint(self.actions, shape, generator=generator, device=device))
            x = torch.randn(shape, generator=generator, device=device)
            if axes == "TNA" and "log" in name:
                x = x.log_softmax(-1)
            elif "log_prob" in name:
                x = -x.abs()
            return lay(x.to(dtype))

        wanted = {"truncated", "bootstrap_values"} if self.truncation else set()
        arguments = [x for x in self.spec.arguments if not x.optional or x.name in wanted]
        return {x.name: draw(x.name, x.axes, x.dtypes) for x in arguments}

    def call(self, inputs: dict[str, Tensor], **options: Any) -> Call:
        """The public call on these inputs."""
        return functools.partial(getattr(kernels, self.operation), **inputs, **options)


def as_tuple(results: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of any operation as a tuple."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def moved_bytes(inputs: dict[str, Tensor], results: Sequence[Tensor]) -> int:
    """Every input read once and every output written once."""
    return sum(x.numel() * x.element_size() for x in (*inputs.values(), *results))


def copy_call(size: int, device: str) -> Call:
    """A device-to-device copy that moves ``size`` bytes, read and written together.

    They are rounded up to 8 KiB each: other sizes may take nearly twice as long, which would flatter the kernels.
    """
    source = torch.randint(256, (-(-size // 2**14) * 2**13,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All calls, one after the other, in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def device_times(calls: Sequence[Call], replays: int = 15) -> list[float]:
    """Microseconds of device time per call, one figure for each replay of a graph of all the calls, sorted."""
    graph = capture(calls)
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) * 1e3 / len(calls) for start, end in events)


def hot_times(call: Call, replays: int = 15) -> list[float]:
    """Device time of the same call on the same tensors, which stay in L2 where they fit."""
    return device_times([call] * CALLS_PER_GRAPH, replays)


def cold_times(make_call: Callable[[int], Call], size: int, replays: int = 15) -> list[float]:
    """Device time where each call finds its tensors in device memory: sets of them, more than L2 holds, in turns."""
    sets = min(64, max(2, -(-3 * L2_BYTES // size)))
    return device_times([make_call(seed) for seed in range(sets)], replays)


def synchronized_time(call: Call, repeats: int = 40) -> float:
    """Microseconds from the call to the end of its work on the device, the median."""
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[5:])


def host_time(call: Call, rounds: int = 7, calls: int = 60) -> float:
    """Microseconds that the host is busy with one call, the device running behind, the median of the rounds."""
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return statistics.median(times[2:])


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80 of sorted figures."""
    last = len(times) - 1
    p20, p50, p80 = (times[round(last * q)] for q in (0.2, 0.5, 0.8))
    return p20, p50, p80
