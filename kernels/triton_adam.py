"""Adam's two launches: the gradient's squares, and the step."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adam import BETAS, Moments
from kernels.step_guard import Decision
from kernels.triton_call import Launch, run

_BLOCK = 1024
_MAX_PARTS = 256


@triton.jit
def squares_kernel(gradient, parts, P, BLOCK: tl.constexpr):
    """Each program's share of the sum of squares."""
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(first, P, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        values = tl.load(gradient + index, mask=index < P, other=0.0)
        total += values * values
    tl.store(parts + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def adam_kernel(
    parameters, gradient, first, second, steps, withheld, scale, learning_rate, P, eps, BETA1: tl.constexpr,
    BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kernels.adam.adam_step` of a tile."""
    if tl.load(withheld) == 0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < P
        g = tl.load(gradient + index, mask=inside, other=0.0) * tl.load(scale)
        mean = tl.load(first + index, mask=inside, other=0.0)
        square = tl.load(second + index, mask=inside, other=0.0)
        mean += (g - mean) * (1.0 - BETA1)
        square += (g * g - square) * (1.0 - BETA2)
        # float64: after few steps beta^t is close to 1
        t = tl.load(steps).to(tl.float64)
        rate = (tl.load(learning_rate) / (1.0 - tl.exp(t * LOG_BETA1))).to(tl.float32)
        correction = (1.0 - tl.exp(t * LOG_BETA2)).to(tl.float32)
        value = tl.load(parameters + index, mask=inside, other=0.0)
        value -= rate * mean / (tl.sqrt(square / correction) + eps)
        tl.store(first + index, mean, mask=inside)
        tl.store(second + index, square, mask=inside)
        tl.store(parameters + index, value, mask=inside)


def squares_launch(gradient: Tensor) -> tuple[Tensor, Launch]:
    """The parts and what fills them."""
    size = len(gradient)
    programs = min(_MAX_PARTS, max(1, -(-size // _BLOCK)))
    parts = gradient.new_empty(programs, dtype=torch.float32)
    return parts, Launch(squares_kernel, (programs,), (gradient, parts, size), {"BLOCK": _BLOCK})


def adam_launch(parameters: Tensor, gradient: Tensor, moments: Moments, decision: Decision, eps: float) -> Launch:
    """The step."""
    size = len(parameters)
    constants = {
        "BETA1": BETAS[0], "BETA2": BETAS[1], "LOG_BETA1": math.log(BETAS[0]), "LOG_BETA2": math.log(BETAS[1]),
        "BLOCK": _BLOCK,
    }  # fmt: skip
    arguments = (parameters, gradient, *moments, *decision, size, eps)
    return Launch(adam_kernel, (-(-size // _BLOCK),), arguments, constants)


def sum_squares(gradient: Tensor) -> Tensor:
    """`kernels.adam.sum_squares` on the tensor's device."""
    parts, launch = squares_launch(gradient)
    run([launch], gradient.device)
    return parts


def adam_step(parameters: Tensor, gradient: Tensor, moments: Moments, decision: Decision, eps: float) -> None:
    """`kernels.adam.adam_step` on the tensors' device."""
    run([adam_launch(parameters, gradient, moments, decision, eps)], parameters.device)
