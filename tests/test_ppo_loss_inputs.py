"""What forms the PPO loss takes its inputs in, what it refuses, and what `torch.compile` sees of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from far_apart import spread
from loss_cases import assert_close, leaves_of, problem, run
from torch import Tensor

import kernels

triton_launch: Any = pytest.importorskip("kernels.triton_loss_launch", reason="needs Triton")

BACKENDS = ["torch", "triton"] if triton_launch.INTERPRETED else ["torch"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
NAN = math.nan


# --- forms of the inputs ----------------------------------------------------------------------------------------------


@every_backend
def test_any_strides_are_read_in_place(backend: str) -> None:
    arguments = problem("gaussian", 33, 3, gathered=True, moments=True)
    strided = {
        n: torch.stack([x, x], dim=-1).transpose(0, -1).contiguous().transpose(0, -1)[..., 0]
        if isinstance(x, Tensor) and x.dim() == 1 else x.t().contiguous().t() if isinstance(x, Tensor) else x
        for n, x in arguments.items()
    }  # fmt: skip
    joint = torch.cat([arguments["policy_outputs"], arguments["values"][:, None]], 1)
    strided |= {"policy_outputs": joint[:, :3], "values": joint[:, 3]}
    got = run(strided, backend)
    for name, x in run(arguments, backend).items():
        assert torch.equal(got[name], x), name


@every_backend
@pytest.mark.parametrize("far", ["policy_outputs", "actions", "log_std"])
def test_columns_far_apart_are_read_right(far: str, backend: str) -> None:
    near = problem("gaussian", 5, 3)
    near[far] = near[far].bfloat16()
    reports = [
        kernels.ppo_loss(**{**near, far: x}, backend=backend).report for x in (near[far], spread(near[far], -1, 2**30))
    ]
    assert torch.equal(*reports)


@every_backend
def test_scalar_tensors_give_what_their_numbers_give(backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    names = ("clip_range", "value_clip_range", "value_coef", "entropy_coef")
    tensors = {name: torch.tensor(arguments[name]) for name in names}
    assert_close(run({**arguments, **tensors}, backend), run(arguments, backend), rtol=1e-6)


@every_backend
def test_inputs_are_left_as_they_were_and_constants_get_no_gradient(backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    for name in ("advantages", "value_targets", "old_log_probs", "old_values"):
        arguments[name].requires_grad_()
    before = {n: x.detach().clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    run(arguments, backend)
    for name, x in before.items():
        assert torch.equal(arguments[name], x), name
        assert arguments[name].grad is None


# --- refusals ---------------------------------------------------------------------------------------------------------

VECTORS = ("values", "old_log_probs", "advantages", "value_targets", "old_values", "valid")


@pytest.mark.parametrize("columns", [c for c in itertools.product([False, True], repeat=6) if any(c)])
def test_a_column_among_batch_vectors_is_refused(columns: tuple[bool, ...]) -> None:
    arguments = problem("gaussian", 4, 1)
    for name, column in zip(VECTORS, columns, strict=True):
        arguments[name] = arguments[name][:, None] if column else arguments[name]
    with pytest.raises(ValueError, match=r"expected shape \[B\], got shape \[4, 1\]"):
        kernels.ppo_loss(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": torch.zeros(3)}, ValueError, r"values: expected shape \[B\] with B = 4, got shape \[3\]"),
        ({"actions": torch.zeros(4, 2)}, ValueError, r"actions: expected shape \[B, A\] with B = 4, A = 3"),
        ({"actions": torch.zeros(4, 3, dtype=torch.int64)}, TypeError, "actions: expected dtype float32"),
        ({"log_std": None}, TypeError, "actions: expected dtype int64, int32"),
        ({"log_std": torch.zeros(4)}, ValueError, r"log_std: expected shape \[A\] with A = 3"),
        ({"valid": torch.ones(4)}, TypeError, "valid: expected dtype bool, uint8"),
        ({"old_values": None}, ValueError, "old_values: needed where value_clip_range is given"),
        ({"count": 4.0}, TypeError, "count: expected a tensor, got float 4.0"),
        ({"count": torch.ones(1)}, ValueError, r"count: expected shape \[\], got shape \[1\]"),
        ({"advantage_moments": torch.zeros(2)}, ValueError, r"advantage_moments: expected shape \[M\] with M = 3"),
        ({"indices": torch.zeros(3, dtype=torch.int64)}, ValueError, r"indices: expected shape \[B\] with B = 4"),
        ({"clip_range": -0.1}, ValueError, r"clip_range: expected a number in \[0, inf\], got -0.1"),
        ({"clip_range": NAN}, ValueError, r"clip_range: expected a number in \[0, inf\], got nan"),
        ({"entropy_coef": "0.1"}, TypeError, "entropy_coef: expected a number, got str '0.1'"),
        ({"entropy_coef": torch.zeros(1)}, ValueError, r"entropy_coef: expected shape \[\]"),
        (
            {"advantages": torch.zeros(4, device="meta")},
            ValueError,
            "advantages: expected device cpu as policy_outputs",
        ),
        ({"policy_outputs": None}, TypeError, "policy_outputs: expected a tensor, got NoneType None"),
        (
            {"policy_outputs": torch.zeros(4, 0), "log_std": torch.zeros(0), "actions": torch.zeros(4, 0)},
            ValueError,
            r"policy_outputs: expected at least one action, got shape \[4, 0\]",
        ),
        ({"backend": "cuda"}, ValueError, "backend: expected one of triton, torch, auto, got 'cuda'"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {**problem("gaussian", 4, 3), **change}
    with pytest.raises(error, match=message):
        kernels.ppo_loss(**arguments)


def test_triton_refuses_float64_and_more_actions_than_a_tile_holds() -> None:
    wide = {n: x.double() if n in ("policy_outputs", "values") else x for n, x in problem("gaussian", 4, 3).items()}
    with pytest.raises(TypeError, match="'triton' sums in float32, got policy_outputs of float64; use 'torch'"):
        kernels.ppo_loss(**wide, backend="triton")
    with pytest.raises(ValueError, match="'triton' takes up to 4096 actions, got 4097; use 'torch'"):
        kernels.ppo_loss(**problem("categorical", 1, 4097), backend="triton")


# --- torch.compile ----------------------------------------------------------------------------------------------------


@every_backend
def test_a_compiled_function_holds_the_loss_in_one_graph(backend: str) -> None:
    arguments = problem("gaussian", 33, 3)

    def total(leaves: dict[str, Tensor]) -> Tensor:
        return 2.0 * kernels.ppo_loss(**{**arguments, **leaves}, backend=backend).total

    eager, compiled = leaves_of(arguments), leaves_of(arguments)
    total(eager).backward()
    torch.compile(total, backend="aot_eager", fullgraph=True)(compiled).backward()
    for name, leaf in eager.items():
        torch.testing.assert_close(compiled[name].grad, leaf.grad)
