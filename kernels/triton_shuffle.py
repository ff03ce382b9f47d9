"""Permutations by a cipher: every entry is computed apart from the others."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.operations import describe
from kernels.shuffle import ROUNDS
from kernels.triton_call import Launch, run

_BLOCK = 1024


@triton.jit
def encipher(x, keys, HALF: tl.constexpr, ROUNDS: tl.constexpr):
    """A bijection of the numbers of ``2 * HALF`` bits: each round exchanges the halves, one of them mixed in."""
    left, right = x >> HALF, x & ((1 << HALF) - 1)
    for step in tl.static_range(ROUNDS):
        mixed = (right ^ tl.load(keys + step).to(tl.uint32)) * 0x9E3779B1
        mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
        left, right = right, (left ^ mixed ^ (mixed >> 13)) & ((1 << HALF) - 1)
    return (left << HALF) | right


@triton.jit
def shuffle_kernel(orders, keys, U, HALF: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of one row."""
    own = keys + tl.program_id(1) * ROUNDS
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < U
    x = encipher(index.to(tl.uint32), own, HALF, ROUNDS)
    outside = inside & (x >= U)
    while tl.max(outside.to(tl.int32), 0) > 0:
        x = tl.where(outside, encipher(x, own, HALF, ROUNDS), x)
        outside = inside & (x >= U)
    tl.store(orders + tl.program_id(1).to(tl.int64) * U + index, x.to(tl.int64), mask=inside)


INTERPRETED = isinstance(shuffle_kernel, InterpretedFunction)


def launch(orders: Tensor, keys: Tensor) -> Launch:
    """What fills ``orders``; ``keys``: ``[E, ROUNDS]`` int64."""
    count, size = orders.shape
    half = max(1, -(-(size - 1).bit_length() // 2))
    return Launch(
        shuffle_kernel, (-(-size // _BLOCK), count), (orders, keys, size),
        {"HALF": half, "ROUNDS": ROUNDS, "BLOCK": _BLOCK},
    )  # fmt: skip


def shuffle_(orders: Tensor) -> Tensor:
    """`kernels.shuffle.shuffle_` on the tensor's device.

    Raises:
        ValueError: not on CUDA.
    """
    if not (orders.is_cuda or INTERPRETED):
        raise ValueError(f"backend: 'triton' needs CUDA tensors, got orders of {describe(orders)}; use 'torch'")
    if orders.numel():
        run([launch(orders, torch.randint(2**32, (len(orders), ROUNDS), device=orders.device))], orders.device)
    return orders
