"""The V-trace loss against its float64 reference, and its relations to PPO's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_cases import SHAPES, VARIANTS, assert_close, for_vtrace, problem, run, run_reference

import kernels

triton_launch: Any = pytest.importorskip("kernels.triton_loss_launch", reason="needs Triton")

BACKENDS = ["torch", "triton"] if triton_launch.INTERPRETED else ["torch"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@every_backend
@pytest.mark.parametrize(("distribution", "rows", "actions"), [shape for shape in SHAPES if shape[1] > 1])
def test_loss_report_and_gradients_agree_with_the_reference(
    distribution: str, rows: int, actions: int, backend: str
) -> None:
    for variant in VARIANTS[::3]:
        arguments = for_vtrace(problem(distribution, rows, actions, **variant))
        assert_close(run(arguments, backend), run_reference(arguments))


@every_backend
def test_a_count_of_one_gives_the_sums_of_the_paper(backend: str) -> None:
    arguments = for_vtrace(problem("categorical", 63, 5))
    got = run({**arguments, "count": torch.tensor(1.0)}, backend)
    log_probs = arguments["policy_outputs"].double().log_softmax(1)
    taken = log_probs[torch.arange(63), arguments["actions"]]
    kept = arguments["valid"]
    expected = {
        "policy": -(arguments["pg_advantages"] * taken)[kept].sum(),
        "value": 0.5 * (arguments["value_targets"] - arguments["values"])[kept].square().sum(),
        "entropy": -(log_probs.exp() * log_probs).sum(1)[kept].sum(),
    }
    assert_close({name: got[name] for name in expected}, expected)


@every_backend
def test_at_the_behaviour_policy_its_gradient_is_that_of_ppo(backend: str) -> None:
    arguments = problem("gaussian", 33, 3, value_clip=False)
    zero = torch.distributions.Normal(arguments["policy_outputs"], arguments["log_std"].exp())
    arguments["old_log_probs"] = zero.log_prob(arguments["actions"]).sum(1)
    ppo, vtrace = run(arguments, backend), run(for_vtrace(arguments), backend)
    for name in ("d_policy_outputs", "d_log_std", "d_values"):
        torch.testing.assert_close(vtrace[name], ppo[name], rtol=1e-4, atol=1e-6)


@every_backend
def test_rows_that_do_not_count_change_no_bit(backend: str) -> None:
    clean = for_vtrace(problem("categorical", 63, 5))
    filler = ~clean["valid"]
    dirty = dict(clean)
    for name in ("policy_outputs", "values", "pg_advantages", "value_targets"):
        dirty[name] = clean[name].masked_fill(filler if clean[name].dim() == 1 else filler[:, None], math.nan)
    expected = run(clean, backend)
    for name, x in run(dirty, backend).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("name", ["values", "pg_advantages", "value_targets", "valid"])
def test_a_column_among_batch_vectors_is_refused(name: str) -> None:
    arguments = for_vtrace(problem("gaussian", 4, 1))
    arguments[name] = arguments[name][:, None]
    with pytest.raises(ValueError, match=r"expected shape \[B\], got shape \[4, 1\]"):
        kernels.vtrace_loss(**arguments)
