"""The PPO loss against its float64 reference, against numbers worked out by hand, and what it refuses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from loss_cases import SHAPES, VARIANTS, assert_close, leaves_of, problem, run, run_reference
from torch import Tensor

import kernels
from kernels.loss_inputs import HALF_LOG_2PI

triton_launch: Any = pytest.importorskip("kernels.triton_loss_launch", reason="needs Triton")

BACKENDS = ["torch", "triton"] if triton_launch.INTERPRETED else ["torch"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
NAN, INF = math.nan, math.inf
FOUR = {"advantages": torch.tensor([1.0, -2.0, 3.0, 0.5]), "log_ratio": torch.tensor([0.1, -0.1, 0.3, 0.0])}


def ratio_problem(log_ratio: Tensor, advantages: Tensor, **options: Any) -> dict[str, Any]:
    """One Gaussian action at its mean: its log-density is a known constant, so the old one sets the ratio."""
    rows = len(log_ratio)
    zeros = torch.zeros(rows)
    return {
        "policy_outputs": torch.zeros(rows, 1), "values": zeros, "actions": torch.zeros(rows, 1),
        "old_log_probs": -HALF_LOG_2PI - log_ratio, "advantages": advantages, "value_targets": zeros,
        "log_std": torch.zeros(1), "clip_range": 0.2, "value_coef": 0.0, "entropy_coef": 0.0, **options,
    }  # fmt: skip


# --- three computations -----------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(("distribution", "rows", "actions"), SHAPES)
def test_loss_report_and_gradients_agree_with_the_reference(
    distribution: str, rows: int, actions: int, backend: str
) -> None:
    for variant in VARIANTS if rows == 33 or rows == 63 else VARIANTS[-1:]:
        if rows == 1 and variant["moments"]:
            variant = {**variant, "moments": False}
        arguments = problem(distribution, rows, actions, **variant)
        expected = run_reference(arguments)
        if rows == 1:  # one target does not vary
            expected["explained_variance"] = torch.tensor(0.0)
        assert_close(run(arguments, backend), expected)


def test_float64_inputs_give_float64_accuracy() -> None:
    for distribution in ("gaussian", "categorical"):
        arguments = problem(distribution, 101, 4, gathered=True, moments=True)
        wide = {
            name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()
        }
        assert_close(run(wide, "torch"), run_reference(wide), rtol=1e-12)


@every_backend
def test_the_gradient_is_the_slope_of_the_loss(backend: str) -> None:
    """Central differences of the float64 reference along random directions, away from the kinks."""
    arguments = problem("gaussian", 33, 3, seed=4)
    gradients = run(arguments, backend)
    for name in ("policy_outputs", "values", "log_std"):
        direction = torch.randn(arguments[name].shape, generator=torch.Generator().manual_seed(1)).double()
        ends = [
            run_reference({**arguments, name: arguments[name].double() + step * direction})["total"]
            for step in (1e-7, -1e-7)
        ]
        slope = float((gradients[f"d_{name}"].double() * direction).sum())
        assert slope == pytest.approx(float(ends[0] - ends[1]) / 2e-7, rel=1e-4, abs=1e-5)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_outputs_are_summed_in_float32(dtype: torch.dtype, backend: str) -> None:
    arguments = problem("gaussian", 601, 8)
    arguments |= {name: arguments[name].to(dtype) for name in ("policy_outputs", "values")}
    got, expected = run(arguments, backend), run_reference(arguments)
    assert got["d_policy_outputs"].dtype == got["d_values"].dtype == dtype
    assert got["total"].dtype == torch.float32
    rounded = ("d_policy_outputs", "d_values")  # gradients are stored in the dtype of their tensor
    assert_close({n: got[n] for n in rounded}, {n: expected[n] for n in rounded}, rtol=torch.finfo(dtype).eps)
    assert_close(*({n: x for n, x in results.items() if n not in rounded} for results in (got, expected)))


@every_backend
def test_the_gradient_is_multiplied_by_what_comes_after_the_loss(backend: str) -> None:
    arguments = problem("categorical", 63, 5)
    once, thrice = (run(arguments, backend, scale=scale) for scale in (1.0, 3.0))
    for name in ("d_policy_outputs", "d_values"):
        torch.testing.assert_close(thrice[name], 3.0 * once[name])


# --- known answers ----------------------------------------------------------------------------------------------------


@every_backend
def test_the_clipped_surrogate_has_the_known_value(backend: str) -> None:
    got = run(ratio_problem(FOUR["log_ratio"], FOUR["advantages"]), backend)
    assert float(got["policy"]) == pytest.approx(-0.84887402, rel=1e-6)


@every_backend
def test_the_kl_estimate_is_not_negative_and_has_the_known_value(backend: str) -> None:
    got = run(ratio_problem(torch.tensor([0.3, -0.5, 0.1, -0.2, 0.6]), torch.zeros(5)), backend)
    assert float(got["approx_kl"]) == pytest.approx(0.08048199, rel=1e-6)
    assert float(got["clip_fraction"]) == pytest.approx(0.6)


@every_backend
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.3])
def test_a_small_kl_keeps_its_digits(scale: float, backend: str) -> None:
    log_ratio = scale * torch.randn(300, generator=torch.Generator().manual_seed(0))
    arguments = ratio_problem(log_ratio, torch.zeros(300))
    present = torch.tensor(-HALF_LOG_2PI)  # as float32 has it: the difference from the old one is what is seen
    seen = (present - arguments["old_log_probs"]).double()
    got = run(arguments, backend)["approx_kl"]
    assert got >= 0
    assert float(got) == pytest.approx(float((torch.expm1(seen) - seen).mean()), rel=0.05, abs=1e-13)


@every_backend
@pytest.mark.parametrize(
    ("value", "loss", "gradient"), [(2.0, 1.62, 0.0), (-1.0, 8.0, -4.0), (1.1, 1.805, -1.9), (5.0, 2.0, 2.0)]
)
def test_the_clipped_value_loss_takes_the_larger_error(
    value: float, loss: float, gradient: float, backend: str
) -> None:
    one = torch.ones(1)
    arguments = ratio_problem(
        0 * one,
        0 * one,
        values=value * one,
        old_values=one,
        value_targets=3 * one,
        value_clip_range=0.2,
        value_coef=1.0,
    )
    got = run(arguments, backend)
    assert float(got["value"]) == pytest.approx(loss, rel=1e-6)
    assert float(got["d_values"]) == pytest.approx(gradient, rel=1e-6)


@every_backend
def test_descending_the_entropy_term_makes_the_policy_more_random(backend: str) -> None:
    arguments = {
        **ratio_problem(torch.zeros(1), torch.zeros(1), entropy_coef=0.01), "log_std": None,
        "policy_outputs": torch.tensor([[0.0, math.log(3.0)]]), "actions": torch.zeros(1, dtype=torch.int64),
    }  # fmt: skip
    got = run(arguments, backend)
    assert float(got["entropy"]) == pytest.approx(0.56233514, rel=1e-6)
    expected = torch.tensor([[-0.00205990, 0.00205990]])
    torch.testing.assert_close(got["d_policy_outputs"], expected, rtol=1e-5, atol=1e-7)


@every_backend
def test_at_the_ends_of_the_clip_range_the_gradient_passes_and_beyond_it_does_not(backend: str) -> None:
    ratio = torch.tensor([0.5, 1.5, 0.49, 1.51])  # a range of 0.5 has exact ends
    old = torch.tensor(-HALF_LOG_2PI).expand(4) - ratio.double().log().float()
    arguments = ratio_problem(ratio.log(), torch.tensor([-1.0, 1.0, -1.0, 1.0]), clip_range=0.5, old_log_probs=old)
    seen = (torch.tensor(-HALF_LOG_2PI) - old).exp()
    got = run(arguments, backend)["d_log_std"]
    # d log_prob / d log_std = -1 at the mean; a rounded ratio may fall on either side of an end
    inside = (seen >= 0.5) & (seen <= 1.5)
    expected = (seen * torch.tensor([-1.0, 1.0, -1.0, 1.0]))[inside].sum() / 4
    torch.testing.assert_close(got[0], expected)


# --- rows that do not count -------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("distribution", ["gaussian", "categorical"])
def test_rows_that_do_not_count_change_no_bit(distribution: str, poison: float, backend: str) -> None:
    clean = problem(distribution, 63, 3, moments=True)
    filler = ~clean["valid"]
    dirty = dict(clean)
    for name in ("policy_outputs", "values", "old_log_probs", "advantages", "value_targets", "old_values"):
        rows = filler if clean[name].dim() == 1 else filler[:, None]
        dirty[name] = clean[name].masked_fill(rows, poison)
    if distribution == "gaussian":
        dirty["actions"] = clean["actions"].masked_fill(filler[:, None], poison)
    got, expected = run(dirty, backend), run(clean, backend)
    for name, x in expected.items():
        assert torch.equal(got[name], x), name
    assert not got["d_policy_outputs"][filler].any()
    assert not got["d_values"][filler].any()


@every_backend
@pytest.mark.parametrize("flag", [torch.uint8, torch.bool])
def test_any_nonzero_flag_counts(flag: torch.dtype, backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    raised = {**arguments, "valid": (arguments["valid"] * 255).to(torch.uint8).to(flag)}
    assert_close(run(raised, backend), run_reference(arguments))


@every_backend
def test_a_batch_without_a_valid_row_has_a_loss_and_gradients_of_zero(backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    got = run({**arguments, "valid": torch.zeros(33, dtype=torch.bool)}, backend)
    for name, x in got.items():
        assert not x.any(), name


@every_backend
def test_an_empty_batch_has_a_loss_of_zero(backend: str) -> None:
    arguments = problem("gaussian", 4, 3)
    rows = {n: x[:0] for n, x in arguments.items() if isinstance(x, Tensor) and n != "log_std"}
    assert float(run({**arguments, **rows}, backend)["total"]) == 0.0


@every_backend
def test_a_nan_in_a_row_that_counts_is_seen_in_the_loss(backend: str) -> None:
    for name in ("policy_outputs", "values", "old_log_probs", "advantages", "value_targets", "old_values"):
        arguments = problem("categorical", 63, 5, valid=1.0)
        arguments[name] = arguments[name].clone()
        arguments[name].view(63, -1)[7, 0] = NAN
        assert run(arguments, backend)["total"].isnan(), name


@every_backend
def test_the_count_given_divides_every_sum(backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    rows = float(arguments["valid"].sum())
    once, half = run(arguments, backend), run({**arguments, "count": torch.tensor(2 * rows)}, backend)
    for name in set(once) - {"explained_variance", "row_count"}:
        torch.testing.assert_close(half[name], once[name] / 2)
    assert half["row_count"] == 2 * rows


# --- distributions ----------------------------------------------------------------------------------------------------


@every_backend
def test_impossible_actions_have_no_entropy_and_finite_gradients(backend: str) -> None:
    arguments = problem("categorical", 63, 5, valid=1.0)
    logits = arguments["policy_outputs"].clone()
    logits[:, 4] = -INF
    logits[0, 1:] = -INF
    taken = arguments["actions"] % 4
    taken[0] = 0
    got = run({**arguments, "policy_outputs": logits, "actions": taken}, backend)
    arguments |= {"policy_outputs": logits[:, :4].clamp(min=-100.0), "actions": taken}
    expected = run_reference(arguments)
    assert not got["d_policy_outputs"][:, 4].any()
    got["d_policy_outputs"] = got["d_policy_outputs"][:, :4]
    assert_close(got, expected)


@every_backend
def test_taking_an_impossible_action_leaves_finite_gradients(backend: str) -> None:
    arguments = problem("categorical", 5, 3, valid=1.0)
    logits = arguments["policy_outputs"].clone()
    logits[2, arguments["actions"][2]] = -INF
    got = run({**arguments, "policy_outputs": logits}, backend)
    assert got["d_policy_outputs"].isfinite().all()
    assert got["approx_kl"] == INF


@every_backend
def test_large_logits_do_not_overflow(backend: str) -> None:
    arguments = problem("categorical", 63, 5)
    arguments["policy_outputs"] = 1e4 * arguments["policy_outputs"]
    arguments["old_log_probs"] = torch.full((63,), -1e4)
    got = run({**arguments, "advantages": -arguments["advantages"].abs()}, backend)
    assert got["entropy"].isfinite()
    assert got["d_policy_outputs"].shape == (63, 5)


@every_backend
@pytest.mark.parametrize("constant", [7.0, 0.0, 0.1, -123.4])
def test_advantages_that_do_not_vary_count_as_zero(constant: float, backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    advantages = torch.full((33,), constant)
    mean = advantages.sum() / 33
    moments = torch.stack([torch.tensor(33.0), mean, (advantages - mean).square().sum()])
    assert run({**arguments, "advantages": advantages, "advantage_moments": moments}, backend)["policy"] == 0.0


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
