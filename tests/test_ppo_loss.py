"""The PPO loss against its float64 reference, against numbers worked out by hand, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_cases import SHAPES, VARIANTS, assert_close, problem, run, run_reference
from torch import Tensor

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
    at_the_end = run(ratio_problem(torch.zeros(2), torch.tensor([3.0, -1.0]), clip_range=0.0), backend)
    torch.testing.assert_close(at_the_end["d_log_std"], torch.tensor([1.0]))  # -A / n times d log_prob / d log_std = -1
    beyond = run(ratio_problem(torch.tensor([0.1, -0.1]), torch.tensor([3.0, -1.0]), clip_range=0.0), backend)
    assert not beyond["d_log_std"].any()


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
@pytest.mark.parametrize("action", [-1, 5])
def test_an_action_that_is_no_index_is_seen_in_the_loss(backend: str, action: int) -> None:
    arguments = problem("categorical", 63, 5, valid=1.0)
    arguments["actions"] = arguments["actions"].clone()
    arguments["actions"][7] = action
    assert run(arguments, backend)["total"].isnan()


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
    logits = 1e4 * arguments["policy_outputs"]
    taken = logits.double().log_softmax(1).gather(1, arguments["actions"][:, None]).squeeze(1)
    arguments |= {"policy_outputs": logits, "old_log_probs": taken.float()}
    got, expected = run(arguments, backend), run_reference(arguments)
    assert got["d_policy_outputs"].isfinite().all()
    names = ("policy", "value", "entropy", "total")
    assert_close({n: got[n] for n in names}, {n: expected[n] for n in names}, rtol=2e-3)  # float32 steps of 1e-3 at 1e4


@every_backend
@pytest.mark.parametrize("constant", [7.0, 0.0, 0.1, -123.4])
def test_advantages_that_do_not_vary_count_as_zero(constant: float, backend: str) -> None:
    arguments = problem("gaussian", 33, 3)
    advantages = torch.full((33,), constant)
    mean = advantages.sum() / 33
    moments = torch.stack([torch.tensor(33.0), mean, (advantages - mean).square().sum()])
    assert run({**arguments, "advantages": advantages, "advantage_moments": moments}, backend)["policy"] == 0.0
