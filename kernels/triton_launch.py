"""Launching the scan: what depends only on shapes, layouts and dtypes is done once and looked up on later calls.

A call costs a look-up and one launch of the compiled kernel, two where time is split over programs. Nothing is
allocated but outputs; the moments and the split use a small workspace that is kept for each stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from kernels.dispatch import solve_torch
from kernels.operations import (
    Operation,
    Output,
    accumulate_dtype,
    allocate,
    check_out,
    check_tensors,
    describe,
    output_specs,
)
from kernels.triton_gae import gae_results, gae_rows
from kernels.triton_retrace import retrace_categorical_rows, retrace_results, retrace_rows
from kernels.triton_returns import discounted_rows, state_results, td_lambda_rows
from kernels.triton_scan import FINISH, SUMMARIZE, WHOLE, scan_kernel
from kernels.triton_tiles import choose, next_power
from kernels.triton_traces import trace_rows
from kernels.triton_vtrace import vtrace_results, vtrace_rows

INTERPRETED = isinstance(scan_kernel, InterpretedFunction)


class Construction(NamedTuple):
    """How an operation builds its rows, what a solved row gives, and whether time runs backward."""

    rows: Any
    results: Any
    reverse: bool = True


CONSTRUCTIONS = {
    "gae": Construction(gae_rows, gae_results),
    "vtrace": Construction(vtrace_rows, vtrace_results),
    "retrace": Construction(retrace_rows, retrace_results),
    "retrace_categorical": Construction(retrace_categorical_rows, retrace_results),
    "td_lambda": Construction(td_lambda_rows, state_results),
    "discounted_returns": Construction(discounted_rows, state_results),
    "eligibility_traces": Construction(trace_rows, state_results, reverse=False),
    "episodic_prefix_sum": Construction(trace_rows, state_results, reverse=False),
}

_UNUSED = (1.0, 1.0, 1.0, 1.0)

Plan = Callable[..., Sequence[Tensor]]
_plans: dict[tuple[Any, ...], Plan] = {}


def solve(
    operation: Operation,
    tensors: Sequence[Tensor | None],
    gamma: float | Tensor,
    coefficients: tuple[float, ...],
    out: Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
    moments: bool,
) -> Sequence[Tensor]:
    """Run one operation; arguments and refusals are those of `kernels.dispatch.solve`.

    Raises:
        RuntimeError: the first call with these shapes came inside a CUDA graph capture.
    """
    per_env, number = (gamma, 0.0) if isinstance(gamma, Tensor) else (None, gamma)
    inputs = (*tensors, per_env)
    key: list[Any] = [operation.name, out_dtype, moments, len(inputs)]
    pointers: list[int | None] = []
    try:
        for x in (*inputs, *(out or ())):
            if x is None:
                key.append(None)
                pointers.append(None)
            else:
                pointer = x.data_ptr()
                key += (x.shape, x.stride(), x.dtype, x.device, pointer & 15)
                pointers.append(pointer)
    except (AttributeError, TypeError):
        check_tensors(operation, tensors, per_env)
        raise
    found = tuple(key)
    plan = _plans.get(found)
    if plan is None:
        plan = _plans[found] = prepare(operation, inputs, out, out_dtype, moments)
    return plan(inputs, pointers, number, coefficients, out)


def prepare(
    operation: Operation,
    inputs: Sequence[Tensor | None],
    out: Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
    moments: bool,
) -> Plan:
    """Check the arguments of a first call and decide everything about its launches."""
    *tensors, per_env = inputs
    check_tensors(operation, tensors, per_env)
    rows = cast(Tensor, tensors[0])
    outputs = output_specs(operation, tensors, out_dtype, moments)
    if out is not None:
        check_out(out, outputs, rows.device)
    if not (rows.is_cuda or INTERPRETED):
        raise ValueError(
            f"backend: 'triton' needs CUDA tensors, got {operation.arguments[0].name} of {describe(rows)}; "
            "use 'torch' or 'auto'"
        )
    if rows.numel() == 0:
        return _EmptyPlan(operation, out_dtype, moments)
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{operation.name}: the first call with these shapes compiles its kernel, which a CUDA graph capture "
            "does not allow; call it once before the capture"
        )
    return _ScanPlan(operation, inputs, outputs, moments)


class _EmptyPlan(NamedTuple):
    """A rollout without rows: nothing to launch."""

    operation: Operation
    out_dtype: torch.dtype | None
    moments: bool

    def __call__(self, inputs, pointers, gamma, coefficients, out):
        *tensors, per_env = inputs
        discount = gamma if per_env is None else per_env
        return solve_torch(self.operation, tensors, discount, coefficients, "loop", out, self.out_dtype, self.moments)


class _Workspace:
    """Memory that one stream's launches share, one after the other: a counter, kept at 0, then moments and maps."""

    HEADER_BYTES = 256
    _kept: dict[tuple[torch.device, int], Tensor] = {}  # noqa: RUF012

    @classmethod
    def get(cls, device: torch.device, stream: int, size: int) -> Tensor:
        """At least ``size`` bytes; a captured graph gets its own, as it may be replayed beside other streams."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(size, dtype=torch.uint8, device=device)
        kept = cls._kept.get((device, stream))
        if kept is None or kept.numel() < size:
            kept = cls._kept[device, stream] = torch.zeros(next_power(size), dtype=torch.uint8, device=device)
        return kept


class _Launch:
    """One launch of the scan kernel: compiled by its first call, afterwards called with bare addresses."""

    def __init__(self, grid: tuple[int, int], constants: tuple[Any, ...], warps: int) -> None:
        self.grid, self.constants, self.warps = grid, constants, warps
        self.compiled: Any = None

    def compile(self, arguments: tuple[Any, ...]) -> None:
        """Compile for these tensors and launch; the interpreter has nothing to keep."""
        self.compiled = scan_kernel[self.grid](*arguments, *self.constants, num_warps=self.warps)

    def __call__(self, stream: int, arguments: tuple[Any, ...]) -> None:
        kernel = self.compiled
        kernel.run(
            *self.grid, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *arguments, *self.constants,
        )  # fmt: skip


class _ScanPlan:
    """The launches of one operation for tensors of one set of shapes, strides, dtypes, alignments and one device."""

    def __init__(
        self, operation: Operation, inputs: Sequence[Tensor | None], outputs: list[Output], moments: bool
    ) -> None:
        rows = cast(Tensor, inputs[0])
        self.device, self.outputs, self.moments = rows.device, outputs, moments
        self.steps, self.envs = rows.shape
        env_major = rows.stride(0) == 1 and (self.envs == 1 or rows.stride(1) != 1)
        actions = max((x.shape[2] for x in inputs if x is not None and x.dim() == 3), default=0)
        self.tile = choose(operation.name, self.steps, self.envs, env_major, actions)
        tiles = -(-self.steps // (self.tile.runs * self.tile.length))
        self.chunk_tiles = min(self.tile.chunk_tiles or tiles, tiles)
        self.chunks = -(-tiles // self.chunk_tiles)
        self.dtype = accumulate_dtype(operation, inputs[:-1])
        wide = any(_extent(x) >= 2**31 for x in inputs if x is not None)
        self.launches = [self._launch(operation, phase, env_major, wide) for phase in self._phases()]
        self.strides = tuple(_strides(x) for x in inputs)
        self.output_strides: tuple[tuple[int, ...], ...] = ()
        size = self.dtype.itemsize
        self.parts_bytes = -(-3 * size * self.chunks * self.launches[-1].grid[0] // 256) * 256 if moments else 0
        maps_bytes = 2 * size * next_power(self.chunks) * self.envs if self.chunks > 1 else 0
        used = self.parts_bytes + maps_bytes
        self.scratch_bytes = _Workspace.HEADER_BYTES + used if used else 0

    def _phases(self) -> list[int]:
        return [WHOLE.value] if self.chunks == 1 else [SUMMARIZE.value, FINISH.value]

    def _launch(self, operation: Operation, phase: int, env_major: bool, wide: bool) -> _Launch:
        tile, (rows, results, reverse) = self.tile, CONSTRUCTIONS[operation.name]
        grid = (-(-self.envs // tile.envs), self.chunks)
        accumulate = tl.float64 if self.dtype == torch.float64 else tl.float32
        constants = (rows, results, reverse, phase, accumulate, wide, env_major, tile.runs, tile.envs, tile.length)
        return _Launch(grid, (*constants, next_power(self.chunks), operation.advantages), tile.warps)

    def __call__(
        self,
        inputs: Sequence[Tensor | None],
        addresses: Sequence[int | None],
        gamma: float,
        coefficients: tuple[float, ...],
        out: Sequence[Tensor] | None,
    ) -> Sequence[Tensor]:
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self._run(inputs, addresses, gamma, coefficients, out)
        return self._run(inputs, addresses, gamma, coefficients, out)

    def _run(self, inputs, addresses, gamma, coefficients, out):
        results = allocate(inputs[0], self.outputs) if out is None else out
        stream = 0 if INTERPRETED else driver.active.get_current_stream(self.device.index)
        first = self.launches[0].compiled is None
        if first:
            handles, targets = tuple(inputs), tuple(results)
            self.output_strides = tuple(x.stride() for x in results)
        else:
            handles, targets = tuple(addresses[: len(inputs)]), tuple(x.data_ptr() for x in results)
        maps, moments = None, None
        if self.scratch_bytes:
            parts, maps, counter = self._scratch(stream, as_tensors=first)
            if self.moments:
                *targets, result = targets
                targets, moments = tuple(targets), (result, parts, counter)
        arguments = (
            handles[:-1], self.strides, targets, self.output_strides, maps, moments, gamma, handles[-1],
            *(*coefficients, *_UNUSED)[:4], self.steps, self.envs, self.chunk_tiles,
        )  # fmt: skip
        for launch in self.launches:
            if first:
                launch.compile(arguments)
            else:
                launch(stream, arguments)
        return results

    def _scratch(self, stream: int, as_tensors: bool) -> tuple[Any, Any, Any]:
        """The moments' parts, the chunks' maps and the counter: tensors where a kernel is compiled, else addresses."""
        memory = _Workspace.get(self.device, stream, self.scratch_bytes)
        parts, maps = _Workspace.HEADER_BYTES, _Workspace.HEADER_BYTES + self.parts_bytes
        if as_tensors:
            return memory[parts:].view(self.dtype), memory[maps:].view(self.dtype), memory[:4].view(torch.int32)
        start = memory.data_ptr()
        return start + parts, start + maps, start


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides in elements, and the number of actions of a ``[T, N, A]`` tensor."""
    if x is None:
        return ()
    return (*x.stride(), *x.shape[2:])


def _extent(x: Tensor) -> int:
    """One more than the largest offset in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
