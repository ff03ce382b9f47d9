"""The float64 reference against numbers worked out by hand, and the moments against numpy."""

from __future__ import annotations

import doctest
import inspect
from math import inf, log, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from credit_cases import OPERATIONS, Case, as_tuple, assert_close, column, flags, known_cases, run_reference

import kernels
from kernels import reference, torch_backend

DOCS = Path(__file__).parent.parent / "docs" / "credit"


@pytest.mark.parametrize("case", known_cases(), ids=lambda case: f"{case.operation}-{case.name}")
def test_the_reference_gives_the_known_answers(case: Case) -> None:
    assert_close(run_reference(case.operation, case.inputs), case.expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_implementations_take_the_same_arguments_with_the_same_defaults(operation: str) -> None:
    def parameters(module: object, *, without: tuple[str, ...] = ()) -> list[tuple[str, object, object]]:
        signature = inspect.signature(getattr(module, operation))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values() if p.name not in without]

    public = parameters(kernels, without=("backend", "torch_mode", "moments", "out", "out_dtype"))
    assert parameters(reference) == public
    assert parameters(torch_backend, without=("mode",)) == public


def test_gae_never_crosses_filler_rows_and_reads_only_the_value_of_the_first() -> None:
    advantages, targets = reference.gae(
        rewards=column(1, nan, nan, 3, 1),
        values=column(2, 4, nan, 1, 2),
        last_value=torch.tensor([6.0]),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(1, 0, 1, 0, 0),
        valid=flags(1, 0, 0, 1, 1),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantages.flatten().tolist() == [1, 0, 0, 3.5, 2]
    assert targets.flatten().tolist() == [3, 0, 0, 4.5, 4]


def test_vtrace_clips_each_ratio_with_its_own_bar() -> None:
    inputs = {
        "behaviour_log_probs": column(0, 0),
        "target_log_probs": column(log(0.5), log(2)),
        "rewards": column(2, 4),
        "values": column(4, 2),
        "last_value": torch.tensor([8.0]),
        "terminated": flags(0, 0),
        "gamma": 0.5,
    }
    clipped = reference.vtrace(**inputs)
    assert_close(clipped, (column(5, 8), column(1, 6)))
    assert_close(reference.vtrace(**inputs, pg_rho_bar=inf), (column(5, 8), column(1, 12)))
    assert_close(reference.vtrace(**inputs, rho_bar=inf), (column(6.5, 14), column(2.5, 6)))
    assert_close(reference.vtrace(**inputs, c_bar=0.25), (column(4.25, 8), column(1, 6)))
    assert_close(reference.vtrace(**inputs, vtrace_lambda=0.5), (column(4.25, 8), column(1, 6)))


def test_retrace_weights_a_correction_with_the_ratio_of_the_row_that_it_comes_from() -> None:
    targets = reference.retrace(
        rewards=column(2, 4),
        q_taken=column(4, 2),
        expected_q=column(nan, 1),
        log_rhos=column(log(9), log(0.5)),
        last_expected_q=torch.tensor([8.0]),
        terminated=flags(0, 0),
        gamma=0.5,
    )
    assert_close((targets,), (column(4, 8),))


def test_retrace_categorical_takes_expectation_and_ratio_from_the_policy() -> None:
    inputs = {
        "rewards": column(2, 4),
        "q_values": torch.tensor([[[4.0, nan]], [[2.0, 0.0]]]),
        "target_log_probs": torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]).log(),
        "behaviour_log_probs": column(0, 0),
        "actions": torch.tensor([[0], [0]]),
        "last_expected_q": torch.tensor([8.0]),
        "terminated": flags(0, 0),
        "gamma": 0.5,
    }
    assert_close((reference.retrace_categorical(**inputs),), (column(4, 8),))


def test_an_action_of_probability_zero_counts_nothing_even_with_an_infinite_q() -> None:
    targets = reference.retrace_categorical(
        rewards=column(2, 4),
        q_values=torch.tensor([[[4.0, 0.0]], [[2.0, -inf]]]),
        target_log_probs=torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]).log(),
        behaviour_log_probs=column(0, log(2)),
        actions=torch.tensor([[0], [0]]),
        last_expected_q=torch.tensor([8.0]),
        terminated=flags(0, 0),
        gamma=0.5,
    )
    assert_close((targets,), (column(4.5, 8),))


def test_td_lambda_mixes_the_n_step_returns() -> None:
    targets = reference.td_lambda(
        column(2, 4), column(nan, 2), torch.tensor([8.0]), flags(0, 0), gamma=0.5, td_lambda=0.5
    )
    assert_close((targets,), (column(4.5, 8),))


def test_discounted_returns_go_on_with_the_bootstrap_value_of_a_truncated_row() -> None:
    returns = reference.discounted_returns(
        column(1, 2, 3),
        torch.tensor([4.0]),
        flags(0, 0, 0),
        flags(0, 1, 0),
        bootstrap_values=column(nan, 8, nan),
        gamma=0.5,
    )
    assert_close((returns,), (column(4, 6, 5),))


@pytest.mark.parametrize(
    ("valid", "previous_done", "traces", "carry"),
    [
        ((1, 1, 1), False, (3, 2.75, 1.6875), 1.6875),
        ((1, 1, 1), True, (1, 2.25, 1.5625), 1.5625),
        ((0, 1, 1), False, (0, 2, 1.5), 1.5),
        ((1, 0, 1), False, (3, 0, 1), 1),
        ((1, 1, 0), False, (3, 2.75, 0), 0),
    ],
)
def test_a_trace_begins_with_the_carry_and_anew_after_filler(
    valid: tuple[int, ...], previous_done: bool, traces: tuple[float, ...], carry: float
) -> None:
    values, last = reference.eligibility_traces(
        column(1, 2, 1),
        flags(0, 0, 0),
        valid=flags(*valid),
        carry=torch.tensor([8.0]),
        previous_done=torch.tensor([previous_done]),
        gamma=0.5,
        trace_lambda=0.5,
    )
    assert_close((values, last), (column(*traces), torch.tensor([carry])))


def test_the_ending_row_still_belongs_to_its_episode_and_leaves_no_carry() -> None:
    sums, carry = reference.episodic_prefix_sum(column(1, 2, 4, 8), flags(0, 1, 0, 1))
    assert sums.flatten().tolist() == [1, 3, 4, 12]
    assert carry.tolist() == [0]


@pytest.mark.parametrize("page", sorted(OPERATIONS))
def test_the_worked_example_of_the_page_is_right(page: str) -> None:
    failed, attempted = doctest.testfile(str(DOCS / f"{page}.md"), module_relative=False)
    assert attempted > 0
    assert failed == 0


# --- moments --------------------------------------------------------------------------------------------------------


def test_the_moments_count_only_valid_entries() -> None:
    x, valid = torch.tensor([[1.0, nan], [3.0, 8.0]]), torch.tensor([[True, False], [True, True]])
    assert torch_backend.masked_moments(x, valid).tolist() == [3, 4, 26]
    assert torch_backend.masked_moments(x, torch.zeros(2, 2, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_the_moments_survive_a_large_mean() -> None:
    x = torch.tensor([[20000.0, 20000.5, 20001.0]])
    assert torch_backend.masked_moments(x, None).tolist() == [3, 20000.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_parts_merge_into_those_of_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(63, 7, generator=generator, dtype=dtype) + 5
    valid = torch.rand(63, 7, generator=generator) < 0.8
    parts = [torch_backend.masked_moments(x[rows], valid[rows]).double() for rows in (slice(20), slice(20, None))]
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = parts
    count = count_a + count_b
    merged = torch.stack(
        [
            count,
            (count_a * mean_a + count_b * mean_b) / count,
            m2_a + m2_b + (mean_b - mean_a) ** 2 * count_a * count_b / count,
        ]
    )
    kept = x[valid].double().numpy()
    expected = torch.tensor([kept.size, kept.mean(), np.square(kept - kept.mean()).sum()])
    assert_close(as_tuple(merged), (expected,), dtype)
    assert_close((torch_backend.masked_moments(x, valid),), (expected,), dtype)
