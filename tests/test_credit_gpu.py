"""What only a GPU shows of the Triton kernels: waits between programs, captures, streams, devices and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from credit_cases import OPERATIONS, assert_close, every_operation, in_layout, random_window, run, run_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels

pytestmark = pytest.mark.gpu

TRITON: dict[str, Any] = {"backend": "triton"}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_windows_agree_with_the_reference(data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(sorted(OPERATIONS)))
    length, envs = data.draw(st.sampled_from([1, 2, 31, 63, 200])), data.draw(st.sampled_from([1, 3, 33, 130]))
    inputs = random_window(operation, length, envs, data.draw(st.integers(0, 99)))
    inputs = in_layout(inputs, data.draw(st.sampled_from(["time-major", "env-major"])))
    assert_close(run(operation, inputs, device="cuda", **TRITON), run_reference(operation, inputs))


@every_operation
@pytest.mark.parametrize("shape", [(1000, 3), (2048, 64), (5000, 1)])
def test_long_windows_split_over_programs_agree_with_torch(operation: str, shape: tuple[int, int]) -> None:
    inputs = random_window(operation, *shape, 0)
    expected = run(operation, inputs, device="cuda", backend="torch", torch_mode="scan")
    for _ in range(3):
        assert_close(run(operation, inputs, device="cuda", **TRITON), expected)


@pytest.mark.parametrize("shape", [(128, 64), (2048, 64)])
def test_a_captured_call_replays_on_new_inputs_and_allocates_nothing(shape: tuple[int, int]) -> None:
    inputs = {k: x.cuda() if isinstance(x, Tensor) else x for k, x in random_window("gae", *shape, 0).items()}
    kernels.gae(**inputs, **TRITON, moments=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.gae(**inputs, **TRITON, moments=True)
    inputs["rewards"].normal_()
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(result, kernels.gae(**inputs, **TRITON, moments=True), strict=True):
        assert torch.equal(got, want)
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_two_captured_graphs_may_be_replayed_at_once() -> None:
    windows = [random_window("gae", 2048, 64, seed) for seed in range(2)]
    windows = [{k: x.cuda() if isinstance(x, Tensor) else x for k, x in window.items()} for window in windows]
    expected = [kernels.gae(**window, **TRITON, moments=True) for window in windows]
    graphs, results = [torch.cuda.CUDAGraph() for _ in windows], []
    for graph, window in zip(graphs, windows, strict=True):
        with torch.cuda.graph(graph):
            results.append([kernels.gae(**window, **TRITON, moments=True) for _ in range(3)])
    streams = [torch.cuda.Stream() for _ in windows]
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for calls, want in zip(results, expected, strict=True):
        for got in calls:
            for x, y in zip(got, want, strict=True):
                assert torch.equal(x, y)


def test_a_first_call_inside_a_capture_is_refused_and_the_stream_stays_usable() -> None:
    inputs = {k: x.cuda() if isinstance(x, Tensor) else x for k, x in random_window("gae", 77, 5, 0).items()}
    with pytest.raises(RuntimeError, match="call it once before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels.gae(**inputs, **TRITON)
    kernels.gae(**inputs, **TRITON)
    torch.cuda.synchronize()


def test_the_current_stream_is_used() -> None:
    inputs = {k: x.cuda() if isinstance(x, Tensor) else x for k, x in random_window("gae", 64, 4096, 0).items()}
    expected = kernels.gae(**inputs, **TRITON).advantages
    late = {**inputs, "rewards": torch.zeros_like(inputs["rewards"])}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late["rewards"].copy_(inputs["rewards"])
        got = kernels.gae(**late, **TRITON).advantages
    stream.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_are_solved_there() -> None:
    inputs = random_window("gae", 64, 33, 0)
    assert_close(run("gae", inputs, device="cuda:1", **TRITON), run_reference("gae", inputs))


@pytest.mark.parametrize("shape", [(32769, 65537), (16385, 32769)])
def test_more_than_two_to_the_31_elements_or_bytes_are_counted_exactly(shape: tuple[int, int]) -> None:
    length, envs = shape
    ones, zeros = (torch.tensor(x, device="cuda").expand(shape) for x in (1.0, 0.0))
    never = torch.tensor(False, device="cuda").expand(shape)
    out = tuple(torch.full(shape, torch.nan, device="cuda") for _ in range(2))
    last = torch.zeros(envs, device="cuda")
    kernels.gae(ones, zeros, last, never, gamma=1.0, gae_lambda=1.0, out=out, **TRITON)
    counted = torch.arange(length, 0, -1, device="cuda", dtype=torch.float32)
    for column in (0, 1, envs // 2, 65535 % envs, envs - 1):
        assert torch.equal(out[0][:, column], counted)
