"""What each operation takes and returns, stated once, and the refusals of arguments that follow from it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["triton", "torch", "auto"]
TorchMode = Literal["auto", "loop", "scan", "compiled"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLAGS = (torch.bool, torch.uint8)
INTEGERS = (torch.int64, torch.int32)
GAMMAS = (torch.float32, torch.float64)  # half precision cannot hold a gamma near 1: bfloat16(0.999) is 1


class Argument(NamedTuple):
    """One tensor argument: its axes (``T``, ``N``, ``A``), the dtypes it may have, whether results follow its own."""

    name: str
    axes: str = "TN"
    dtypes: tuple[torch.dtype, ...] = FLOATS
    optional: bool = False
    promotes: bool = True


class Operation(NamedTuple):
    """The signature of one operation: tensors, then coefficients with their upper bounds, then outputs with their axes.

    The first argument is ``[T, N]``: it gives T, N, the device and the layout of the outputs.
    """

    name: str
    arguments: tuple[Argument, ...]
    coefficients: tuple[tuple[str, float], ...]
    outputs: tuple[tuple[str, str], ...]
    has_gamma: bool = True
    advantages: int | None = None  # index of the output whose moments can be taken along


def _argument(name: str, axes: str = "TN", dtypes: tuple[torch.dtype, ...] = FLOATS) -> Argument:
    return Argument(name, axes, dtypes, optional=True)


_ENDS = (Argument("terminated", "TN", FLAGS), _argument("truncated", "TN", FLAGS), _argument("valid", "TN", FLAGS))
_CARRY = (
    Argument("carry", "N", optional=True, promotes=False),  # a float32 state leaves windows in half precision
    _argument("previous_done", "N", FLAGS),
)
_UNIT, _POSITIVE = 1.0, math.inf
_TARGETS = (("value_targets", "TN"),)
_SCAN = (("values", "TN"), ("carry", "N"))

GAE = Operation(
    "gae",
    (Argument("rewards"), Argument("values"), Argument("last_value", "N"), *_ENDS, _argument("next_values")),
    (("gae_lambda", _UNIT),),
    (("advantages", "TN"), ("value_targets", "TN")),
    advantages=0,
)
VTRACE = Operation(
    "vtrace",
    (Argument("behaviour_log_probs"), Argument("target_log_probs"), *GAE.arguments),
    (("vtrace_lambda", _UNIT), ("rho_bar", _POSITIVE), ("c_bar", _POSITIVE), ("pg_rho_bar", _POSITIVE)),
    (("value_targets", "TN"), ("pg_advantages", "TN")),
    advantages=1,
)
RETRACE = Operation(
    "retrace",
    (
        *(Argument(name) for name in ("rewards", "q_taken", "expected_q", "log_rhos")),
        Argument("last_expected_q", "N"),
        *_ENDS,
        _argument("next_expected_q"),
    ),
    (("retrace_lambda", _UNIT), ("c_bar", _POSITIVE)),
    (("q_targets", "TN"),),
)
RETRACE_CATEGORICAL = Operation(
    "retrace_categorical",
    (
        Argument("rewards"),
        Argument("q_values", "TNA"),
        Argument("target_log_probs", "TNA"),
        Argument("behaviour_log_probs"),
        Argument("actions", "TN", INTEGERS),
        Argument("last_expected_q", "N"),
        *_ENDS,
        _argument("next_expected_q"),
    ),
    RETRACE.coefficients,
    RETRACE.outputs,
)
TD_LAMBDA = Operation("td_lambda", GAE.arguments, (("td_lambda", _UNIT),), _TARGETS)
DISCOUNTED_RETURNS = Operation(
    "discounted_returns",
    (Argument("rewards"), Argument("last_value", "N"), *_ENDS, _argument("bootstrap_values")),
    (),
    (("returns", "TN"),),
)
ELIGIBILITY_TRACES = Operation(
    "eligibility_traces", (Argument("inputs"), *_ENDS, *_CARRY), (("trace_lambda", _UNIT),), _SCAN
)
EPISODIC_PREFIX_SUM = Operation("episodic_prefix_sum", ELIGIBILITY_TRACES.arguments, (), _SCAN, has_gamma=False)

OPERATIONS = (
    GAE, VTRACE, RETRACE, RETRACE_CATEGORICAL, TD_LAMBDA, DISCOUNTED_RETURNS, ELIGIBILITY_TRACES, EPISODIC_PREFIX_SUM,
)  # fmt: skip


def describe(tensor: object) -> str:
    """A value as an error message shows it: type, or shape, dtype and device."""
    if isinstance(tensor, Tensor):
        return f"shape {list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
    kind, shape, dtype = type(tensor).__name__, getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    return f"{kind} {reprlib.repr(tensor)}" if shape is None else f"{kind} of shape {list(shape)}, {dtype}"


def check_coefficients(operation: Operation, gamma: float | Tensor | None, coefficients: Sequence[float]) -> None:
    """Refuse a coefficient that is not a number in its range; a gamma tensor's values stay on its device, unread.

    Raises:
        TypeError: not a number.
        ValueError: NaN, negative, or above the bound (1 for gamma and the lambdas, none for the ratio bounds).
    """
    if operation.has_gamma and not (type(gamma) is float and 0.0 <= gamma <= _UNIT) and not isinstance(gamma, Tensor):
        check_number("gamma", gamma, _UNIT)
    for value, (name, bound) in zip(coefficients, operation.coefficients, strict=False):  # strict is slower
        if not (type(value) is float and 0.0 <= value <= bound):
            check_number(name, value, bound)


def check_number(name: str, value: object, bound: float) -> None:
    """Refuse what is not a number in [0, bound].

    Raises:
        TypeError: not a number.
        ValueError: NaN, or outside of the range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if not 0.0 <= value <= bound:
        raise ValueError(f"{name}: expected a number in [0, {bound:g}], got {value!r}")


def check_tensors(operation: Operation, tensors: Sequence[Tensor | None], gamma: float | Tensor | None) -> None:
    """Refuse tensors whose kind, dtype, shape or device is not what the operation takes.

    Raises:
        TypeError: not a tensor, or of a dtype that the argument cannot have.
        ValueError: missing, of another shape, on another device, or truncated without its bootstrap values.
    """
    first = tensors[0]
    arguments = [*zip(operation.arguments, tensors, strict=True)]
    if isinstance(gamma, Tensor):
        arguments.append((Argument("gamma", "N", GAMMAS), gamma))
    sizes: dict[str, int] = {}
    for argument, tensor in arguments:
        if tensor is None and argument.optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument.name}: expected a tensor {_axes(argument.axes)}, got {describe(tensor)}")
        check_tensor(argument, tensor, sizes)
        if isinstance(first, Tensor) and tensor.device != first.device:
            name = operation.arguments[0].name
            raise ValueError(f"{argument.name}: expected device {first.device} as {name}, got {describe(tensor)}")
    if "A" in sizes and sizes["A"] == 0:
        raise ValueError("q_values: expected at least one action, got shape with A = 0")
    given = {argument.name for argument, tensor in arguments if tensor is not None}
    if operation is DISCOUNTED_RETURNS and "truncated" in given and "bootstrap_values" not in given:
        raise ValueError(
            "bootstrap_values: needed where truncated is given, a truncated row continues with it; got None"
        )


def check_tensor(argument: Argument, tensor: Tensor, sizes: dict[str, int]) -> None:
    """Refuse a tensor of another dtype or shape; ``sizes`` holds what the axes seen so far are, and learns new ones.

    Raises:
        TypeError: a dtype that the argument cannot have, or a sparse layout.
        ValueError: a negative view, another number of axes, or an axis of another size than before.
    """
    if tensor.dtype not in argument.dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in argument.dtypes)
        raise TypeError(f"{argument.name}: expected dtype {names}, got {describe(tensor)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{argument.name}: expected a dense tensor, got {tensor.layout} of {describe(tensor)}")
    if not torch.compiler.is_compiling() and tensor.is_neg():  # memory lacks the sign; an operator's inputs have it
        raise ValueError(f"{argument.name}: expected numbers as stored, got a negative view; use resolve_neg()")
    if tensor.dim() != len(argument.axes):
        raise ValueError(f"{argument.name}: expected shape {_axes(argument.axes)}, got {describe(tensor)}")
    for axis, size in zip(argument.axes, tensor.shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            expected = ", ".join(f"{name} = {sizes[name]}" for name in argument.axes if name in sizes)
            raise ValueError(
                f"{argument.name}: expected shape {_axes(argument.axes)} with {expected}, got {describe(tensor)}"
            )


def _axes(axes: str) -> str:
    return f"[{', '.join(axes)}]"
