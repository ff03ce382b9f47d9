"""What the tests of the credit operations share: known answers, random windows, layouts, tolerances, backends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from credit_answers import Case, Inputs, column, counting_window, flag_and_layout_case, flags, known_cases
from torch import Tensor

import kernels
from kernels import reference

__all__ = [
    "CPU_BACKENDS",
    "FLAGS",
    "FORWARD",
    "GPU_BACKENDS",
    "LAYOUTS",
    "OPERATIONS",
    "Case",
    "Inputs",
    "as_tuple",
    "assert_close",
    "column",
    "counting_window",
    "done_of",
    "every_backend",
    "every_cpu_backend",
    "every_fast_backend",
    "every_operation",
    "flag_and_layout_case",
    "flags",
    "in_layout",
    "known_cases",
    "random_window",
    "replaced_rows",
    "rows_of",
    "run",
    "run_reference",
    "sides",
    "torch_mode",
]

#: Name of every operation, and the inputs whose value is V of the row's observation: the only ones read in filler rows.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "gae": ("values",),
    "vtrace": ("values",),
    "retrace": ("expected_q",),
    "retrace_categorical": ("q_values", "target_log_probs"),
    "td_lambda": ("values",),
    "discounted_returns": (),
    "eligibility_traces": (),
    "episodic_prefix_sum": (),
}
FORWARD = ("eligibility_traces", "episodic_prefix_sum")
FLAGS = ("terminated", "truncated", "valid", "previous_done")
NUM_ACTIONS = 3


# --- running and comparing ------------------------------------------------------------------------------------------


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def run(operation: str, inputs: Mapping[str, Any], *, device: str = "cpu", **options: Any) -> tuple[Tensor, ...]:
    """Call the public operation on a device, results on the CPU; ``options`` are backend, torch_mode, out and so on."""
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return tuple(x.cpu() for x in as_tuple(getattr(kernels, operation)(**there, **options)))


def run_reference(operation: str, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return as_tuple(getattr(reference, operation)(**inputs))


#: Half precision: one unit in the last place. float32 and float64: about a hundred of them, for sums of up to 70 terms.
_RELATIVE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> None:
    """Compare outputs computed in ``dtype``; the absolute part scales with the largest value, since sums may cancel."""
    tolerance = _RELATIVE[dtype]
    for got, want in zip(actual, expected, strict=True):
        want = want.double()
        finite = want[want.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# --- random windows -------------------------------------------------------------------------------------------------


def random_flags(length: int, num_envs: int, generator: torch.Generator, filler: bool) -> Inputs:
    """All kinds of end: terminated, truncated, both, window end; filler after done rows, at t = 0, and in a row."""
    draw = torch.rand(3, length, num_envs, generator=generator)
    terminated, truncated = draw[0] < 0.12, draw[1] < 0.12
    ends = {"terminated": terminated, "truncated": truncated}
    if not filler:
        return ends
    valid = torch.ones(length, num_envs, dtype=torch.bool)
    after_done = torch.ones(num_envs, dtype=torch.bool)
    for t in range(length):
        valid[t] = ~(after_done & (draw[2, t] < 0.5))
        after_done = torch.where(valid[t], terminated[t] | truncated[t], after_done)
    # What a filler row's flags hold is never read: leave them random.
    return {**ends, "valid": valid}


def random_window(
    operation: str,
    length: int,
    num_envs: int,
    seed: int,
    *,
    filler: bool = True,
    successors: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Keyword arguments of an operation; what may not be read in filler rows is NaN or no index there.

    ``successors`` gives ``next_values`` (and its like), and the carry of the forward operations, explicitly.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = random_flags(length, num_envs, generator, filler)

    def rows(*shape: int) -> Tensor:
        return torch.randn(length, num_envs, *shape, generator=generator).to(dtype)

    def row() -> Tensor:
        return torch.randn(num_envs, generator=generator).to(dtype)

    inputs = _BUILDERS[operation](rows, row, generator, successors)
    if operation == "discounted_returns":
        inputs["bootstrap_values"] = rows()
    if filler:
        for name, x in inputs.items():
            if x.shape[:2] == ends["valid"].shape and name not in OPERATIONS[operation]:
                unread = -7 if name == "actions" else float("nan")
                inputs[name] = torch.where(ends["valid"], x, unread)
    if operation != "episodic_prefix_sum":
        inputs["gamma"] = 0.97
    return {**inputs, **ends}


_Draw = Callable[..., Tensor]


def _valued(rows: _Draw, row: _Draw, generator: torch.Generator, successors: bool) -> Inputs:
    optional = {"next_values": rows()} if successors else {}
    return {"rewards": rows(), "values": rows(), "last_value": row(), **optional}


def _vtrace(rows: _Draw, row: _Draw, generator: torch.Generator, successors: bool) -> Inputs:
    log_probs = {"behaviour_log_probs": rows(), "target_log_probs": rows()}
    return {**_valued(rows, row, generator, successors), **log_probs}


def _retrace(rows: _Draw, row: _Draw, generator: torch.Generator, successors: bool) -> Inputs:
    optional = {"next_expected_q": rows()} if successors else {}
    each = {name: rows() for name in ("rewards", "q_taken", "expected_q", "log_rhos")}
    return {**each, "last_expected_q": row(), **optional}


def _retrace_categorical(rows: _Draw, row: _Draw, generator: torch.Generator, successors: bool) -> Inputs:
    optional = {"next_expected_q": rows()} if successors else {}
    rewards = rows()
    return {
        "rewards": rewards,
        "q_values": rows(NUM_ACTIONS),
        "target_log_probs": rows(NUM_ACTIONS).float().log_softmax(-1).to(rewards.dtype),
        "behaviour_log_probs": -rows().abs(),
        "actions": torch.randint(NUM_ACTIONS, rewards.shape, generator=generator),
        "last_expected_q": row(),
        **optional,
    }


def _discounted(rows: _Draw, row: _Draw, generator: torch.Generator, successors: bool) -> Inputs:
    return {"rewards": rows(), "last_value": row()}


def _forward(rows: _Draw, row: _Draw, generator: torch.Generator, successors: bool) -> Inputs:
    inputs = rows()
    optional = {"carry": row(), "previous_done": torch.rand(inputs.shape[1], generator=generator) < 0.3}
    return {"inputs": inputs, **(optional if successors else {})}


_BUILDERS: dict[str, Callable[[_Draw, _Draw, torch.Generator, bool], Inputs]] = {
    "gae": _valued,
    "vtrace": _vtrace,
    "retrace": _retrace,
    "retrace_categorical": _retrace_categorical,
    "td_lambda": _valued,
    "discounted_returns": _discounted,
    "eligibility_traces": _forward,
    "episodic_prefix_sum": _forward,
}


# --- layouts --------------------------------------------------------------------------------------------------------


def _sliced(x: Tensor) -> Tensor:
    wide = x.new_zeros([2 * size for size in x.shape[:2]] + list(x.shape[2:]))
    every_second = wide[tuple(slice(None, None, 2) for _ in x.shape[:2])]
    return every_second.copy_(x)


def _offset(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


#: The same values in other memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "time-major": lambda x: x,
    "env-major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x,
    "sliced": _sliced,
    "offset": _offset,
}


def in_layout(inputs: Inputs, layout: str) -> Inputs:
    """All tensors in one layout, or each in another (``mixed``)."""
    layouts = list(LAYOUTS.values())
    return {
        name: (layouts[i % len(layouts)] if layout == "mixed" else LAYOUTS[layout])(x) if isinstance(x, Tensor) else x
        for i, (name, x) in enumerate(inputs.items())
    }


# --- edits ----------------------------------------------------------------------------------------------------------


def done_of(inputs: Inputs) -> Tensor:
    return inputs["terminated"] | inputs["truncated"]


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """The same window, cut to some rows; what is ``[N]`` stays."""
    return {name: x[rows] if isinstance(x, Tensor) and x.dim() > 1 else x for name, x in inputs.items()}


def sides(operation: str, t: int) -> tuple[slice, slice]:
    """The rows that the end at t keeps apart: those whose results count, and those that may not reach them."""
    early, late = slice(None, t + 1), slice(t + 1, None)
    return (late, early) if operation in FORWARD else (early, late)


def replaced_rows(inputs: Inputs, rows: slice, env: int, *, but: tuple[str, ...] = ()) -> Inputs:
    """Turn everything in these rows of one env into NaN (or garbage), flags and ``but`` apart."""
    replaced = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() > 1 and name not in (*FLAGS, *but):
            replaced[name] = x.clone()
            replaced[name][rows, env] = 0 if name == "actions" else torch.nan
    return replaced


# --- backends -------------------------------------------------------------------------------------------------------


def torch_mode(mode: str) -> dict[str, str]:
    return {"backend": "torch", "torch_mode": mode}


CPU_BACKENDS = [
    pytest.param(torch_mode("loop"), id="loop"),
    pytest.param(torch_mode("scan"), id="scan"),
    pytest.param(
        {"backend": "triton"},
        id="triton",
        marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the Triton interpreter"),
    ),
]
GPU_BACKENDS = [
    pytest.param({**torch_mode("scan"), "device": "cuda"}, id="scan-cuda", marks=pytest.mark.gpu),
    pytest.param({"backend": "triton", "device": "cuda"}, id="triton-cuda", marks=pytest.mark.gpu),
]

every_operation = pytest.mark.parametrize("operation", OPERATIONS)
every_backend = pytest.mark.parametrize("backend", CPU_BACKENDS + GPU_BACKENDS)
every_cpu_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)
#: Without the interpreter, which takes seconds for a thousand rows.
every_fast_backend = pytest.mark.parametrize("backend", [*CPU_BACKENDS[:2], *GPU_BACKENDS])
