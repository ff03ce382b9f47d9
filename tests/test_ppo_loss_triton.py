"""The fused loss kernels: what they write, how they compile, and what they do on a GPU."""

from __future__ import annotations

import csv
import gc
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from loss_cases import VARIANTS, assert_close, for_vtrace, leaves_of, problem, run, run_reference
from torch import Tensor

import kernels

triton_launch: Any = pytest.importorskip("kernels.triton_loss_launch", reason="needs Triton")

ROOT = pathlib.Path(__file__).parents[1]
on_cpu = pytest.mark.skipif(not triton_launch.INTERPRETED, reason="needs the Triton interpreter")


@on_cpu
@pytest.mark.parametrize("distribution", ["gaussian", "categorical"])
def test_every_element_of_every_output_is_written(distribution: str) -> None:
    arguments = problem(distribution, 301, 5, gathered=True)
    expected = run(arguments, "triton")
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.empty(1).isnan()
        got = run(arguments, "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


@on_cpu
@pytest.mark.parametrize("programs_joined_at_once", [1, 2])
def test_joining_the_sums_in_several_rounds_changes_no_result(
    programs_joined_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "_FINISH_BLOCK", programs_joined_at_once)
    arguments = problem("categorical", 601, 18)
    assert_close(run(arguments, "triton"), run_reference(arguments))


def test_every_kernel_of_an_update_compiles_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts" / "update_registers.py"), "80", "90", "100", "--hidden-sizes", "64"]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the same Triton as here
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert {row["kernel"] for row in rows} == {
        "forward_kernel", "finish_kernel", "backward_kernel", "layer_kernel", "input_gradient_kernel",
        "weight_gradient_kernel", "pack_kernel", "gather_kernel", "shuffle_kernel", "squares_kernel", "guard_kernel",
        "adam_kernel",
    }  # fmt: skip
    for row in rows:
        assert row["stack_bytes"] == "0", row
        assert int(row["registers"]) <= 255, row


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("distribution", "rows", "actions"),
    [("gaussian", 4097, 8), ("gaussian", 300, 21), ("categorical", 33, 3), ("categorical", 3, 4096)],
)
def test_on_a_gpu_both_losses_agree_with_the_reference(distribution: str, rows: int, actions: int) -> None:
    for variant in (VARIANTS[0], VARIANTS[-1]):
        arguments = problem(distribution, rows, actions, **variant)
        for each in (arguments, for_vtrace(arguments)):
            assert_close(run(each, "triton", "cuda"), run_reference(each))


@pytest.mark.gpu
def test_a_large_minibatch_agrees_with_the_torch_backend_and_repeats_bit_for_bit() -> None:
    arguments = problem("gaussian", 262_144, 8, gathered=True, moments=True)
    first, second = (run(arguments, "triton", "cuda") for _ in range(2))
    for name, x in first.items():
        assert torch.equal(second[name], x), name
    assert_close(first, run(arguments, "torch", "cuda"), rtol=1e-4)


def _on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in arguments.items()}


@pytest.mark.gpu
def test_a_replayed_graph_reads_inputs_and_coefficients_anew_and_allocates_nothing() -> None:
    cases = [_on_gpu(problem("gaussian", 4097, 8, seed)) for seed in (1, 2)]
    numbers = {name: torch.tensor(0.1, device="cuda") for name in ("clip_range", "value_clip_range", "entropy_coef")}
    static = {**_on_gpu(problem("gaussian", 4097, 8, 0)), **numbers}
    leaves = leaves_of(static, device="cuda")

    def step() -> Tensor:
        loss = kernels.ppo_loss(**{**static, **leaves}, backend="triton")
        gradients = torch.autograd.grad(loss.total, list(leaves.values()))
        return torch.cat([loss.report, *(x.flatten() for x in gradients)])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    gc.collect()  # what other tests left is not given back meanwhile
    gc.collect()  # what tests before this one left
    allocated = torch.cuda.memory_allocated()
    for case, clip in zip(cases, (0.1, 0.3), strict=True):
        for name, x in case.items():
            if isinstance(x, Tensor):
                {**static, **leaves}[name].detach().copy_(x)
        for x in numbers.values():
            x.fill_(clip)
        graph.replay()
        assert torch.equal(captured, step())
    for _ in range(20):
        graph.replay()
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device() -> None:
    arguments = _on_gpu(problem("gaussian", 4097, 8, moments=True))
    leaves = leaves_of(arguments, device="cuda")
    first = kernels.ppo_loss(**{**arguments, **leaves}).total
    first.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = kernels.ppo_loss(**{**arguments, **leaves}).total
        again.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


@pytest.mark.gpu
def test_an_inductor_graph_around_the_loss_agrees_with_the_reference() -> None:
    arguments = problem("gaussian", 4097, 8)
    there, leaves = _on_gpu(arguments), leaves_of(arguments, device="cuda")

    @torch.compile(fullgraph=True)
    def total(outputs: Tensor, values: Tensor, log_std: Tensor) -> Tensor:
        given = {"policy_outputs": 2.0 * outputs, "values": values, "log_std": log_std}
        return kernels.ppo_loss(**{**there, **given}, backend="triton").total

    total(0.5 * leaves["policy_outputs"], leaves["values"], leaves["log_std"]).backward()
    expected = run_reference(arguments)
    gradients = {f"d_{name}": leaf.grad.cpu() for name, leaf in leaves.items() if leaf.grad is not None}
    assert_close(gradients, {name: expected[name] for name in gradients})


@pytest.mark.gpu
def test_tensors_on_the_second_gpu_are_handled_there() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = problem("categorical", 301, 18)
    assert_close(run(arguments, "triton", "cuda:1"), run_reference(arguments))
