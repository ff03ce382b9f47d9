"""What every backend keeps, through the public functions and against the float64 reference."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch._inductor.config
from credit_cases import (
    FLAGS,
    FORWARD,
    LAYOUTS,
    OPERATIONS,
    Case,
    Inputs,
    assert_close,
    counting_window,
    flag_and_layout_case,
    in_layout,
    known_cases,
    random_window,
    run,
    run_reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels

BACKWARD = [operation for operation in OPERATIONS if operation not in FORWARD]
VALUES = {"gae": "values", "vtrace": "values", "td_lambda": "values", "retrace": "expected_q"}
#: Rows at which a window of 31 is cut in two.
CUTS = (1, 2, 15, 16, 30)
COEFFICIENTS = {
    "gae": {"gae_lambda"},
    "vtrace": {"vtrace_lambda", "rho_bar", "c_bar", "pg_rho_bar"},
    "retrace": {"retrace_lambda", "c_bar"},
    "retrace_categorical": {"retrace_lambda", "c_bar"},
    "td_lambda": {"td_lambda"},
    "eligibility_traces": {"trace_lambda"},
}


def torch_mode(mode: str) -> dict[str, str]:
    return {"backend": "torch", "torch_mode": mode}


ON_CPU = [
    pytest.param(torch_mode("loop"), id="loop"),
    pytest.param(torch_mode("scan"), id="scan"),
    pytest.param(
        {"backend": "triton"},
        id="triton",
        marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the Triton interpreter"),
    ),
]
ON_GPU = [
    pytest.param({**torch_mode("scan"), "device": "cuda"}, id="scan-cuda", marks=pytest.mark.gpu),
    pytest.param({"backend": "triton", "device": "cuda"}, id="triton-cuda", marks=pytest.mark.gpu),
]

every_operation = pytest.mark.parametrize("operation", OPERATIONS)
every_backend = pytest.mark.parametrize("backend", ON_CPU + ON_GPU)
every_cpu_backend = pytest.mark.parametrize("backend", ON_CPU)
#: Without the interpreter, which takes seconds for a thousand rows.
every_fast_backend = pytest.mark.parametrize("backend", [*ON_CPU[:2], *ON_GPU])


@pytest.fixture
def compile_in_this_process() -> Any:
    """Workers cost more than they save on a few small graphs."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


def same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# --- known answers --------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("case", known_cases(), ids=lambda case: f"{case.operation}-{case.name}")
def test_the_known_answers_come_out(case: Case, backend: dict[str, str]) -> None:
    assert_close(run(case.operation, case.inputs, **backend), case.expected)


@every_fast_backend
def test_steps_are_counted_exactly_for_every_length_and_width(backend: dict[str, str]) -> None:
    lengths = (1, 2, 3, 7, 31, 33, 63, 65, 127, 129, 1000, 1023, 1025, 4097)
    for length, num_envs in [(length, num_envs) for length in lengths for num_envs in (1, 2, 3, 33)]:
        inputs, counted = counting_window(length, num_envs)
        assert torch.equal(run("gae", inputs, **backend)[0], counted), (length, num_envs)


@pytest.mark.parametrize("length", [65537, 1000003])
def test_steps_are_counted_exactly_over_a_very_long_window(length: int) -> None:
    inputs, counted = counting_window(length, 2)
    assert torch.equal(run("gae", inputs, **torch_mode("scan"))[0], counted)


@every_fast_backend
@pytest.mark.parametrize("ends", [(511, 1023), (512,)])
def test_counting_starts_anew_after_an_end(ends: tuple[int, ...], backend: dict[str, str]) -> None:
    inputs, counted = counting_window(1025, 3, ends)
    assert torch.equal(run("gae", inputs, **backend)[0], counted)


@every_cpu_backend
def test_rows_more_than_two_to_the_31_elements_apart_are_read_right(backend: dict[str, str]) -> None:
    rewards = torch.empty(2**31 + 1024, dtype=torch.bfloat16).as_strided((2, 1024), (2**31, 1))
    rewards[0], rewards[1] = 1, 2
    zeros, last = torch.zeros(2, 1024, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16)
    never = torch.zeros(2, 1024, dtype=torch.bool)
    advantages = kernels.gae(rewards, zeros, last, never, gamma=0.5, gae_lambda=1.0, **backend).advantages
    assert torch.equal(advantages, torch.full((2, 1024), 2.0, dtype=torch.bfloat16))


# --- input forms ----------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("number", [True, 1, 255])
def test_any_nonzero_flag_is_true(number: int, backend: dict[str, str]) -> None:
    case = flag_and_layout_case()
    dtype = torch.bool if number is True else torch.uint8
    inputs = {**case.inputs, "terminated": case.inputs["terminated"].to(dtype) * number}
    assert_close(run("gae", inputs, **backend), case.expected)


@every_backend
@pytest.mark.parametrize("layout", [*LAYOUTS, "mixed"])
def test_strides_do_not_matter(layout: str, backend: dict[str, str]) -> None:
    case = flag_and_layout_case()
    assert_close(run("gae", in_layout(case.inputs, layout), **backend), case.expected)


@every_backend
def test_expanded_tensors_are_read_in_place(backend: dict[str, str]) -> None:
    case = flag_and_layout_case(rewards=torch.ones(1, 1).expand(4, 3))
    assert_close(run("gae", case.inputs, **backend), case.expected)


@every_operation
@every_cpu_backend
@pytest.mark.parametrize("successors", [False, True])
def test_inputs_are_left_as_they_were(operation: str, backend: dict[str, str], successors: bool) -> None:
    inputs = random_window(operation, 17, 3, 0, successors=successors)
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)}
    run(operation, inputs, **backend)
    for name, x in before.items():
        torch.testing.assert_close(inputs[name], x, rtol=0, atol=0, equal_nan=True)


@every_operation
@every_cpu_backend
def test_inputs_that_require_grad_are_constants(operation: str, backend: dict[str, str]) -> None:
    inputs = random_window(operation, 5, 3, 0)
    tracked = {
        name: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    results = run(operation, tracked, **backend)
    assert not any(result.requires_grad for result in results)
    assert same(results, run(operation, inputs, **backend))


@every_operation
@every_cpu_backend
def test_every_element_of_the_given_outputs_is_written(operation: str, backend: dict[str, str]) -> None:
    inputs = random_window(operation, 33, 3, 1)
    expected = run(operation, inputs, **backend)
    out = tuple(torch.full_like(x, torch.nan) for x in expected)
    assert run(operation, inputs, out=out, **backend)[0] is out[0]
    assert same(out, expected)


@every_operation
@every_backend
@pytest.mark.parametrize(("length", "num_envs"), [(0, 3), (5, 0), (0, 0)])
def test_empty_windows_give_empty_results(operation: str, backend: dict[str, str], length: int, num_envs: int) -> None:
    inputs = random_window(operation, max(length, 1), max(num_envs, 1), 0, successors=True)
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            inputs[name] = x[:num_envs] if x.dim() == 1 else x[:length, :num_envs]
    results = run(operation, inputs, **backend)
    assert results[0].shape == (length, num_envs)
    if operation in FORWARD:
        assert same(results[1:], (torch.where(inputs["previous_done"], 0, inputs["carry"]),))


@every_operation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(operation: str, dtype: torch.dtype) -> None:
    inputs = random_window(operation, 63, 3, 0, dtype=dtype)
    for mode in ("loop", "scan"):
        results = run(operation, inputs, out_dtype=torch.float32, **torch_mode(mode))
        assert_close(results, run_reference(operation, inputs), torch.float32)


def test_auto_is_the_scan_on_a_cpu() -> None:
    inputs = random_window("gae", 63, 3, 0)
    assert same(run("gae", inputs, **torch_mode("auto")), run("gae", inputs, **torch_mode("scan")))


# --- against the reference ------------------------------------------------------------------------------------------


@st.composite
def windows(draw: st.DrawFn, operation: str) -> tuple[Inputs, torch.dtype]:
    """Random windows of any size, layout, dtype, flags and coefficients."""
    length = draw(st.one_of(st.sampled_from([1, 2, 63]), st.integers(1, 70)))
    num_envs = draw(st.sampled_from([1, 3, 7]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    inputs = random_window(
        operation,
        length,
        num_envs,
        draw(st.integers(0, 2**20)),
        filler=draw(st.booleans()),
        successors=draw(st.booleans()),
        dtype=dtype,
    )
    if draw(st.booleans()):
        inputs = {name: x.byte() * 3 if name in FLAGS else x for name, x in inputs.items()}
    if "gamma" in inputs:
        per_env = torch.linspace(0, 1, num_envs)
        inputs["gamma"] = draw(st.sampled_from([0.0, 0.5, 0.99, 1.0, per_env]))
    for name in sorted(COEFFICIENTS.get(operation, ())):
        inputs[name] = draw(st.sampled_from([0.0, 0.5, 0.95, 1.0] if "lambda" in name else [0.5, 1.0, 1.5]))
    return in_layout(inputs, draw(st.sampled_from([*LAYOUTS, "mixed"]))), dtype


@every_operation
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_mode_agrees_with_the_reference(operation: str, data: st.DataObject) -> None:
    inputs, dtype = data.draw(windows(operation))
    expected = run_reference(operation, inputs)
    for mode in ("loop", "scan"):
        assert_close(run(operation, inputs, **torch_mode(mode)), expected, dtype)


@every_operation
@pytest.mark.usefixtures("compile_in_this_process")
def test_the_compiled_scan_agrees_with_the_reference_and_reads_nothing_beyond_an_end(operation: str) -> None:
    inputs = random_window(operation, 5, 3, 2, successors=operation in FORWARD)
    results = run(operation, inputs, **torch_mode("compiled"))
    assert_close(results, run_reference(operation, inputs))
    t, env = (done_of(inputs) & inputs["valid"])[:-1].nonzero()[0].tolist()
    here, beyond = sides(operation, t)
    changed = replaced_rows(inputs, beyond, env, but=OPERATIONS[operation])
    assert torch.equal(run(operation, changed, **torch_mode("compiled"))[0][here], results[0][here])


@pytest.mark.gpu
@every_operation
@pytest.mark.parametrize("mode", ["loop", "scan", "compiled"])
def test_every_mode_agrees_with_the_reference_on_a_gpu(operation: str, mode: str) -> None:
    inputs = random_window(operation, 257, 5, 0, successors=True)
    assert_close(run(operation, inputs, device="cuda", **torch_mode(mode)), run_reference(operation, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_compiled_scan_takes_any_layout_on_a_gpu(layout: str) -> None:
    inputs = random_window("gae", 257, 5, 0)
    on_gpu = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    results = run("gae", in_layout(on_gpu, layout), device="cuda", **torch_mode("compiled"))
    assert_close(results, run_reference("gae", inputs))


# --- relations between calls ----------------------------------------------------------------------------------------


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """The same window, cut to some rows; what is ``[N]`` stays."""
    return {name: x[rows] if isinstance(x, Tensor) and x.dim() > 1 else x for name, x in inputs.items()}


def done_of(inputs: Inputs) -> Tensor:
    return inputs["terminated"] | inputs["truncated"]


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
    whole |= {name: 0.8 for name in COEFFICIENTS.get(operation, ()) if operation in ("gae", "td_lambda")}
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


def replaced_rows(inputs: Inputs, rows: slice, env: int, *, but: tuple[str, ...] = ()) -> Inputs:
    """Turn everything in these rows of one env into NaN (or garbage), flags and ``but`` apart."""
    replaced = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() > 1 and name not in (*FLAGS, *but):
            replaced[name] = x.clone()
            replaced[name][rows, env] = 0 if name == "actions" else torch.nan
    return replaced


def sides(operation: str, t: int) -> tuple[slice, slice]:
    """The rows that the end at t keeps apart: those whose results count, and those that may not reach them."""
    early, late = slice(None, t + 1), slice(t + 1, None)
    return (late, early) if operation in FORWARD else (early, late)


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
