"""Launching the loss kernels: tile, strides, outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.loss_inputs import MAX_ACTIONS, REPORTED, Coefficients, LossInputs
from kernels.operations import describe
from kernels.triton_call import Launch, run
from kernels.triton_loss import PARTS, backward_kernel, finish_kernel, forward_kernel
from kernels.triton_tiles import next_power

INTERPRETED = isinstance(forward_kernel, InterpretedFunction)
_CELLS = 2048  # of a tile: rows times padded columns
_FINISH_BLOCK = 512


def check_runs(inputs: LossInputs) -> None:
    """Refuse what the kernels cannot take.

    Raises:
        TypeError: a float64 input.
        ValueError: not on CUDA, or too many actions.
    """
    outputs = inputs.policy_outputs
    if not (outputs.is_cuda or INTERPRETED):
        raise ValueError(
            f"backend: 'triton' needs CUDA tensors, got policy_outputs of {describe(outputs)}; use 'torch' or 'auto'"
        )
    if outputs.dtype == torch.float64:
        raise TypeError("backend: 'triton' sums in float32, got policy_outputs of float64; use 'torch' or 'auto'")
    if outputs.shape[1] > MAX_ACTIONS:
        raise ValueError(f"backend: 'triton' takes up to {MAX_ACTIONS} actions, got {outputs.shape[1]}; use 'torch'")


def forward(inputs: LossInputs, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The total and the report ``[8]``."""
    (total, report), launches = forward_launches(inputs, coefficients)
    run(launches, inputs.policy_outputs.device)
    return total, report


def backward(
    gradient: Tensor, report: Tensor, inputs: LossInputs, coefficients: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of outputs, values and log-std (empty without one)."""
    (outputs, values, parts), launches = backward_launches(gradient, report, inputs, coefficients)
    run(launches, inputs.policy_outputs.device)
    log_std = parts.sum(1)
    return outputs, values, log_std if inputs.log_std is None else log_std.to(inputs.log_std.dtype)


def forward_launches(inputs: LossInputs, coefficients: Coefficients) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    """Total and report, and what fills them."""
    programs, constants = _tile(inputs)
    outputs = inputs.policy_outputs
    parts = outputs.new_empty((PARTS.value, programs), dtype=torch.float32)
    total, report = parts.new_empty(()), parts.new_empty(len(REPORTED))
    scalars = _scalars(coefficients)
    sums = (inputs, _strides(inputs), *scalars[:2], parts, len(outputs))
    joined = (parts, programs, inputs.row_count, *scalars[2:], total, report)
    return (total, report), [
        Launch(forward_kernel, (programs,), sums, constants),
        Launch(finish_kernel, (1,), joined, {"BLOCK": _FINISH_BLOCK}),
    ]


def backward_launches(
    gradient: Tensor, report: Tensor, inputs: LossInputs, coefficients: Coefficients
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Launch]]:
    """Gradients of outputs, values and log-std, whose share of each program is a column, and what fills them."""
    programs, constants = _tile(inputs)
    outputs = inputs.policy_outputs
    gradients = (
        torch.empty_like(outputs, memory_format=torch.contiguous_format),
        torch.empty_like(inputs.state_values, memory_format=torch.contiguous_format),
        outputs.new_empty((0 if inputs.log_std is None else outputs.shape[1], programs), dtype=torch.float32),
    )
    arguments = (
        inputs, _strides(inputs), *_scalars(coefficients), gradient, report[-1:], *gradients, len(outputs),
    )  # fmt: skip
    return gradients, [Launch(backward_kernel, (programs,), arguments, constants)]


def _tile(inputs: LossInputs) -> tuple[int, dict[str, int]]:
    """How many programs, and the constants that depend on shapes and strides."""
    batch, actions = inputs.policy_outputs.shape
    columns = next_power(actions)
    block = max(1, min(256, _CELLS // columns))
    constants = {
        "A": actions, "BLOCK": block, "COLUMNS": columns,
        "OUTPUT_ROW": inputs.policy_outputs.stride(0), "ACTION_ROW": inputs.actions.stride(0),
    }  # fmt: skip
    return max(1, -(-batch // block)), constants


def _strides(inputs: LossInputs) -> Any:
    return LossInputs(*(() if x is None else x.stride() for x in inputs))  # pyright: ignore[reportArgumentType]


def _scalars(coefficients: Coefficients) -> tuple[Tensor | float, ...]:
    return tuple(x if isinstance(x, Tensor) else float(x or 0.0) for x in coefficients)
