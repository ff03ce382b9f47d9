"""From a loss call to a backend."""

from __future__ import annotations

from torch import Tensor

from kernels import torch_loss
from kernels.loss_inputs import Coefficients, LossInputs, check, runs_triton
from kernels.operations import Backend


def solve(inputs: LossInputs, coefficients: Coefficients, backend: Backend) -> tuple[Tensor, Tensor]:
    """The differentiable total and the detached report ``[8]``.

    Raises:
        TypeError, ValueError: as `kernels.ppo_loss`.
    """
    check(inputs, coefficients)
    runs_triton(inputs, backend)
    return torch_loss.policy_loss(inputs, coefficients)
