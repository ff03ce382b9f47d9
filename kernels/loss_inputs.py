"""What the two policy losses take, stated once, and the refusals that follow from it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.operations import FLAGS, FLOATS, GAMMAS, INTEGERS, Argument, check_number, check_tensor, describe

Scalar = float | Tensor
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
MAX_ACTIONS = 4096  #: of the fused loss: a row's columns lie in one tile
#: What a loss reports, in this order. All but the last two sum over ranks; V-trace reports all but the first two.
REPORTED = (
    "approx_kl", "clip_fraction", "total", "policy", "value", "entropy", "explained_variance", "row_count",
)  # fmt: skip


class LossInputs(NamedTuple):
    """The tensors of a loss over B rows. With ``indices`` the rollout's fields have R rows of which B are taken, else R
    is B; PPO is the loss with ``old_log_probs``, V-trace the one without."""

    policy_outputs: Tensor  #: ``[B, A]``: means, or logits where ``log_std`` is None
    state_values: Tensor  #: ``[B]``
    log_std: Tensor | None  #: ``[A]``
    actions: Tensor  #: ``[R, A]``, or ``[R]`` integers where ``log_std`` is None
    advantages: Tensor  #: ``[R]``
    value_targets: Tensor  #: ``[R]``
    old_log_probs: Tensor | None  #: ``[R]``
    old_values: Tensor | None  #: ``[R]``
    valid: Tensor | None  #: ``[R]`` flags
    indices: Tensor | None  #: ``[B]`` integers
    row_count: Tensor | None  #: scalar
    advantage_moments: Tensor | None  #: ``[3]``


class Coefficients(NamedTuple):
    """The numbers of a loss, each a float or a scalar tensor on the device, which a captured graph reads anew."""

    clip_range: Scalar
    value_clip_range: Scalar | None
    value_coef: Scalar
    entropy_coef: Scalar


def check(inputs: LossInputs, coefficients: Coefficients) -> None:
    """Refuse arguments whose kind, dtype, shape, device or range is not what the losses take.

    Raises:
        TypeError: not a tensor or number, or of a dtype that the argument cannot have.
        ValueError: of another shape, on another device, or out of range.
    """
    device = inputs.policy_outputs.device if isinstance(inputs.policy_outputs, Tensor) else None
    sizes = {"M": 3}
    for argument, tensor in zip(_arguments(inputs), inputs, strict=True):
        if tensor is None and argument.optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument.name}: expected a tensor, got {describe(tensor)}")
        check_tensor(argument, tensor, sizes)
        _check_device(argument.name, tensor, device)
    if sizes["A"] == 0:
        raise ValueError(f"policy_outputs: expected at least one action, got {describe(inputs.policy_outputs)}")
    if coefficients.value_clip_range is not None and inputs.old_values is None:
        raise ValueError("old_values: needed where value_clip_range is given, values are clipped around them; got None")
    for name, value in coefficients._asdict().items():
        if isinstance(value, Tensor):
            check_tensor(Argument(name, "", GAMMAS), value, sizes)
            _check_device(name, value, device)
        elif not (name == "value_clip_range" and value is None):
            check_number(name, value, math.inf)


def _check_device(name: str, tensor: Tensor, device: torch.device | None) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} as policy_outputs, got {describe(tensor)}")


def _arguments(inputs: LossInputs) -> tuple[Argument, ...]:
    rows = "B" if inputs.indices is None else "R"
    actions = ("actions", rows, INTEGERS) if inputs.log_std is None else ("actions", rows + "A", FLOATS)
    return (
        Argument("policy_outputs", "BA"),
        Argument("values", "B"),
        Argument("log_std", "A", optional=True),
        Argument(*actions),
        Argument("advantages", rows),
        Argument("value_targets", rows),
        Argument("old_log_probs", rows, optional=True),
        Argument("old_values", rows, optional=True),
        Argument("valid", rows, FLAGS, optional=True),
        Argument("indices", "B", INTEGERS, optional=True),
        Argument("count", "", GAMMAS, optional=True),
        Argument("advantage_moments", "M", GAMMAS, optional=True),
    )
