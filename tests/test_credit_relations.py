"""Relations between calls that every backend keeps: windows that chain, ends that cut, filler that changes nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from credit_cases import (
    FLAGS,
    FORWARD,
    OPERATIONS,
    Inputs,
    assert_close,
    done_of,
    every_backend,
    every_operation,
    random_window,
    replaced_rows,
    rows_of,
    run,
    run_reference,
    sides,
)
from torch import Tensor

#: The value that a row hands to the one before it.
VALUES = {"gae": "values", "vtrace": "values", "td_lambda": "values", "retrace": "expected_q"}
#: Rows at which a window of 31 is cut in two.
CUTS = (1, 2, 15, 16, 30)


@every_backend
@pytest.mark.parametrize("operation", FORWARD)
def test_windows_of_a_forward_scan_chain_through_the_carry(operation: str, backend: dict[str, str]) -> None:
    whole = random_window(operation, 31, 7, 0, successors=True)
    values, carry = run(operation, whole, **backend)
    for cut in CUTS:
        first = run(operation, rows_of(whole, slice(cut)), **backend)
        for previous_done in (None, done_of(whole)[cut - 1] & whole["valid"][cut - 1]):
            after = {**rows_of(whole, slice(cut, None)), "carry": first[1], "previous_done": previous_done}
            second = run(operation, after, **backend)
            assert_close((torch.cat([first[0], second[0]]), second[1]), (values, carry))


@every_backend
@pytest.mark.parametrize("operation", FORWARD)
def test_half_precision_windows_chain_through_a_carry_of_full_precision(
    operation: str, backend: dict[str, str]
) -> None:
    whole = random_window(operation, 31, 7, 0, dtype=torch.bfloat16)
    exact = {**whole, "inputs": whole["inputs"].float()}
    first = run(operation, rows_of(whole, slice(16)), **backend)
    second = run(operation, {**rows_of(whole, slice(16, None)), "carry": first[1]}, **backend)
    assert (first[0].dtype, second[0].dtype) == (torch.bfloat16, torch.bfloat16)
    assert (first[1].dtype, second[1].dtype) == (torch.float32, torch.float32)
    assert_close(second[1:], run(operation, exact, **backend)[1:])


def handed_back(operation: str, window: Inputs, results: tuple[Tensor, ...]) -> Tensor:
    """What the window before is bootstrapped with, so that its rows come out as if the windows were one."""
    if operation == "gae":
        handed = window["values"] + window["gae_lambda"] * results[0]
    elif operation == "td_lambda":
        handed = (1 - window["td_lambda"]) * window["values"] + window["td_lambda"] * results[0]
    elif operation == "retrace":
        c = window["log_rhos"].exp().clamp(max=1)
        handed = window["expected_q"] + c * (results[0] - window["q_taken"])
    else:  # V-trace with lambda 1, and the discounted returns: the target itself
        handed = results[0]
    follows = window["valid"][0]
    return handed[0] if operation not in VALUES else torch.where(follows, handed[0], window[VALUES[operation]][0])


@every_backend
@pytest.mark.parametrize("operation", ["gae", "td_lambda", "vtrace", "retrace", "discounted_returns"])
def test_windows_of_a_backward_scan_chain_through_the_bootstrap(operation: str, backend: dict[str, str]) -> None:
    whole = random_window(operation, 31, 7, 0)
    whole |= {"gae": {"gae_lambda": 0.8}, "td_lambda": {"td_lambda": 0.8}}.get(operation, {})
    results = run(operation, whole, **backend)
    last = "last_expected_q" if operation == "retrace" else "last_value"
    for cut in CUTS:
        window = rows_of(whole, slice(cut, None))
        after = run(operation, window, **backend)
        handed = handed_back(operation, window, after)
        if operation in VALUES:  # a done row is bootstrapped with the bare value
            handed = torch.where(done_of(whole)[cut - 1], window[VALUES[operation]][0], handed)
        before = run(operation, {**rows_of(whole, slice(cut)), last: handed}, **backend)
        assert_close(tuple(torch.cat(pair) for pair in zip(before, after, strict=True)), results)


@every_operation
@every_backend
def test_nothing_beyond_an_end_changes_what_is_on_this_side(operation: str, backend: dict[str, str]) -> None:
    window = random_window(operation, 31, 3, 4, filler=False)
    results = run(operation, window, **backend)
    done = done_of(window)
    ends = done[:-1].nonzero().tolist()
    assert {bool(window["terminated"][t, env]) for t, env in ends[:4]} == {False, True}
    for t, env in ends[:4]:
        here, beyond = sides(operation, t)
        changed = replaced_rows(window, beyond, env)
        if window["truncated"][t, env]:  # V of the final observation belongs to this side
            for name in OPERATIONS[operation]:
                changed[name][t + 1, env] = window[name][t + 1, env]
        got = run(operation, changed, **backend)
        assert all(torch.equal(a[here], b[here]) for a, b in zip(got[:1], results[:1], strict=True))


@functools.cache
def poisoned_window(operation: str, length: int, num_envs: int, seed: int) -> tuple[Inputs, Inputs, Tensor]:
    """A window with NaN and infinities in every other episode, the same without, and the rows of those episodes."""
    clean = random_window(operation, length, num_envs, seed, filler=False, successors=operation not in FORWARD)
    starts = torch.cat([torch.zeros(1, num_envs, dtype=torch.bool), done_of(clean)[:-1]])
    poisoned = (starts.cumsum(0) + torch.arange(num_envs)) % 2 == 1
    inputs = dict(clean)
    for i, (name, x) in enumerate(clean.items()):
        if isinstance(x, Tensor) and x.dim() > 1 and name not in (*FLAGS, "actions"):
            poison = (torch.nan, torch.inf, -torch.inf)[i % 3]
            mask = poisoned if x.dim() == 2 else poisoned.unsqueeze(-1)
            inputs[name] = torch.where(mask, poison, x)
    return inputs, clean, poisoned


@every_operation
@every_backend
@pytest.mark.parametrize("seed", range(3))
def test_nan_and_inf_stay_in_their_episode(operation: str, backend: dict[str, str], seed: int) -> None:
    inputs, clean, poisoned = poisoned_window(operation, 63, 5, seed)
    assert poisoned.any()
    for got, expected in zip(run(operation, inputs, **backend), run(operation, clean, **backend), strict=True):
        kept = ~poisoned if got.dim() == 2 else ~poisoned[-1] | done_of(inputs)[-1]
        assert torch.equal(got[kept], expected[kept])


def with_filler(inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Put a filler row after every done row but the last, in all envs alike; also tell where the old rows are now."""
    done = done_of(inputs).any(1)
    positions = torch.arange(len(done)) + torch.cat([torch.zeros(1), done[:-1]]).cumsum(0).long()
    spread = {"valid": torch.zeros(int(positions[-1]) + 1, done_of(inputs).shape[1], dtype=torch.bool)}
    spread["valid"][positions] = True
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() > 1:
            empty = 0 if not x.is_floating_point() else torch.nan
            x, original = x.new_full((len(spread["valid"]), *x.shape[1:]), empty), x
            x[positions] = original
        spread[name] = x
    return spread, positions


@every_operation
@every_backend
def test_a_filler_row_after_a_done_row_leaves_the_others_as_they_were(operation: str, backend: dict[str, str]) -> None:
    window = random_window(operation, 31, 3, 5, filler=False, successors=operation not in FORWARD)
    for name in ("terminated", "truncated"):  # one schedule of ends, so that one filler row serves all envs
        window[name] = window[name][:, :1].expand(-1, 3)
    spread, positions = with_filler(window)
    for got, expected in zip(run(operation, spread, **backend), run(operation, window, **backend), strict=True):
        if got.dim() == 2:
            assert not got[~spread["valid"]].any()
            got = got[positions]
        assert_close((got,), (expected,))


@every_backend
def test_a_filler_row_hands_over_the_final_value_like_next_values(backend: dict[str, str]) -> None:
    """Next-step autoreset (values[t + 1] of the filler row) and same-step autoreset (next_values) are one."""
    window = random_window("gae", 31, 3, 6, filler=False)
    for name in ("terminated", "truncated"):
        window[name] = window[name][:, :1].expand(-1, 3)
    done = done_of(window)
    final_values = torch.randn(31, 3, generator=torch.Generator().manual_seed(0))
    following = torch.cat([window["values"][1:], window["last_value"].unsqueeze(0)])
    same_step = {**window, "next_values": torch.where(done, final_values, following)}
    next_step, positions = with_filler(window)
    filler = (~next_step["valid"][:, 0]).nonzero().flatten()
    next_step["values"][filler] = final_values[:-1][done[:-1, 0]]
    next_step["last_value"] = torch.where(done[-1], final_values[-1], window["last_value"])
    got = run("gae", next_step, **backend)
    assert_close(tuple(x[positions] for x in got), run("gae", same_step, **backend))


@every_backend
def test_vtrace_on_policy_with_lambda_one_is_gae_plus_values(backend: dict[str, str]) -> None:
    window = random_window("gae", 63, 3, 7)
    log_probs = torch.where(window["valid"], -1.5, torch.nan)
    vtrace = run("vtrace", {**window, "behaviour_log_probs": log_probs, "target_log_probs": log_probs}, **backend)
    gae = run("gae", {**window, "gae_lambda": 1.0}, **backend)
    assert_close(vtrace[:1], gae[1:])


@every_backend
def test_td_lambda_is_gae_plus_values(backend: dict[str, str]) -> None:
    window = random_window("gae", 63, 3, 8)
    targets = run("td_lambda", {**window, "td_lambda": 0.9}, **backend)
    assert_close(targets, run("gae", {**window, "gae_lambda": 0.9}, **backend)[1:])


@every_backend
@pytest.mark.parametrize("action", [-1, 3, 2**32])
def test_an_action_that_is_none_reads_nothing_and_gives_nan(action: int, backend: dict[str, str]) -> None:
    window = random_window("retrace_categorical", 6, 3, 0, filler=False)
    assert window["q_values"].shape[2] == 3
    window["actions"][4, 1] = action
    got = run("retrace_categorical", window, **backend)
    assert got[0][4, 1].isnan()
    assert not got[0][:, [0, 2]].isnan().any()
    assert_close(got, run_reference("retrace_categorical", window))


@every_backend
def test_retrace_categorical_is_retrace_of_its_expectations(backend: dict[str, str]) -> None:
    window = random_window("retrace_categorical", 31, 3, 9)
    actions = window["actions"].clamp(min=0).unsqueeze(-1)
    log_probs = window["target_log_probs"]
    parts = {
        "q_taken": window["q_values"].gather(-1, actions).squeeze(-1),
        "expected_q": (log_probs.exp() * window["q_values"]).sum(-1),
        "log_rhos": log_probs.gather(-1, actions).squeeze(-1) - window["behaviour_log_probs"],
    }
    kept = ("rewards", "last_expected_q", "terminated", "truncated", "valid", "gamma")
    inputs = {**{name: window[name] for name in kept}, **parts}
    assert_close(run("retrace", inputs, **backend), run("retrace_categorical", window, **backend))


@every_backend
def test_moments_are_those_of_the_valid_advantages(backend: dict[str, str]) -> None:
    for operation, advantages in (("gae", 0), ("vtrace", 1)):
        window = random_window(operation, 63, 3, 10)
        results = run(operation, window, moments=True, **backend)
        kept = results[advantages][window["valid"]].double()
        expected = torch.stack([torch.tensor(float(kept.numel())), kept.mean(), (kept - kept.mean()).square().sum()])
        assert_close(results[2:], (expected,))
