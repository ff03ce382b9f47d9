"""A minibatch of rows, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import runs_triton
from kernels.operations import Backend, describe


def gather_rows(source: Tensor, indices: Tensor, valid: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``out[i] = source[indices[i]] if valid[indices[i]] else 0``: what is not valid is not read.

    Args:
        source: ``[R, *shape]``, contiguous, any dtype.
        indices: ``[B]`` int64, contiguous, in [0, R), unchecked.
        valid: ``[R]`` bool, contiguous.
        backend: ``triton`` (one launch; CUDA), ``torch``, or ``auto`` (Triton on CUDA, else torch).

    Returns:
        ``[B, *shape]``, of the source's dtype.

    Raises:
        ValueError: shapes that do not fit, a tensor that is not contiguous, or a backend that cannot run here.
    """
    if valid.shape != source.shape[:1] or indices.dim() != 1:
        raise ValueError(
            f"valid, indices: expected [R] and [B] for source {describe(source)}, got {describe(valid)} and "
            f"{describe(indices)}"
        )
    for name, x in (("source", source), ("indices", indices), ("valid", valid)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got {describe(x)} with strides {x.stride()}")
    if runs_triton(backend, source.is_cuda):
        return torch.ops.rollscan.gather_rows(source, indices, valid)
    rows = source.index_select(0, indices)
    return rows.masked_fill_(~valid.index_select(0, indices).view(-1, *(1,) * (rows.dim() - 1)), 0)


def _gather(source: Tensor, indices: Tensor, valid: Tensor) -> Tensor:
    from kernels import triton_gather  # here, so that the package imports where Triton is not installed

    return triton_gather.gather_rows(source, indices, valid)


def _fake_gather(source: Tensor, indices: Tensor, valid: Tensor) -> Tensor:
    return source.new_empty(len(indices), *source.shape[1:])


torch.library.define("rollscan::gather_rows", "(Tensor source, Tensor indices, Tensor valid) -> Tensor")
torch.library.impl("rollscan::gather_rows", "CompositeExplicitAutograd", _gather)
torch.library.register_fake("rollscan::gather_rows", _fake_gather)
