"""Launching the scan: what depends only on shapes, layouts and dtypes is done once and looked up on later calls.

A call costs a look-up and one launch of the compiled kernel. Nothing is allocated but outputs; moments and a split of
time over programs use a small workspace that each plan keeps for each stream.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

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
from kernels.triton_scan import scan_kernel
from kernels.triton_tiles import Tile, choose
from kernels.triton_traces import trace_rows
from kernels.triton_vtrace import vtrace_results, vtrace_rows

INTERPRETED = isinstance(scan_kernel, InterpretedFunction)
MAX_COEFFICIENTS = 4
#: Stands in for an argument that was not given, so that one key describes all of them.
ABSENT = torch.empty(0, 0, 0, dtype=torch.complex128)
_FACTS = operator.attrgetter("shape", "dtype", "device")


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

Inputs = Sequence[Tensor | None]


class Plan(Protocol):
    """All that a call needs to know beyond its tensors' addresses and its coefficients."""

    def __call__(
        self,
        inputs: Inputs,
        addresses: list[int],
        gamma: float,
        coefficients: tuple[float, ...],
        out: Sequence[Tensor] | None,
    ) -> Sequence[Tensor]:
        """Run the operation."""
        ...


_plans: dict[tuple[Any, ...], Plan] = {}


def solve(
    operation: Operation,
    tensors: Inputs,
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
    try:
        described = [ABSENT if x is None else x for x in (*inputs, *(() if out is None else out))]
        addresses = [x.data_ptr() for x in described]
        key = (operation.name, out_dtype, moments, *map(_FACTS, described), *[x.stride() for x in described])
    except (AttributeError, TypeError):
        check_tensors(operation, tensors, per_env)
        raise
    if functools.reduce(operator.or_, addresses) & 15:
        key = (*key, *[address & 15 for address in addresses])
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = prepare(operation, inputs, out, out_dtype, moments)
    return plan(inputs, addresses, number, coefficients, out)


def prepare(
    operation: Operation, inputs: Inputs, out: Sequence[Tensor] | None, out_dtype: torch.dtype | None, moments: bool
) -> Plan:
    """Check the arguments of a first call and decide everything about its launch."""
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

    def __call__(
        self,
        inputs: Inputs,
        addresses: list[int],
        gamma: float,
        coefficients: tuple[float, ...],
        out: Sequence[Tensor] | None,
    ) -> Sequence[Tensor]:
        *tensors, per_env = inputs
        discount = gamma if per_env is None else per_env
        return solve_torch(self.operation, tensors, discount, coefficients, "loop", out, self.out_dtype, self.moments)


class _Workspace:
    """What one stream's launches of one plan leave for each other, zeroed once: flags and a counter, parts, maps.

    Every launch raises all flags alike and leaves the counter at 0, so that launches need not reset anything.
    """

    def __init__(self, programs: int, envs: int, tiles: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = (4 * (programs + 1), 3 * programs * dtype.itemsize, 2 * tiles * envs * dtype.itemsize)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 16) * 16)
        self.memory = torch.zeros(starts.pop(), dtype=torch.uint8, device=device)
        flags, parts, maps = (self.memory[start:] for start in starts)
        flags = flags[: sizes[0]].view(torch.int32)
        #: flags, counter, parts, maps
        self.tensors = (flags[:-1], flags[-1:], parts.view(dtype), maps.view(dtype))
        self.addresses = tuple(x.data_ptr() for x in self.tensors)


class ScanPlan:
    """The launch of one operation for tensors of one set of shapes, strides, dtypes, alignments and one device."""

    def __init__(self, operation: Operation, inputs: Inputs, outputs: list[Output], moments: bool, tile: Tile) -> None:
        given = [x for x in inputs if x is not None]
        rows = given[0]
        self.device, self.index = rows.device, rows.device.index if rows.is_cuda else None
        self.outputs, self.moments, self.warps = outputs, moments, tile.warps
        self.dtype = accumulate_dtype(operation, inputs[:-1])
        self.strides = tuple(() if x is None else (*x.stride(), *x.shape[2:]) for x in inputs)
        self.output_strides: tuple[tuple[int, ...], ...] = ()
        steps, envs = rows.shape
        blocks, tiles = -(-envs // tile.envs), -(-steps // (tile.runs * tile.length))
        self.split = tile.split and tiles > 1
        self.shares = self.split or moments  # needs memory beside inputs and outputs
        self.sizes = (steps, envs, blocks, tiles)
        self.programs = blocks * tiles if self.split else blocks

        build, finish, reverse = CONSTRUCTIONS[operation.name]
        accumulate = tl.float64 if self.dtype == torch.float64 else tl.float32
        wide = any(_extent(x) >= 2**31 for x in given)
        align = math.gcd(16, *(size for x in given if x.dim() == 3 for size in (*x.stride()[:2], x.shape[2])))
        self.constants = (
            build, finish, reverse, accumulate, wide, is_env_major(rows), tile.runs, tile.envs, tile.length, self.split,
            tile.stages, tile.actions, align, operation.advantages,
        )  # fmt: skip
        self.unused = (1.0,) * (MAX_COEFFICIENTS - len(operation.coefficients))
        self.workspaces: dict[int, _Workspace] = {}
        self.compiled: Any = None
        self.current_stream = _stream_getter() if rows.is_cuda else (lambda _: 0)

    def __call__(
        self,
        inputs: Inputs,
        addresses: list[int],
        gamma: float,
        coefficients: tuple[float, ...],
        out: Sequence[Tensor] | None,
    ) -> Sequence[Tensor]:
        """Launch on the current stream of the tensors' device."""
        if self.index is not None and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(inputs, addresses, gamma, coefficients, out)
        results = allocate(cast(Tensor, inputs[0]), self.outputs) if out is None else out
        scalars = (gamma, *coefficients, *self.unused)
        kernel = self.compiled
        if kernel is None:
            self._first(inputs, results, scalars)
            return results
        stream = self.current_stream(self.index)
        count = len(inputs)
        targets = [x.data_ptr() for x in results] if out is None else addresses[count:]
        workspace = self._workspace(stream).addresses if self.shares else _NO_WORKSPACE
        kernel.run(
            self.programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *self._arguments(tuple(addresses[:count]), tuple(targets), scalars, workspace), *self.constants,
        )  # fmt: skip
        return results

    def compile(self, inputs: Inputs) -> Any:
        """The compiled kernel for Triton's active target, without a launch; the tensors may be on ``meta``."""
        results = allocate(cast(Tensor, inputs[0]), self.outputs)
        arguments = self._tensor_arguments(inputs, results, (1.0,) * (1 + MAX_COEFFICIENTS))
        return scan_kernel.warmup(*arguments, *self.constants, grid=(self.programs,), num_warps=self.warps)

    def _first(self, inputs: Inputs, results: Sequence[Tensor], scalars: tuple[float, ...]) -> None:
        """Compile for these tensors and launch; the interpreter leaves nothing to keep."""
        launch: Any = scan_kernel[(self.programs,)]
        arguments = self._tensor_arguments(inputs, results, scalars)
        self.compiled = launch(*arguments, *self.constants, num_warps=self.warps)

    def _tensor_arguments(
        self, inputs: Inputs, results: Sequence[Tensor], scalars: tuple[float, ...]
    ) -> tuple[Any, ...]:
        self.output_strides = tuple(x.stride() for x in results)
        workspace = self._workspace(self.current_stream(self.index)).tensors if self.shares else _NO_WORKSPACE
        return self._arguments(tuple(inputs), tuple(results), scalars, workspace)

    def _arguments(
        self, inputs: tuple[Any, ...], results: tuple[Any, ...], scalars: tuple[float, ...], workspace: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """What the kernel takes before its constants, as tensors or as addresses."""
        flags, counter, parts, maps = workspace
        moments = None
        if self.moments:
            moments, results = (results[-1], parts, counter), results[:-1]
        if not self.split:
            maps = flags = None
        return (
            inputs[:-1], self.strides, results, self.output_strides, maps, flags, moments, inputs[-1],
            *scalars, *self.sizes,
        )  # fmt: skip

    def _workspace(self, stream: int) -> _Workspace:
        """The stream's own; a captured graph gets a new one, as it may be replayed beside other streams."""
        _, envs, _, tiles = self.sizes
        if self.index is not None and torch.cuda.is_current_stream_capturing():
            return _Workspace(self.programs, envs, tiles, self.dtype, self.device)
        if stream not in self.workspaces:
            self.workspaces[stream] = _Workspace(self.programs, envs, tiles, self.dtype, self.device)
        return self.workspaces[stream]


_NO_WORKSPACE = (None, None, None, None)


def _stream_getter() -> Callable[[int | None], int]:
    active: Any = driver.active
    return active.get_current_stream


def _extent(x: Tensor) -> int:
    """One more than the largest offset in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
