"""Random orders are permutations, each its own, that follow the seed and favour no place."""

from __future__ import annotations

import pytest
import torch
from backend_cases import every_backend
from torch import Tensor

from kernels.operations import Backend
from kernels.shuffle import shuffle_

pytest.importorskip("kernels.triton_shuffle", reason="needs Triton")


def shuffled(count: int, size: int, backend: Backend, device: str, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return shuffle_(torch.full((count, size), -1, device=device), backend=backend).cpu()


@every_backend
@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 63, 1025])
def test_every_row_holds_every_number_once(backend: Backend, device: str, size: int) -> None:
    orders = shuffled(2, size, backend, device)
    assert torch.equal(orders.sort(1).values, torch.arange(size).expand(2, size))


@every_backend
def test_an_empty_batch_has_empty_orders(backend: Backend, device: str) -> None:
    assert shuffled(2, 0, backend, device).shape == (2, 0)


@every_backend
def test_orders_follow_the_seed_and_differ_among_rows(backend: Backend, device: str) -> None:
    first, again, other = (shuffled(2, 1000, backend, device, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    for a, b in ((first[0], first[1]), (first[0], other[0]), (first[1], other[1])):
        assert (a == b).sum() < 10  # one on average


@every_backend
@pytest.mark.parametrize("size", [5, 64])
def test_every_number_comes_to_every_place_equally_often(backend: Backend, device: str, size: int) -> None:
    rows = 4000 if device == "cuda" or backend == "torch" else 40
    orders = shuffled(rows, size, backend, device)
    counts = torch.stack([(orders == number).sum(0) for number in range(size)]).double()
    expected = rows / size
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5
    neighbours = (orders[:, 1:] - orders[:, :-1] == 1).double().mean()  # as often as not: 1 / size of all pairs
    assert float(neighbours) == pytest.approx(1 / size, abs=5 * (1 / size / (rows * (size - 1))) ** 0.5)


@pytest.mark.parametrize("orders", [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4), torch.zeros(4, 2).long().t()])
def test_what_it_cannot_fill_is_refused(orders: Tensor) -> None:
    with pytest.raises(ValueError, match=r"orders: expected contiguous \[E, U\] int64"):
        shuffle_(orders)
