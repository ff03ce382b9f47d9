"""A minibatch's rows are gathered, and what is not valid is 0 and not read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from backend_cases import every_backend
from torch import Tensor

from kernels.gather import gather_rows
from kernels.operations import Backend

triton_gather = pytest.importorskip("kernels.triton_gather", reason="needs Triton")

SHAPES = [(1, 1, ()), (5, 33, (3,)), (63, 20, (60,)), (7, 3, (4, 21, 17)), (4, 0, (3,))]


def rows(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 200, (count, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize(("count", "wanted", "shape"), SHAPES)
def test_rows_come_in_the_order_of_the_indices(
    backend: Backend, device: str, dtype: torch.dtype, count: int, wanted: int, shape: tuple[int, ...]
) -> None:
    source, generator = rows(count, shape, dtype), torch.Generator().manual_seed(1)
    indices = torch.randint(0, count, (wanted,), generator=generator)
    valid = torch.rand(count, generator=generator) < 0.7
    expected = [source[i] if valid[i] else torch.zeros_like(source[i]) for i in indices.tolist()]
    got = gather_rows(source.to(device), indices.to(device), valid.to(device), backend=backend)
    assert got.dtype == dtype and got.shape == (wanted, *shape)
    assert torch.equal(got.cpu(), torch.stack(expected) if expected else got.cpu())


@every_backend
def test_a_nan_in_a_filler_row_is_not_read(backend: Backend, device: str) -> None:
    source, valid = torch.ones(9, 5, device=device), torch.ones(9, dtype=torch.bool, device=device)
    source[4], valid[4] = math.nan, False
    got = gather_rows(source, torch.arange(9, device=device), valid, backend=backend)
    assert got[4].eq(0).all() and got.sum() == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": torch.ones(4, dtype=torch.bool)}, r"valid, indices: expected \[R\] and \[B\]"),
        ({"indices": torch.zeros(2, 2, dtype=torch.int64)}, r"valid, indices: expected \[R\] and \[B\]"),
        ({"source": torch.ones(3, 5).t()}, "source: expected a contiguous tensor, got .* with strides"),
        ({"indices": torch.arange(4)[::2]}, "indices: expected a contiguous tensor, got .* with strides"),
        ({"valid": torch.ones(10, dtype=torch.bool)[::2]}, "valid: expected a contiguous tensor, got .* with strides"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "source": torch.ones(5, 3),
        "indices": torch.zeros(2, dtype=torch.int64),
        "valid": torch.ones(5, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        gather_rows(**{**given, **change})
