"""Plans: all that a launch of one operation needs to know beyond its tensors' addresses and its coefficients."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import triton.language as tl
from torch import Tensor
from torch._C._dynamo import guards
from triton.runtime import driver

from kernels.dispatch import solve_torch
from kernels.operations import Operation
from kernels.outputs import Output, accumulate_dtype, allocate
from kernels.triton_gae import gae_results, gae_rows
from kernels.triton_retrace import retrace_categorical_rows, retrace_results, retrace_rows
from kernels.triton_returns import discounted_rows, state_results, td_lambda_rows
from kernels.triton_scan import scan_kernel
from kernels.triton_tiles import Tile
from kernels.triton_traces import trace_rows
from kernels.triton_vtrace import vtrace_results, vtrace_rows
from kernels.triton_workspace import Workspaces

MAX_COEFFICIENTS = 4
#: Words and moments of a launch that needs none.
NOTHING_SHARED = (None, None)


def _empty_on_gpu(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


#: What the code that `torch.compile` generates allocates with: 1 us instead of 2, but a private part of torch.
_empty_strided: Callable[..., Tensor] = getattr(guards, "_empty_strided_cuda", _empty_on_gpu)


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


class EmptyPlan(NamedTuple):
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
        """The empty outputs; nothing is launched."""
        *tensors, per_env = inputs
        discount = gamma if per_env is None else per_env
        return solve_torch(self.operation, tensors, discount, coefficients, "loop", out, self.out_dtype, self.moments)


def is_env_major(rows: Tensor) -> bool:
    """Whether the steps of one env lie next to each other."""
    return rows.stride(0) == 1 and (rows.shape[1] == 1 or rows.stride(1) != 1)


class ScanPlan:
    """The launch of one operation for tensors of one set of shapes, strides, dtypes, alignments and one device."""

    def __init__(
        self,
        operation: Operation,
        inputs: Inputs,
        outputs: list[Output],
        moments: bool,
        tile: Tile,
        out: Sequence[Tensor] | None = None,
    ) -> None:
        given = [x for x in inputs if x is not None]
        rows = given[0]
        self.given = len(given)
        ranks = itertools.accumulate((x is not None for x in inputs), initial=0)
        #: the address of every argument from those of the given ones, the last of which is 0 for all others
        self.sources = operator.itemgetter(*(-1 if x is None else rank for x, rank in zip(inputs, ranks, strict=False)))
        self.device, self.index = rows.device, rows.device.index if rows.is_cuda else None
        self.may_switch = rows.is_cuda and torch.cuda.device_count() > 1
        self.outputs, self.moments, self.warps = outputs, moments, tile.warps
        self.dtype = accumulate_dtype(operation, inputs[:-1])
        self.strides = tuple(() if x is None else x.stride() for x in inputs)
        steps, envs = rows.shape
        blocks, tiles = -(-envs // tile.envs), -(-steps // (tile.runs * tile.length * tile.chunks))
        self.split = tile.split and tiles > 1
        self.shares = self.split or moments  # needs memory beside inputs and outputs
        self.sizes = (steps, envs, blocks, tiles)
        self.programs = blocks * tiles if self.split else blocks

        build, finish, reverse = CONSTRUCTIONS[operation.name]
        accumulate = tl.float64 if self.dtype == torch.float64 else tl.float32
        # Results that are allocated lie densely.
        wide = max(rows.numel(), *map(_extent, (*given, *(out or ())))) >= 2**31
        actions = max((x.shape[2] for x in given if x.dim() == 3), default=0)
        align = math.gcd(16, *(size for x in given if x.dim() == 3 for size in (*x.stride()[:2], x.shape[2])))
        self.constants = (
            build, finish, reverse, accumulate, wide, is_env_major(rows), tile.runs, tile.envs, tile.length, self.split,
            tile.chunks, tile.stages, tile.actions, tile.group, actions, align, operation.advantages,
        )  # fmt: skip
        self.unused = (1.0,) * (MAX_COEFFICIENTS - len(operation.coefficients))
        self.workspaces = Workspaces(self.programs, envs, tiles, self.dtype, self.device)
        self.compiled: Any = None
        self.run: Any = None
        self.results: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
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
        if self.may_switch and torch.accelerator.current_device_index() != self.index:
            with torch.cuda.device(self.index):
                return self(inputs, addresses, gamma, coefficients, out)
        if self.compiled is None:
            results = allocate(cast(Tensor, inputs[0]), self.outputs) if out is None else out
            self._first(inputs, results, (gamma, *coefficients, *self.unused))
            return results
        stream = self.current_stream(self.index)
        results = [_empty_strided(*metadata) for metadata in self.results] if out is None else out
        targets = addresses[self.given : -1] if out is not None else [x.data_ptr() for x in results]
        shared = self._shared(stream, targets) if self.shares else NOTHING_SHARED
        self.run(
            self.programs, 1, 1, stream, *self.kernel, self.sources(addresses), tuple(targets), *shared,
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
        self.run, self.kernel = _launcher(compiled, self.current_stream(self.index), (*arguments, *self.constants))
        self.results = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        self.fixed = (*self.unused, *arguments[-6:], *self.constants)

    def _first_arguments(
        self, inputs: Inputs, results: Sequence[Tensor], scalars: tuple[float, ...]
    ) -> tuple[Any, ...]:
        """What the kernel takes before its constants, with tensors instead of addresses."""
        shared, targets = NOTHING_SHARED, list(results)
        if self.shares:
            shared = self._shared(self.current_stream(self.index), targets, addresses=False)
        output_strides = tuple(x.stride() for x in results)
        return (tuple(inputs), tuple(targets), *shared, *scalars, self.strides, output_strides, *self.sizes)

    def _shared(self, stream: int, targets: list[Any], addresses: bool = True) -> tuple[Any, ...]:
        """Words and moments of a launch; takes the moments' result from the end of ``targets``."""
        capturing = self.index is not None and torch.cuda.is_current_stream_capturing()
        workspace = self.workspaces.get(stream, capturing)
        counter, parts, words = workspace.addresses if addresses else workspace.tensors
        moments = (targets.pop(), parts, counter) if self.moments else None
        return (words if self.split else None, moments)


def _launcher(compiled: Any, stream: int, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What launches the kernel, and what it takes between the stream and the arguments.

    Triton's C function, a private part of it, if an empty grid shows that it takes them so, or the Python around it.
    """
    run, metadata = compiled.run, (compiled.packed_metadata, None, None, None)
    try:
        direct = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata)
        run.launch(0, 1, 1, stream, *direct, *arguments)
    except (AttributeError, TypeError):
        return run, (compiled.function, *metadata)
    return run.launch, direct


def _stream_getter() -> Callable[[int | None], int]:
    active: Any = driver.active
    return active.get_current_stream


def _extent(x: Tensor) -> int:
    """One more than the largest offset in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
