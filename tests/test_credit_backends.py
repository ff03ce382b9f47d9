"""What every backend keeps, through the public functions and against the float64 reference."""

from __future__ import annotations

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
    done_of,
    every_backend,
    every_cpu_backend,
    every_fast_backend,
    every_operation,
    flag_and_layout_case,
    in_layout,
    known_cases,
    random_window,
    replaced_rows,
    run,
    run_reference,
    sides,
    torch_mode,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

COEFFICIENTS = {
    "gae": {"gae_lambda"},
    "vtrace": {"vtrace_lambda", "rho_bar", "c_bar", "pg_rho_bar"},
    "retrace": {"retrace_lambda", "c_bar"},
    "retrace_categorical": {"retrace_lambda", "c_bar"},
    "td_lambda": {"td_lambda"},
    "eligibility_traces": {"trace_lambda"},
}


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
