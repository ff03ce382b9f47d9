"""Adam over one flat vector, with clipping, and steps that are withheld on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.step_guard import Decision

BETAS = (0.9, 0.999)


class Moments(NamedTuple):
    """What Adam keeps; float32, zeros before the first step."""

    first: Tensor  #: ``[P]``, decayed mean of the gradient
    second: Tensor  #: ``[P]``, decayed mean of its square
    steps: Tensor  #: scalar: steps taken


def sum_squares(gradient: Tensor, fused: bool = False) -> Tensor:
    """``[parts]`` float32, which sum to the squared norm of ``gradient`` ``[P]`` float32.

    Args:
        gradient: contiguous.
        fused: one Triton launch.
    """
    if fused:
        from kernels import triton_adam  # here, so that the package imports where Triton is not installed

        return triton_adam.sum_squares(gradient)
    return gradient.square().sum()[None]


def adam_step(
    parameters: Tensor, gradient: Tensor, moments: Moments, decision: Decision, eps: float, fused: bool = False
) -> None:
    """One step of Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1), in place; where it is withheld, no bit
    changes.

    With ``g = scale * gradient`` and t ``steps``, this one counted already (by `guard_step`):
    ``first = 0.9 first + 0.1 g``; ``second = 0.999 second + 0.001 g^2``;
    ``parameters -= lr * first / (1 - 0.9^t) / (sqrt(second / (1 - 0.999^t)) + eps)``.

    Args:
        parameters: ``[P]`` float32, contiguous as are all of this size.
        gradient: ``[P]`` float32.
        moments: of the steps before.
        decision: whether the step is taken, the gradient's scale, and the learning rate.
        eps: above 0.
        fused: one Triton launch instead of some twenty of torch.
    """
    if fused:
        from kernels import triton_adam

        triton_adam.adam_step(parameters, gradient, moments, decision, eps)
        return
    first, second, steps = moments
    taken = decision.withheld == 0
    gradient = torch.where(taken, gradient * decision.scale, 0.0)  # of a step that is withheld it may be NaN
    shares = [torch.where(taken, 1.0 - beta, 0.0) for beta in BETAS]
    corrections = [1.0 - beta ** steps.double().clamp(min=1.0) for beta in BETAS]
    first.lerp_(gradient, shares[0])
    second.lerp_(gradient.square(), shares[1])
    rate = torch.where(taken, decision.learning_rate / corrections[0], 0.0).float()
    parameters -= rate * first / ((second / corrections[1].float()).sqrt() + eps)
