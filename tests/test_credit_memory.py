"""Inputs and outputs wherever they lie: beyond 32-bit offsets, between other numbers, at odd addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from credit_cases import every_backend, every_cpu_backend, every_operation, random_window, run
from far_apart import spread
from torch import Tensor

#: Steps and elements between them: a distance that takes 64 bits by itself, and one of which only multiples do.
DISTANCES = [(2, 2**31), (3, 2**30)]


@every_backend
@pytest.mark.parametrize(("length", "distance"), DISTANCES)
@pytest.mark.parametrize("far", ["rewards", "advantages"])
def test_rows_far_apart_are_read_and_written_right(
    far: str, length: int, distance: int, backend: dict[str, str]
) -> None:
    ones = torch.ones(length, 5, dtype=torch.bfloat16, device=backend.get("device", "cpu"))
    window = {"rewards": ones, "values": ones - 1, "last_value": ones[0] - 1, "terminated": ones == 0}
    out = {"advantages": torch.full_like(ones, torch.nan), "value_targets": torch.full_like(ones, torch.nan)}
    for tensors in (window, out):
        tensors.update({name: spread(x, 0, distance) for name, x in tensors.items() if name == far})
    run("gae", {**window, "gamma": 1.0, "gae_lambda": 1.0}, out=tuple(out.values()), **backend)
    counted = torch.arange(length, 0, -1, dtype=ones.dtype, device=ones.device).expand(5, -1).T
    assert all(torch.equal(x, counted) for x in out.values())


@every_backend
def test_actions_far_apart_are_read_right(backend: dict[str, str]) -> None:
    near = random_window("retrace_categorical", 5, 3, 0, dtype=torch.bfloat16)
    near = {name: x.to(backend.get("device", "cpu")) if isinstance(x, Tensor) else x for name, x in near.items()}
    far = {**near, **{name: spread(near[name], 2, 2**30) for name in ("q_values", "target_log_probs")}}
    assert torch.equal(*(run("retrace_categorical", x, **backend)[0] for x in (near, far)))


@every_cpu_backend
@every_operation
def test_outputs_between_other_numbers_leave_them_alone(operation: str, backend: dict[str, Any]) -> None:
    options = {**backend, "moments": True} if operation in ("gae", "vtrace") else backend
    inputs = random_window(operation, 9, 3, 0)
    expected = run(operation, inputs, **options)
    buffers = [torch.full([2 * size for size in x.shape], torch.nan, dtype=x.dtype) for x in expected]
    out = tuple(x[tuple(slice(1, None, 2) for _ in x.shape)] for x in buffers)
    run(operation, inputs, out=out, **options)
    for buffer, got, want in zip(buffers, out, expected, strict=True):
        assert torch.equal(got, want)
        assert buffer.isnan().sum() == buffer.numel() - got.numel()
