"""Random orders of a batch's rows, all of an update in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import runs_triton
from kernels.operations import Backend, describe

#: Of the cipher; its keys are what is random.
ROUNDS = 10


def shuffle_(orders: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Fill each row of ``orders`` ``[E, U]`` with a permutation of ``0 .. U - 1`` of its own, from torch's generator.

    The fused backend enciphers every number by a Feistel network over the next even number of bits, again until it is
    below U: a bijection, computed for each entry apart (Mitchell, Stokes, Frank and Holmes 2022, "Bandwidth-optimal
    random shuffling for GPUs", arXiv 2106.06161). A sort, as in `torch.randperm`, takes a dozen launches for each row.

    Args:
        orders: int64, contiguous.
        backend: ``triton`` (CUDA), ``torch`` (`torch.randperm`), or ``auto`` (Triton on CUDA, else torch).

    Raises:
        ValueError: not ``[E, U]`` int64 and contiguous, more than 2^30 entries in a row, or a backend that cannot run.
    """
    if orders.dim() != 2 or orders.dtype != torch.int64 or not orders.is_contiguous() or orders.shape[1] > 2**30:
        raise ValueError(f"orders: expected contiguous [E, U] int64 with U up to 2^30, got {describe(orders)}")
    if runs_triton(backend, orders.is_cuda):
        from kernels import triton_shuffle  # here, so that the package imports where Triton is not installed

        return triton_shuffle.shuffle_(orders)
    for order in orders:
        torch.randperm(len(order), out=order)
    return orders
