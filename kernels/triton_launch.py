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
from kernels.triton_workspace import Workspaces

INTERPRETED = isinstance(scan_kernel, InterpretedFunction)
MAX_COEFFICIENTS = 4
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


class _Entry(NamedTuple):
    """A plan, and a compiled check whether tensors are described by its key."""

    matches: Callable[..., bool]
    plan: Plan


_plans: dict[tuple[Any, ...], _Entry] = {}
#: The last entry for each choice of operation, options and arguments given; tensors rarely change from call to call.
_recent: dict[tuple[Any, ...], _Entry] = {}


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
        described = inputs if out is None else (*inputs, *out)
        addresses = [0 if x is None else x.data_ptr() for x in described]
        given = [x for x in described if x is not None]
        choice = (operation.name, out_dtype, moments, *map(type, described))
        entry = _recent.get(choice)
        misaligned = functools.reduce(operator.or_, addresses) & 15
        if misaligned or entry is None or not entry.matches(*given):
            alignments = [address & 15 for address in addresses] if misaligned else []
            key = (*choice, *map(_FACTS, given), *[x.stride() for x in given], *alignments)
            entry = _plans.get(key)
            if entry is None:
                plan = prepare(operation, inputs, out, out_dtype, moments)
                entry = _plans[key] = _Entry(compiled_check(given), plan)
            if not misaligned:
                _recent[choice] = entry
    except (AttributeError, TypeError):
        check_tensors(operation, tensors, per_env)
        raise
    return entry.plan(inputs, addresses, number, coefficients, out)


def compiled_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether other tensors have the type, shape, strides, dtype and device of these, in C++ (a private part of torch).

    It may say no where it could say yes (one tensor given twice, another autograd mode): the slower key decides then.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        matches = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        matches(*tensors)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return lambda *_: False
    return matches


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


class ScanPlan:
    """The launch of one operation for tensors of one set of shapes, strides, dtypes, alignments and one device."""

    def __init__(self, operation: Operation, inputs: Inputs, outputs: list[Output], moments: bool, tile: Tile) -> None:
        given = [x for x in inputs if x is not None]
        rows = given[0]
        self.count = len(inputs)
        self.device, self.index = rows.device, rows.device.index if rows.is_cuda else None
        self.outputs, self.moments, self.warps = outputs, moments, tile.warps
        self.dtype = accumulate_dtype(operation, inputs[:-1])
        self.strides = tuple(() if x is None else (*x.stride(), *x.shape[2:]) for x in inputs)
        steps, envs = rows.shape
        blocks, tiles = -(-envs // tile.envs), -(-steps // (tile.runs * tile.length * tile.chunks))
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
            tile.chunks, tile.stages, tile.actions, align, operation.advantages,
        )  # fmt: skip
        self.unused = (1.0,) * (MAX_COEFFICIENTS - len(operation.coefficients))
        self.workspaces = Workspaces(self.programs, envs, tiles, self.dtype, self.device)
        self.compiled: Any = None
        self.kernel: tuple[Any, ...] = ()
        self.fixed: tuple[Any, ...] = ()
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
        if self.index is not None and torch.accelerator.current_device_index() != self.index:
            with torch.cuda.device(self.index):
                return self(inputs, addresses, gamma, coefficients, out)
        results = allocate(cast(Tensor, inputs[0]), self.outputs) if out is None else out
        if self.compiled is None:
            self._first(inputs, results, (gamma, *coefficients, *self.unused))
            return results
        stream = self.current_stream(self.index)
        *sources, gammas = addresses[: self.count]
        targets = addresses[self.count :] if out is not None else [x.data_ptr() for x in results]
        shared = self._shared(stream, targets) if self.shares else _NOTHING_SHARED
        self.compiled.run(
            self.programs, 1, 1, stream, *self.kernel, tuple(sources), tuple(targets), *shared, gammas,
            gamma, *coefficients, *self.fixed,
        )  # fmt: skip
        return results

    def compile(self, inputs: Inputs) -> Any:
        """The compiled kernel for Triton's active target, without a launch; the tensors may be on ``meta``."""
        results = allocate(cast(Tensor, inputs[0]), self.outputs)
        arguments = self._first_arguments(inputs, results, (1.0,) * (1 + MAX_COEFFICIENTS))
        return scan_kernel.warmup(*arguments, *self.constants, grid=(self.programs,), num_warps=self.warps)

    def _first(self, inputs: Inputs, results: Sequence[Tensor], scalars: tuple[float, ...]) -> None:
        """Compile for these tensors and launch; keep what later launches take (nothing in the interpreter)."""
        arguments = self._first_arguments(inputs, results, scalars)
        launch: Any = scan_kernel[(self.programs,)]
        compiled = launch(*arguments, *self.constants, num_warps=self.warps)
        if compiled is None:
            return
        self.compiled = compiled
        self.kernel = (compiled.function, compiled.packed_metadata, None, None, None)
        self.fixed = (*self.unused, *arguments[-6:], *self.constants)

    def _first_arguments(
        self, inputs: Inputs, results: Sequence[Tensor], scalars: tuple[float, ...]
    ) -> tuple[Any, ...]:
        """What the kernel takes before its constants, with tensors instead of addresses."""
        *sources, gammas = inputs
        shared, targets = _NOTHING_SHARED, list(results)
        if self.shares:
            shared = self._shared(self.current_stream(self.index), targets, addresses=False)
        output_strides = tuple(x.stride() for x in results)
        return (tuple(sources), tuple(targets), *shared, gammas, *scalars, self.strides, output_strides, *self.sizes)

    def _shared(self, stream: int, targets: list[Any], addresses: bool = True) -> tuple[Any, ...]:
        """Maps, flags and moments of a launch; takes the moments' result from the end of ``targets``."""
        capturing = self.index is not None and torch.cuda.is_current_stream_capturing()
        workspace = self.workspaces.get(stream, capturing)
        flags, counter, parts, maps = workspace.addresses if addresses else workspace.tensors
        moments = (targets.pop(), parts, counter) if self.moments else None
        return (maps, flags, moments) if self.split else (None, None, moments)


_NOTHING_SHARED = (None, None, None)


def _stream_getter() -> Callable[[int | None], int]:
    active: Any = driver.active
    return active.get_current_stream


def _extent(x: Tensor) -> int:
    """One more than the largest offset in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
