"""Gathering the rows of a minibatch, and what does not count as 0, in one launch."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.operations import describe
from kernels.triton_call import Launch, run
from kernels.triton_tiles import next_power

_CELLS = 4096  # of a tile
_MAX_COLUMNS = 1024


@triton.jit
def gather_kernel(source, indices, valid, result, B, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of ``ROWS`` rows and ``WIDTH`` of their ``COLUMNS`` entries."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < B
    place = tl.load(indices + row, mask=inside, other=0)
    live = inside & (tl.load(valid + place, mask=inside, other=0) != 0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = (column < COLUMNS)[None, :]
    values = tl.load(source + place[:, None] * COLUMNS + column[None, :], mask=live[:, None] & is_column, other=0)
    tl.store(result + row[:, None] * COLUMNS + column[None, :], values, mask=inside[:, None] & is_column)


INTERPRETED = isinstance(gather_kernel, InterpretedFunction)


def launch(source: Tensor, indices: Tensor, valid: Tensor) -> tuple[Tensor, Launch]:
    """The result and what fills it."""
    result = source.new_empty(len(indices), *source.shape[1:])
    columns = source[:1].numel()
    width = min(_MAX_COLUMNS, next_power(columns))
    rows = _CELLS // width
    grid = -(-len(indices) // rows), -(-columns // width)
    constants = {"COLUMNS": columns, "ROWS": rows, "WIDTH": width}
    return result, Launch(gather_kernel, grid, (source, indices, valid, result, len(indices)), constants)


def gather_rows(source: Tensor, indices: Tensor, valid: Tensor) -> Tensor:
    """`kernels.gather.gather_rows` on the tensors' device.

    Raises:
        ValueError: not on CUDA.
    """
    if not (source.is_cuda or INTERPRETED):
        raise ValueError(f"backend: 'triton' needs CUDA tensors, got source of {describe(source)}; use 'torch'")
    result, one = launch(source, indices, valid)
    run([one] if result.numel() else [], source.device)
    return result
