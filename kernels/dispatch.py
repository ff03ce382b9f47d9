"""From a public call to a backend: the choice, the plain torch path, and the operators that `torch.compile` sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn, cast, get_args

import torch
from torch import Tensor

from kernels import torch_backend
from kernels.backends import HAS_TRITON, require_triton
from kernels.operations import (
    OPERATIONS,
    Backend,
    Operation,
    TorchMode,
    check_coefficients,
    check_tensors,
)
from kernels.outputs import allocate, check_memory, check_out, output_specs

Out = Sequence[Tensor] | None

_BACKENDS, _TORCH_MODES = get_args(Backend), get_args(TorchMode)


def solve(
    operation: Operation,
    tensors: Sequence[Tensor | None],
    gamma: float | Tensor,
    coefficients: tuple[float, ...],
    backend: Backend,
    torch_mode: TorchMode,
    out: Out,
    out_dtype: torch.dtype | None,
    moments: bool = False,
) -> Sequence[Tensor]:
    """Run one operation on the chosen backend and return its outputs in the order of `Operation.outputs`.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: an argument of the wrong shape, device or range, or a backend that is unknown or cannot run here.
    """
    check_coefficients(operation, gamma, coefficients)
    if backend not in _BACKENDS or torch_mode not in _TORCH_MODES:
        _refuse_choice(backend, torch_mode)
    if torch.compiler.is_compiling():
        return _call_operator(operation, tensors, gamma, coefficients, backend, torch_mode, out, out_dtype, moments)
    if backend == "triton" or (backend == "auto" and _runs_triton(tensors[0])):
        return _triton_solve()(operation, tensors, gamma, coefficients, out, out_dtype, moments)
    return solve_torch(operation, tensors, gamma, coefficients, torch_mode, out, out_dtype, moments)


@functools.cache
def _triton_solve() -> Callable[..., Sequence[Tensor]]:
    require_triton()
    from kernels.triton_launch import solve  # here, so that the package imports where Triton is not installed

    return solve


def _runs_triton(rows: Tensor | None) -> bool:
    return isinstance(rows, Tensor) and rows.is_cuda and HAS_TRITON


def _refuse_choice(backend: object, torch_mode: object) -> NoReturn:
    name, value, choices = ("torch_mode", torch_mode, _TORCH_MODES)
    if backend not in _BACKENDS:
        name, value, choices = ("backend", backend, _BACKENDS)
    raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def solve_torch(
    operation: Operation,
    tensors: Sequence[Tensor | None],
    gamma: float | Tensor,
    coefficients: tuple[float, ...],
    torch_mode: TorchMode,
    out: Out,
    out_dtype: torch.dtype | None,
    moments: bool,
) -> Sequence[Tensor]:
    """Check the tensors and run the operation in plain torch."""
    check_tensors(operation, tensors, gamma)
    outputs = output_specs(operation, tensors, out_dtype, moments)
    rows = cast(Tensor, tensors[0])
    if out is not None:
        check_out(out, outputs, rows.device)
        check_memory(out, tensors)
    named = {argument.name: x for argument, x in zip(operation.arguments[1:], tensors[1:], strict=True)}
    scalars: dict[str, float | Tensor] = {
        name: value for (name, _), value in zip(operation.coefficients, coefficients, strict=True)
    }
    if operation.has_gamma:
        scalars["gamma"] = gamma
    results = getattr(torch_backend, operation.name)(rows, **named, **scalars, mode=torch_mode)
    results = list(results) if isinstance(results, tuple) else [results]
    if moments and operation.advantages is not None:
        results.append(torch_backend.masked_moments(results[operation.advantages], named["valid"]))
    if out is None:
        return [result.to(output.dtype) for result, output in zip(results, outputs, strict=True)]
    for target, result in zip(out, results, strict=True):
        target.copy_(result)
    return out


# --- operators ------------------------------------------------------------------------------------------------------

_OPTIONS = (
    "Tensor? gamma_per_env, float gamma, float[] coefficients, str backend, str torch_mode, ScalarType? out_dtype, "
    "bool moments"
)


def _call_operator(
    operation: Operation,
    tensors: Sequence[Tensor | None],
    gamma: float | Tensor,
    coefficients: tuple[float, ...],
    backend: Backend,
    torch_mode: TorchMode,
    out: Out,
    out_dtype: torch.dtype | None,
    moments: bool,
) -> Sequence[Tensor]:
    """The same call through ``torch.ops.rollscan``, which a compiled graph holds as one node."""
    constants = [None if x is None else x.detach() for x in tensors]
    per_env, number = (gamma, 0.0) if isinstance(gamma, Tensor) else (None, gamma)
    operator = getattr(torch.ops.rollscan, operation.name)
    results = operator(*constants, per_env, number, list(coefficients), backend, torch_mode, out_dtype, moments)
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        target.copy_(result)
    return out


def _register(operation: Operation) -> None:
    count = len(operation.arguments)
    arguments = ", ".join(f"Tensor{'?' if x.optional else ''} {x.name}" for x in operation.arguments)
    name = f"rollscan::{operation.name}"
    torch.library.define(name, f"({arguments}, {_OPTIONS}) -> Tensor[]")

    def run(*args):
        per_env, number, coefficients, backend, torch_mode, out_dtype, moments = args[count:]
        gamma = number if per_env is None else per_env
        options = (tuple(coefficients), backend, torch_mode, None, out_dtype, moments)
        return list(solve(operation, args[:count], gamma, *options))

    def fake(*args):
        per_env, _, _, _, _, out_dtype, moments = args[count:]
        tensors = args[:count]
        check_tensors(operation, tensors, per_env)
        return allocate(tensors[0], output_specs(operation, tensors, out_dtype, moments))

    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)


for _operation in OPERATIONS:
    _register(_operation)
