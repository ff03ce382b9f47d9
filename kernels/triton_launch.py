"""Launching the scan: what depends only on shapes, layouts and dtypes is done once and looked up on later calls.

A call costs a look-up and one launch of the compiled kernel, two where time is split over programs. Nothing is
allocated but outputs; the moments and the split use a small workspace that is kept for each stream.
"""

from __future__ import annotations

import math
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
from kernels.triton_tiles import Tile, choose, next_power
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
    steps, envs = rows.shape
    actions = max((x.shape[2] for x in tensors if x is not None and x.dim() == 3), default=0)
    tile = choose(operation.name, steps, envs, is_env_major(rows), rows.dtype.itemsize, actions)
    return ScanPlan(operation, inputs, outputs, moments, tile)


def is_env_major(rows: Tensor) -> bool:
    """Whether the steps of one env lie next to each other."""
    return rows.stride(0) == 1 and (rows.shape[1] == 1 or rows.stride(1) != 1)


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

    def compile(self, arguments: tuple[Any, ...]) -> Any:
        """Compile for these tensors without launching."""
        return scan_kernel.warmup(*arguments, *self.constants, grid=self.grid, num_warps=self.warps)

    def first(self, arguments: tuple[Any, ...]) -> None:
        """Compile for these tensors and launch; the interpreter leaves nothing to keep."""
        run: Any = scan_kernel[self.grid]
        self.compiled = run(*arguments, *self.constants, num_warps=self.warps)

    def again(self, stream: int, arguments: tuple[Any, ...]) -> None:
        """Launch what was compiled, without looking at the arguments."""
        kernel = self.compiled
        kernel.run(
            *self.grid, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *arguments, *self.constants,
        )  # fmt: skip


class ScanPlan:
    """The launches of one operation for tensors of one set of shapes, strides, dtypes, alignments and one device."""

    def __init__(
        self,
        operation: Operation,
        inputs: Sequence[Tensor | None],
        outputs: list[Output],
        moments: bool,
        tile: Tile,
    ) -> None:
        given = [x for x in inputs if x is not None]
        rows = given[0]
        self.device, self.outputs, self.moments = rows.device, outputs, moments
        self.dtype = accumulate_dtype(operation, inputs[:-1])
        self.steps, self.envs = rows.shape
        tiles = -(-self.steps // (tile.runs * tile.length))
        self.chunk_tiles = min(tile.chunk_tiles or tiles, tiles)
        chunks = -(-tiles // self.chunk_tiles)
        grid = (-(-self.envs // tile.envs), chunks)

        build, finish, reverse = CONSTRUCTIONS[operation.name]
        accumulate = tl.float64 if self.dtype == torch.float64 else tl.float32
        wide = any(_extent(x) >= 2**31 for x in given)
        align = math.gcd(16, *(size for x in given if x.dim() == 3 for size in (*x.stride()[:2], x.shape[2])))
        shape = (
            tile.runs,
            tile.envs,
            tile.length,
            tile.stages,
            tile.actions,
            align,
            next_power(chunks),
            operation.advantages,
        )
        phases = (WHOLE,) if chunks == 1 else (SUMMARIZE, FINISH)
        self.launches = [
            _Launch(
                grid, (build, finish, reverse, phase.value, accumulate, wide, is_env_major(rows), *shape), tile.warps
            )
            for phase in phases
        ]
        self.strides = tuple(() if x is None else (*x.stride(), *x.shape[2:]) for x in inputs)
        self.output_strides: tuple[tuple[int, ...], ...] = ()

        size = self.dtype.itemsize
        self.maps_start = _Workspace.HEADER_BYTES + (next_power(3 * size * grid[0] * chunks) if moments else 0)
        maps_bytes = 2 * size * next_power(chunks) * self.envs if chunks > 1 else 0
        self.scratch_bytes = self.maps_start + maps_bytes if moments or chunks > 1 else 0

    def __call__(
        self,
        inputs: tuple[Tensor | None, ...],
        addresses: Sequence[int | None],
        gamma: float,
        coefficients: tuple[float, ...],
        out: Sequence[Tensor] | None,
    ) -> Sequence[Tensor]:
        """Launch on the current stream of the tensors' device."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(inputs, addresses, gamma, coefficients, out)
        results = allocate(cast(Tensor, inputs[0]), self.outputs) if out is None else out
        scalars = (gamma, *coefficients, *_UNUSED)[:5]
        if self.launches[0].compiled is None:
            self.output_strides = tuple(x.stride() for x in results)
            arguments = self._arguments(inputs, tuple(results), scalars, self._sections())
            for launch in self.launches:
                launch.first(arguments)
            return results
        stream = _current_stream(self.device)
        start = self._memory(stream).data_ptr() if self.scratch_bytes else 0
        sections = (start + _Workspace.HEADER_BYTES, start, start + self.maps_start)
        targets = tuple(x.data_ptr() for x in results)
        arguments = self._arguments(tuple(addresses[: len(inputs)]), targets, scalars, sections)
        for launch in self.launches:
            launch.again(stream, arguments)
        return results

    def compile(self, inputs: tuple[Tensor | None, ...]) -> list[Any]:
        """The compiled kernels for Triton's active target, without a launch; the tensors may be on ``meta``."""
        results = allocate(cast(Tensor, inputs[0]), self.outputs)
        self.output_strides = tuple(x.stride() for x in results)
        arguments = self._arguments(inputs, tuple(results), (1.0, *_UNUSED), self._sections())
        return [launch.compile(arguments) for launch in self.launches]

    def _arguments(
        self, inputs: tuple[Any, ...], results: tuple[Any, ...], scalars: tuple[float, ...], sections: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """What the kernel takes before its constants, as tensors or as addresses."""
        parts, counter, maps = sections
        moments = (results[-1], parts, counter) if self.moments else None
        gamma, *coefficients = scalars
        return (
            inputs[:-1], self.strides, results[:-1] if self.moments else results, self.output_strides,
            maps if len(self.launches) > 1 else None, moments, gamma, inputs[-1], *coefficients,
            self.steps, self.envs, self.chunk_tiles,
        )  # fmt: skip

    def _memory(self, stream: int) -> Tensor:
        return _Workspace.get(self.device, stream, self.scratch_bytes)

    def _sections(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The workspace's parts of moments, counter and maps as tensors."""
        if not self.scratch_bytes:
            return None, None, None
        stream = _current_stream(self.device) if self.device.type == "cuda" else 0
        memory = self._memory(stream)
        parts, counter, maps = memory[_Workspace.HEADER_BYTES :], memory[:4], memory[self.maps_start :]
        return parts.view(self.dtype), counter.view(torch.int32), maps.view(self.dtype)


def _current_stream(device: torch.device) -> int:
    active: Any = driver.active
    return active.get_current_stream(device.index)


def _extent(x: Tensor) -> int:
    """One more than the largest offset in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
