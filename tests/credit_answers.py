"""Small windows of the credit operations whose results are known to the last digit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Any]


class Case(NamedTuple):
    """An operation, its keyword arguments and the first outputs that it must give."""

    name: str
    operation: str
    inputs: Inputs
    expected: tuple[Tensor, ...]


def column(*values: float) -> Tensor:
    """``[T, 1]`` float32."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def flags(*values: int) -> Tensor:
    """``[T, 1]`` bool."""
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


def estimators(
    name: str, trace_lambda: float, advantages: Tensor, returns: Tensor, pg_advantages: Tensor, window: Inputs
) -> list[Case]:
    """One window for all five backward operations.

    On-policy, TD(lambda), V-trace and Retrace (with q = V and EQ_next = V_next) all have the value targets of GAE; the
    discounted returns differ, since nothing but the ends is bootstrapped.
    """
    common = {key: window[key] for key in ("rewards", "terminated", "truncated", "gamma") if key in window}
    v, last, following = window["values"], window["last_value"], window.get("next_values")
    bootstrap = {} if "truncated" not in window else {"bootstrap_values": following}
    on_policy = torch.zeros_like(v)
    gae = {**common, "values": v, "last_value": last, "next_values": following}
    vtrace = {**gae, "behaviour_log_probs": on_policy, "target_log_probs": on_policy, "vtrace_lambda": trace_lambda}
    retrace = {
        **common,
        "q_taken": v,
        "expected_q": v,
        "log_rhos": on_policy,
        "last_expected_q": last,
        "next_expected_q": following,
        "retrace_lambda": trace_lambda,
    }
    targets = advantages + v
    return [
        Case(name, "gae", {**gae, "gae_lambda": trace_lambda}, (advantages, targets)),
        Case(name, "td_lambda", {**gae, "td_lambda": trace_lambda}, (targets,)),
        Case(name, "vtrace", vtrace, (targets, pg_advantages)),
        Case(name, "retrace", retrace, (targets,)),
        Case(name, "discounted_returns", {**common, "last_value": last, **bootstrap}, (returns,)),
    ]


def truncation_and_termination() -> list[Case]:
    """C01: the boundary at t = 2 truncates, terminates, or does both, in which case termination wins."""
    window = {
        "rewards": torch.ones(5, 1),
        "values": column(0.5, 0.6, 0.7, 0.8, 0.9),
        "next_values": column(0.6, 0.7, 10, 0.9, 1.5),
        "last_value": torch.tensor([1.5]),
        "gamma": 0.9,
    }
    at_boundary, never = flags(0, 0, 1, 0, 0), flags(0, 0, 0, 0, 0)
    truncated = estimators(
        "C01 truncated",
        0.8,
        column(6.60272, 7.726, 9.3, 2.054, 1.45),
        column(10, 10, 10, 3.115, 2.35),
        column(7.9934, 9.4, 9.3, 2.315, 1.45),
        {**window, "terminated": never, "truncated": at_boundary},
    )
    terminated = (
        column(1.93712, 1.246, 0.3, 2.054, 1.45),
        column(2.71, 1.9, 1, 3.115, 2.35),
        column(2.1614, 1.3, 0.3, 2.315, 1.45),
    )
    one = estimators("C01 terminated", 0.8, *terminated, {**window, "terminated": at_boundary, "truncated": never})
    both = estimators("C01 both", 0.8, *terminated, {**window, "terminated": at_boundary, "truncated": at_boundary})
    return [*truncated, *one, *both]


def flag_of_the_step() -> list[Case]:
    """C02: a flag belongs to the step that ended the episode; V of the reset observation (50) is no successor."""
    return estimators(
        "C02",
        0.95,
        column(-1.792, -4, 1.91169, 0.98),
        column(-0.99, -1, 3.9602, 1.98),
        column(-1.99, -4, 1.9602, 0.98),
        {
            "rewards": column(0, -1, 2, 0),
            "values": column(1, 3, 2, 1),
            "next_values": column(3, 50, 1, 2),
            "last_value": torch.tensor([2.0]),
            "terminated": flags(0, 1, 0, 0),
            "gamma": 0.99,
        },
    )


def end_of_the_window() -> list[Case]:
    """C03: the last row is bootstrapped with the value of the observation after it."""
    window = {
        "rewards": torch.tensor([[0.0, 0], [0, 0], [5, -2]]),
        "values": torch.tensor([[1.0, 2], [2, 1], [3, 0]]),
        "last_value": torch.tensor([7.0, -3]),
        "terminated": torch.zeros(3, 2, dtype=torch.bool),
        "gamma": 0.95,
    }
    n_step = torch.tensor([[10.514125, -4.377125], [11.0675, -4.6075], [11.65, -4.85]])
    gae = torch.tensor([[7.95011625, -5.45047125], [8.24575, -5.14675], [8.65, -4.85]])
    pg = torch.tensor([[9.514125, -6.377125], [9.0675, -5.6075], [8.65, -4.85]])
    at_nine_tenths = estimators("C03", 0.9, gae, n_step, pg, window)
    del at_nine_tenths[2]  # V-trace's answer is known for lambda = 1
    at_one = estimators("C03 lambda 1", 1.0, n_step - window["values"], n_step, pg, window)
    last_row = {key: x[-1:] if key not in ("last_value", "gamma") else x for key, x in window.items()}
    last_row_alone = estimators("C03 last row", 0.9, gae[-1:], n_step[-1:], pg[-1:], last_row)
    return [*at_nine_tenths, *at_one, *last_row_alone]


def edge_coefficients() -> list[Case]:
    """C15 A: gamma and lambda at 0 and 1."""
    rewards, values = column(1, 2, 3), column(0.5, 1, 1.5)
    answers = {
        (1.0, 1.0): (7.5, 6, 3.5),
        (1.0, 0.0): (1.5, 2.5, 3.5),
        (0.9, 0.0): (1.4, 2.35, 3.3),
        (0.9, 1.0): (6.188, 5.32, 3.3),
        (0.0, 0.95): (0.5, 1, 1.5),
        (0.0, 0.0): (0.5, 1, 1.5),
    }
    inputs = {
        "rewards": rewards,
        "values": values,
        "last_value": torch.tensor([2.0]),
        "terminated": flags(0, 0, 0),
    }
    cases = []
    for (gamma, trace_lambda), answer in answers.items():
        name, advantages = f"C15 gamma {gamma} lambda {trace_lambda}", column(*answer)
        window = {**inputs, "gamma": gamma}
        cases += [
            Case(name, "gae", {**window, "gae_lambda": trace_lambda}, (advantages, advantages + values)),
            Case(name, "td_lambda", {**window, "td_lambda": trace_lambda}, (advantages + values,)),
        ]
    return cases


def flag_and_layout_case(rewards: Tensor | None = None) -> Case:
    """C18: the flags' dtype and the tensors' strides do not matter; ``rewards`` of 1 are given to expand them."""
    counted = torch.tensor([[0.25, 2.25, 0], [5, 3, 6.84375], [4, 8, 11.375], [8.5, 10, 11.5]])
    ones = torch.tensor([[0.4375, 1.5, -1], [1.75, 0, 0.46875], [-1, -0.25, 1.875], [0.5, 1, 1.5]])
    values = torch.tensor([[1.0, 0, 2], [0, 1, 1], [2, 2, 0], [1, 1, 1]])
    advantages = counted if rewards is None else ones
    inputs = {
        "rewards": torch.arange(12.0).view(4, 3) if rewards is None else rewards,
        "values": values,
        "last_value": torch.tensor([1.0, 2, 3]),
        "terminated": torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool),
        "gamma": 0.5,
        "gae_lambda": 0.5,
    }
    return Case("C18", "gae", inputs, (advantages, advantages + values))


def unflagged_row_before_filler() -> list[Case]:
    """A row directly before filler ends like a truncated one, flagged or not; only the filler row's value is read."""
    nan = float("nan")
    common = {"rewards": column(1, nan, 3), "terminated": flags(0, 1, 0), "valid": flags(1, 0, 1), "gamma": 0.5}
    values, last, on_policy = column(2, 4, 1), torch.tensor([6.0]), column(0, nan, 0)
    q = {"q_taken": column(2, nan, 1), "expected_q": values, "log_rhos": on_policy, "last_expected_q": last}
    inputs = {
        "gae": {"values": values, "last_value": last},
        "td_lambda": {"values": values, "last_value": last},
        "vtrace": {
            "values": values,
            "last_value": last,
            "behaviour_log_probs": on_policy,
            "target_log_probs": on_policy,
        },
        "retrace": q,
        "discounted_returns": {"last_value": last, "bootstrap_values": column(4, nan, nan)},
    }
    advantages, targets = column(1, 0, 5), column(3, 0, 6)
    expected = {"gae": (advantages, targets), "vtrace": (targets, advantages)}
    name = "row before filler"
    return [Case(name, key, {**common, **more}, expected.get(key, (targets,))) for key, more in inputs.items()]


def known_cases() -> list[Case]:
    return [
        *truncation_and_termination(),
        *flag_of_the_step(),
        *end_of_the_window(),
        *edge_coefficients(),
        flag_and_layout_case(),
        *unflagged_row_before_filler(),
    ]


def counting_window(length: int, num_envs: int, ends: tuple[int, ...] = ()) -> tuple[Inputs, Tensor]:
    """C15 B: rewards of 1 and no discount, so that A[t] counts the steps to the end, exactly in float32."""
    terminated = torch.zeros(length, num_envs, dtype=torch.bool)
    terminated[list(ends)] = True
    stops = torch.tensor([*(end + 1 for end in ends if end + 1 < length), length])
    steps = torch.arange(length)
    counted = (stops[torch.searchsorted(stops, steps, right=True)] - steps).float()
    inputs = {
        "rewards": torch.ones(length, num_envs),
        "values": torch.zeros(length, num_envs),
        "last_value": torch.zeros(num_envs),
        "terminated": terminated,
        "gamma": 1.0,
        "gae_lambda": 1.0,
    }
    return inputs, counted.unsqueeze(1).expand(length, num_envs)
