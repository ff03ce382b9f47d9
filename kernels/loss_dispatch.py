"""From a loss call to a backend, and the operators that `torch.compile` sees in place of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import torch_loss
from kernels.backends import runs_triton
from kernels.loss_inputs import REPORTED, Coefficients, LossInputs, check
from kernels.operations import Backend

_TENSORS = len(LossInputs._fields)
#: Inputs that gradients flow to: outputs, values, log-std.
_DIFFERENTIABLE = 3
_ARGUMENTS = (
    "Tensor policy_outputs, Tensor values, Tensor? log_std, Tensor actions, Tensor advantages, Tensor value_targets, "
    "Tensor? old_log_probs, Tensor? old_values, Tensor? valid, Tensor? indices, Tensor? row_count, "
    "Tensor? advantage_moments, Tensor? clip_range, Tensor? value_clip_range, Tensor? value_coef, "
    "Tensor? entropy_coef, float[] numbers"
)


def solve(inputs: LossInputs, coefficients: Coefficients, backend: Backend) -> tuple[Tensor, Tensor]:
    """The differentiable total and the detached report ``[8]``.

    Raises:
        TypeError, ValueError: as `kernels.ppo_loss`.
    """
    check(inputs, coefficients)
    outputs = inputs.policy_outputs
    if not runs_triton(backend, outputs.is_cuda and outputs.dtype != torch.float64):
        return torch_loss.policy_loss(inputs, coefficients)
    if coefficients.value_clip_range is None:
        inputs, coefficients = inputs._replace(old_values=None), coefficients._replace(value_clip_range=0.0)
    constants = [None if x is None else x.detach() for x in inputs[_DIFFERENTIABLE:]]
    scalars = [x if isinstance(x, Tensor) else None for x in coefficients]
    numbers = [0.0 if isinstance(x, Tensor) else float(x or 0.0) for x in coefficients]
    total, report = torch.ops.rollscan.policy_loss(*inputs[:_DIFFERENTIABLE], *constants, *scalars, numbers)
    return total, report.detach()


def _unpack(arguments: tuple[Any, ...]) -> tuple[LossInputs, Coefficients]:
    *tensors, numbers = arguments
    pairs = zip(tensors[_TENSORS:], numbers, strict=True)
    return LossInputs(*tensors[:_TENSORS]), Coefficients(*(x if number is None else number for number, x in pairs))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from kernels import triton_loss_launch  # here, so that the package imports where Triton is not installed

    inputs, coefficients = _unpack(arguments)
    triton_loss_launch.check_runs(inputs)
    return triton_loss_launch.forward(inputs, coefficients)


def _backward(gradient: Tensor, report: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from kernels import triton_loss_launch

    return triton_loss_launch.backward(gradient, report, *_unpack(arguments))


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    outputs = arguments[0]
    return outputs.new_empty((), dtype=torch.float32), outputs.new_empty(len(REPORTED), dtype=torch.float32)


def _fake_backward(gradient: Tensor, report: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    outputs, values, log_std = arguments[:_DIFFERENTIABLE]
    like = torch.contiguous_format
    log_std_gradient = report.new_empty(0) if log_std is None else torch.empty_like(log_std, memory_format=like)
    return torch.empty_like(outputs, memory_format=like), torch.empty_like(values, memory_format=like), log_std_gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.numbers = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)  # nothing descends the report: no zeros for it


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    report, *tensors = ctx.saved_tensors
    outputs, values, log_std = torch.ops.rollscan.policy_loss_backward(gradient, report, *tensors, ctx.numbers)
    has_log_std = tensors[_DIFFERENTIABLE - 1] is not None
    return outputs, values, log_std if has_log_std else None, *[None] * (len(tensors) - _DIFFERENTIABLE + 1)


def _register(name: str, schema: str, run: Any, fake: Any) -> None:
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)


_register("rollscan::policy_loss", f"({_ARGUMENTS}) -> (Tensor, Tensor)", _forward, _fake_forward)
_register(
    "rollscan::policy_loss_backward",
    f"(Tensor gradient, Tensor report, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd("rollscan::policy_loss", _differentiate, setup_context=_save)
