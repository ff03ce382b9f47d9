"""The tensors that an operation returns: their dtypes and shapes, and the refusals of ``out``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kernels.operations import FLOATS, Argument, Operation, describe


class Output(NamedTuple):
    """One output tensor: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _floats(operation: Operation, tensors: Sequence[Tensor | None]) -> list[tuple[Argument, Tensor]]:
    pairs = zip(operation.arguments, tensors, strict=True)
    return [(argument, tensor) for argument, tensor in pairs if tensor is not None and argument.dtypes is FLOATS]


def accumulate_dtype(operation: Operation, tensors: Sequence[Tensor | None]) -> torch.dtype:
    """float64 where any input is, else float32: the dtype of sums, carries and moments."""
    has_double = any(tensor.dtype == torch.float64 for _, tensor in _floats(operation, tensors))
    return torch.float64 if has_double else torch.float32


def result_dtype(operation: Operation, tensors: Sequence[Tensor | None], out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the outputs: ``out_dtype``, or what the floating inputs promote to.

    Raises:
        TypeError: ``out_dtype`` is not one of float32, bfloat16, float16, float64.
    """
    if out_dtype is None:
        followed = (tensor.dtype for argument, tensor in _floats(operation, tensors) if argument.promotes)
        return functools.reduce(torch.promote_types, followed)
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype: expected float32, bfloat16, float16 or float64, got {out_dtype!r}")
    return out_dtype


def output_specs(
    operation: Operation, tensors: Sequence[Tensor | None], out_dtype: torch.dtype | None, moments: bool
) -> list[Output]:
    """What the operation returns for these (checked) tensors, the moments last.

    Carries and moments have the accumulation dtype: rounded to half precision, windows would not chain exactly.

    Raises:
        TypeError: ``moments`` is not True or False, or ``out_dtype`` none that results can have.
    """
    if not isinstance(moments, bool):
        raise TypeError(f"moments: expected True or False, got {describe(moments)}")
    rows = cast(Tensor, tensors[0])
    shapes = {"TN": tuple(rows.shape), "N": tuple(rows.shape[1:])}
    dtypes = {"TN": result_dtype(operation, tensors, out_dtype), "N": accumulate_dtype(operation, tensors)}
    outputs = [Output(name, shapes[axes], dtypes[axes]) for name, axes in operation.outputs]
    if moments:
        outputs.append(Output("moments", (3,), dtypes["N"]))
    return outputs


def allocate(rows: Tensor, outputs: Sequence[Output]) -> list[Tensor]:
    """Fresh outputs; those of the rows' shape take over their layout, so that env-major stays env-major."""
    return [
        torch.empty_like(rows, dtype=dtype) if shape == rows.shape else rows.new_empty(shape, dtype=dtype)
        for _, shape, dtype in outputs
    ]


def check_out(out: object, outputs: Sequence[Output], device: torch.device) -> None:
    """Refuse ``out`` tensors that are not exactly what the operation would allocate, layout aside.

    Raises:
        TypeError: not a tuple or list of tensors.
        ValueError: another count, shape, dtype or device, rows that overlap, or a negative view.
    """
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: expected a tuple of tensors, got {describe(out)}")
    if len(out) != len(outputs):
        names = ", ".join(output.name for output in outputs)
        raise ValueError(f"out: expected {len(outputs)} tensors ({names}), got {len(out)}")
    for tensor, (name, shape, dtype) in zip(out, outputs, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"out: expected a tensor for {name}, got {describe(tensor)}")
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, dtype, device):
            raise ValueError(f"out: expected {name} of shape {list(shape)}, {dtype}, {device}, got {describe(tensor)}")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), shape, strict=True)):
            raise ValueError(f"out: expected {name} without overlapping rows, got strides {tensor.stride()}")
        if tensor.is_neg():
            raise ValueError(f"out: expected {name} as stored, got a negative view")


def check_memory(out: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
    """Refuse ``out`` tensors that cannot be written without changing an input, one another, or what autograd keeps.

    Raises:
        ValueError: one begins where an input or another one does, or requires grad.
    """
    taken = {tensor.data_ptr() for tensor in tensors if tensor is not None}
    for tensor in out:
        if tensor.requires_grad:
            raise ValueError(f"out: expected tensors without grad, got {describe(tensor)} that requires it")
        if tensor.numel() and tensor.data_ptr() in taken:
            raise ValueError(f"out: expected memory that no input and no other output has, got {describe(tensor)}")
        taken.add(tensor.data_ptr())
