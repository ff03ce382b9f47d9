"""The Triton kernels: every kind of tile gives the same answers, and a launch does nothing but what it should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from credit_cases import (
    FORWARD,
    OPERATIONS,
    assert_close,
    counting_window,
    in_layout,
    random_window,
    run,
    run_reference,
)
from torch import Tensor

import kernels

launch: Any = pytest.importorskip("kernels.triton_launch", reason="needs Triton")
tiles: Any = pytest.importorskip("kernels.triton_tiles", reason="needs Triton")

TRITON = {"backend": "triton"}
NAN = float("nan")
#: One tile of each kind: one run, runs side by side, several tiles in turn, time split over programs, a single env.
TILES = {
    "one-run": tiles.Tile(1, 8, 4, 1),
    "side-by-side": tiles.Tile(8, 4, 2, 1),
    "in-turn": tiles.Tile(2, 4, 4, 1, stages=2),
    "split": tiles.Tile(2, 2, 2, 1, split=True, group=2),
    "one-env": tiles.Tile(4, 1, 8, 1),
    "read-twice": tiles.Tile(2, 2, 2, 1, chunks=2),
}
on_cpu = pytest.mark.skipif(not launch.INTERPRETED, reason="needs the Triton interpreter")
every_tile = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make every launch of a test take one tile."""

    def forget() -> None:
        launch._plans.clear()
        launch._recent.clear()

    def take(tile: Any) -> None:
        forget()
        actions = tile._replace(actions=4)
        monkeypatch.setattr(launch, "choose", lambda *arguments: actions if arguments[-1] else tile)

    yield take
    forget()


# --- tiles ----------------------------------------------------------------------------------------------------------


@on_cpu
@every_operation
@every_tile
@pytest.mark.parametrize("layout", ["time", "env"])
def test_every_kind_of_tile_agrees_with_the_reference(operation: str, tile: Any, layout: str, use: Any) -> None:
    use(tile)
    inputs = random_window(operation, 21, 3, 0, successors=operation != "retrace_categorical")
    expected = run_reference(operation, inputs)
    forms = {"time": inputs, "env": in_layout(inputs, "env-major")}
    assert_close(run(operation, forms[layout], **TRITON), expected)


@on_cpu
@pytest.mark.parametrize("length", [1, 3, 7, 33])
@pytest.mark.parametrize("chunks", [1, 2])
def test_splitting_time_changes_no_count(length: int, chunks: int, use: Any) -> None:
    use(TILES["split"]._replace(chunks=chunks))
    inputs, counted = counting_window(length, 3)
    for _ in range(2):  # the second launch finds the words as the first one left them
        assert torch.equal(run("gae", inputs, **TRITON)[0], counted)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numbers_of_launches_may_wrap_around(dtype: torch.dtype, use: Any) -> None:
    use(TILES["split"])
    inputs, counted = counting_window(13, 3)
    inputs = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
    run("gae", inputs, **TRITON)
    (entry,) = launch._plans.values()
    (workspace,) = entry.plan.workspaces.used.values()
    workspace.tensors[2].fill_(-1)  # every word of launch 2^32 - 1
    for _ in range(2):
        assert torch.equal(run("gae", inputs, **TRITON)[0], counted.to(dtype))


@on_cpu
@pytest.mark.parametrize("group", [2, 4, 16])
def test_more_tiles_than_one_group_of_maps_chain_exactly(group: int, use: Any) -> None:
    use(tiles.Tile(1, 2, 1, 1, split=True, group=group))
    inputs, counted = counting_window(19, 2, (4, 17))
    assert torch.equal(run("gae", inputs, **TRITON)[0], counted)


@on_cpu
@pytest.mark.parametrize("operation", FORWARD)
@pytest.mark.parametrize("tile", ["in-turn", "split"])
def test_two_windows_chain_to_the_whole(operation: str, tile: str, use: Any) -> None:
    use(TILES[tile])
    whole = random_window(operation, 19, 3, 1)
    expected, carry = run(operation, whole, **TRITON)
    rows = [name for name, x in whole.items() if isinstance(x, Tensor) and x.dim() == 2]
    first = {**whole, **{name: whole[name][:7] for name in rows}}
    head, middle = run(operation, first, **TRITON)
    done = (whole["terminated"] | whole["truncated"])[6]
    second = {**whole, **{name: whole[name][7:] for name in rows}, "carry": middle, "previous_done": done}
    tail, last = run(operation, second, **TRITON)
    torch.testing.assert_close(torch.cat([head, tail]), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(last, carry, rtol=1e-6, atol=1e-6)


# --- memory ---------------------------------------------------------------------------------------------------------


@on_cpu
@every_tile
@pytest.mark.parametrize("shape", [(21, 3), (1, 5), (16, 8)])
def test_nothing_is_written_beside_the_outputs(shape: tuple[int, int], tile: Any, use: Any) -> None:
    use(tile)
    inputs = random_window("gae", *shape, 0)
    buffers = [torch.full((shape[0] + 2, shape[1] + 2), NAN) for _ in range(2)]
    inner = tuple(x[1:-1, 1:-1] for x in buffers)
    run("gae", inputs, out=inner, **TRITON)
    for buffer, x in zip(buffers, inner, strict=True):
        assert x.isfinite().all()
        assert buffer.isnan().sum() == buffer.numel() - x.numel()


@on_cpu
def test_tensors_that_start_at_odd_addresses_are_read_right() -> None:
    inputs = random_window("gae", 8, 4, 0)
    expected = run("gae", inputs, **TRITON)
    shifted = {
        name: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    for got, want in zip(run("gae", shifted, **TRITON), expected, strict=True):
        assert torch.equal(got, want)


# --- the look-up of plans -------------------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("compiled", [True, False])
def test_every_call_finds_the_plan_of_its_own_tensors(
    compiled: bool, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(TILES["side-by-side"])
    if not compiled:
        monkeypatch.setattr(launch, "guards", None)
    windows = [random_window("gae", *shape, 0) for shape in [(9, 3), (7, 5)]]
    twice = {**windows[0], "next_values": windows[0]["values"]}
    strided = in_layout(windows[0], "env-major")
    double = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in twice.items()}
    for inputs in (*windows, twice, strided, double, windows[0], twice):
        assert_close(run("gae", inputs, **TRITON), run_reference("gae", inputs))
    plans = len(launch._plans)
    with torch.inference_mode():
        assert_close(run("gae", windows[0], **TRITON), run_reference("gae", windows[0]))
    assert len(launch._plans) == plans


@on_cpu
def test_a_tensor_resized_in_place_is_refused_like_any_other_of_that_shape() -> None:
    inputs = random_window("gae", 9, 3, 0)
    run("gae", inputs, **TRITON)
    inputs["values"].resize_(9, 2)
    with pytest.raises(ValueError, match="values: expected shape"):
        run("gae", inputs, **TRITON)


# --- moments --------------------------------------------------------------------------------------------------------


@on_cpu
@every_tile
@pytest.mark.parametrize("operation", ["gae", "vtrace"])
def test_the_moments_are_those_of_the_valid_advantages(operation: str, tile: Any, use: Any) -> None:
    use(tile)
    inputs = random_window(operation, 13, 3, 2)
    for _ in range(2):  # the counter of the first launch is back at 0
        results = run(operation, inputs, moments=True, **TRITON)
        advantages = results[0 if operation == "gae" else 1].double()
        valid = advantages[inputs["valid"].bool()]
        expected = torch.stack([torch.tensor(float(len(valid))), valid.mean(), (valid - valid.mean()).square().sum()])
        torch.testing.assert_close(results[2].double(), expected.double(), rtol=1e-5, atol=1e-5)


@on_cpu
def test_moments_of_large_equal_advantages_do_not_cancel() -> None:
    rewards = torch.full((16, 4), 20000.0)
    rewards[0, 0] += 1
    zeros, never = torch.zeros(16, 4), torch.zeros(16, 4, dtype=torch.bool)
    result = kernels.gae(rewards, zeros, torch.zeros(4), never, gamma=0.0, moments=True, **TRITON)
    assert result.moments[0] == 64
    torch.testing.assert_close(result.moments[2], torch.tensor(63 / 64), rtol=5e-3, atol=0)
