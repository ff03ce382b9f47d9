"""Launching the scan: what depends only on shapes, layouts and dtypes is done once and looked up on later calls.

A call costs a look-up and one launch of the compiled kernel. Nothing is allocated but outputs; moments and a split of
time over programs use a small workspace that each plan keeps for each stream.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._dynamo import guards
from triton.runtime.interpreter import InterpretedFunction

from kernels.operations import Operation, check_tensors, describe
from kernels.outputs import check_memory, check_out, output_specs
from kernels.triton_plan import EmptyPlan, Inputs, Plan, ScanPlan, is_env_major
from kernels.triton_scan import scan_kernel
from kernels.triton_tiles import choose

INTERPRETED = isinstance(scan_kernel, InterpretedFunction)
_FACTS = operator.attrgetter("shape", "dtype", "device")


class _Entry(NamedTuple):
    """A plan, and what sees quickly whether a call's arguments are described by its key."""

    given: Callable[[Sequence[Any]], tuple[Any, ...]]  #: picks the arguments that were given
    absent: Callable[[Sequence[Any]], Any]  #: picks those that were not
    nothing: Any  #: what `absent` picks then
    matches: Callable[..., bool]
    plan: Plan

    def addresses(self, described: Sequence[Any]) -> list[int] | None:
        """Those of the given arguments and a 0, or None where it takes the whole key to tell."""
        if self.absent(described) != self.nothing:
            return None
        given = self.given(described)
        if not self.matches(*given):
            return None
        addresses = [*map(Tensor.data_ptr, given), 0]
        return None if functools.reduce(operator.or_, addresses) & 15 else addresses


_plans: dict[tuple[Any, ...], _Entry] = {}
#: The last entry for each choice of operation and options; tensors rarely change from call to call.
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
    described = inputs if out is None else (*inputs, *out)
    options = (operation.name, out_dtype, moments, len(described))
    entry = _recent.get(options)
    addresses = None if entry is None else entry.addresses(described)
    if entry is None or addresses is None:
        entry, addresses = _find(operation, inputs, out, options, described)
    return entry.plan(inputs, addresses, number, coefficients, out)


def _find(
    operation: Operation,
    inputs: Inputs,
    out: Sequence[Tensor] | None,
    options: tuple[Any, ...],
    described: Sequence[Any],
) -> tuple[_Entry, list[int]]:
    """The entry of the whole key, made where there is none yet, and the addresses of the given arguments and a 0."""
    given = [x for x in described if x is not None]
    try:
        addresses = [*map(Tensor.data_ptr, given), 0]
        alignments = tuple(address & 15 for address in addresses)
        negated = tuple(map(Tensor.is_neg, given))
        key = (*options, *map(type, described), *map(_FACTS, given), *[x.stride() for x in given], negated, alignments)
    except (AttributeError, TypeError, RuntimeError):
        check_tensors(operation, inputs[:-1], inputs[-1])
        raise
    entry = _plans.get(key)
    if entry is None:
        _, out_dtype, moments, _ = options
        plan = prepare(operation, inputs, out, out_dtype, moments)
        ranks = range(len(described))
        pick_given = operator.itemgetter(*(rank for rank in ranks if described[rank] is not None))
        pick_absent = operator.itemgetter(*([rank for rank in ranks if described[rank] is None] or [slice(0)]))
        entry = _Entry(pick_given, pick_absent, pick_absent(described), compiled_check(given), plan)
        _plans[key] = entry
    if out is not None:  # a tensor that is given twice comes here every time, see `compiled_check`; views of one do not
        check_memory(out, inputs)
    if not any(alignments):
        _recent[options] = entry
    return entry, addresses


def compiled_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether other tensors have the type, shape, strides, dtype and device of these, in C++ (a private part of torch).

    It may say no where it could say yes (one tensor given twice, another autograd mode): the slower key decides then.
    """
    try:
        matches = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        matches(*tensors)
    except (AttributeError, TypeError, ValueError, RuntimeError):
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
        return EmptyPlan(operation, out_dtype, moments)
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{operation.name}: the first call with these shapes compiles its kernel, which a CUDA graph capture "
            "does not allow; call it once before the capture"
        )
    steps, envs = rows.shape
    actions = max((x.shape[2] for x in tensors if x is not None and x.dim() == 3), default=0)
    tile = choose(operation.name, steps, envs, is_env_major(rows), rows.dtype.itemsize, actions)
    return ScanPlan(operation, inputs, outputs, moments, tile, out)
