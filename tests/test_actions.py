"""Raw policy actions into the engine's bounds, and the checks of what is sent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from envs.actions import MODES, ActionMap, check_layout, check_values
from envs.base import EnvError

LOW, HIGH = [-2.0, 0.5], [1.0, 4.5]
SPACE = Box(np.float32(LOW), np.float32(HIGH))
RAW = [[0.0, 0.0], [9.0, -9.0], [-0.25, 0.75], [1.0, -1.0]]


def expected(mode: str, value: float, low: float, high: float) -> float:
    if mode == "clip":
        return min(max(value, low), high)
    unit = math.tanh(value) if mode == "squash" else min(max(value, -1.0), 1.0)
    return (low + high) / 2 + (high - low) / 2 * unit


@pytest.mark.parametrize("mode", ["clip", "rescale", "squash"])
def test_each_mode_enters_the_bounds_by_its_formula(mode: str) -> None:
    mapped = ActionMap(SPACE, mode)(torch.tensor(RAW))
    want = [[expected(mode, value, low, high) for value, low, high in zip(row, LOW, HIGH, strict=True)] for row in RAW]
    torch.testing.assert_close(mapped, torch.tensor(want))


@pytest.mark.parametrize("mode", ["clip", "rescale", "squash"])
def test_no_action_leaves_the_bounds(mode: str) -> None:
    raw = torch.linspace(-50, 50, 2001)[:, None].expand(-1, 2)
    mapped = ActionMap(SPACE, mode)(raw)
    assert (mapped >= torch.tensor(LOW)).all() and (mapped <= torch.tensor(HIGH)).all()


def test_raw_actions_are_left_as_they_are() -> None:
    raw = torch.tensor(RAW)
    for mode in ("clip", "rescale", "squash", "none"):
        ActionMap(SPACE, mode)(raw)
    assert raw.tolist() == RAW


def test_none_passes_everything() -> None:
    assert ActionMap(SPACE, "none")(torch.tensor(RAW)).tolist() == RAW


NONSENSE = [
    (1.2e-38, 3.4e38),
    (-1e-38, 1e-38),
    (-math.inf, math.inf),
    (-1e10, 1e10),
    (1.0, 1.0),
    (0.0, math.inf),
]


@pytest.mark.parametrize("mode", ["clip", "rescale", "squash"])
@pytest.mark.parametrize("bounds", NONSENSE)
def test_nonsense_bounds_count_as_none_and_are_noticed(mode: str, bounds: tuple[float, float]) -> None:
    space = Box(np.float32([-1, bounds[0]]), np.float32([1, bounds[1]]))
    action_map = ActionMap(space, mode)
    mapped = action_map(torch.tensor([[0.5, 7.25]]))
    assert mapped[0, 1].item() == 7.25
    assert mapped[0, 0].item() == pytest.approx(expected(mode, 0.5, -1, 1))
    assert "dimensions 1 " in action_map.notice


@pytest.mark.parametrize("nonsense", [(math.nan, 1.0), (2.0, -2.0)])
def test_bounds_that_gymnasium_itself_would_refuse_count_as_none(nonsense: tuple[float, float]) -> None:
    space = Box(-1.0, 1.0, (1,))
    space.low, space.high = (np.float32([bound]) for bound in nonsense)
    assert ActionMap(space, "rescale")(torch.tensor([[3.0]])).item() == 3.0


@pytest.mark.parametrize("mode", MODES)
def test_one_number_per_row_is_an_action_too(mode: str) -> None:
    actions = torch.tensor([-5.0, 0.5, 5.0])
    mapped, beside = (ActionMap(Box(-2, 3, shape, np.float32), mode) for shape in ((), (1,)))
    assert torch.equal(mapped(actions), beside(actions[:, None])[:, 0])


def test_sane_bounds_give_no_notice() -> None:
    assert not ActionMap(SPACE, "clip").notice
    assert not ActionMap(Discrete(3), "clip").notice


def test_a_nan_action_stays_nan_for_the_engine_to_refuse() -> None:
    for mode in ("clip", "rescale", "squash", "none"):
        assert ActionMap(SPACE, mode)(torch.tensor([[math.nan, 0.0]]))[0, 0].isnan()


def test_bfloat16_actions_become_float32() -> None:
    assert ActionMap(SPACE, "clip")(torch.zeros(3, 2, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("start", [0, 3, -1])
def test_discrete_indices_count_from_the_start_of_the_space(start: int) -> None:
    mapped = ActionMap(Discrete(4, start=start), "squash")(torch.tensor([0, 3, 1]))
    assert mapped.tolist() == [start, start + 3, start + 1]
    assert mapped.dtype == torch.int64


def test_multi_discrete_indices_count_from_the_start_of_each_component() -> None:
    raw = torch.tensor([[0, 2], [1, 0]])
    assert ActionMap(MultiDiscrete([2, 3], start=[5, -1]), "squash")(raw).tolist() == [[5, 1], [6, -1]]
    assert ActionMap(MultiDiscrete([2, 3]), "squash")(raw) is raw


def test_multi_discrete_actions_are_int64_and_in_their_ranges() -> None:
    space = MultiDiscrete([2, 3], start=[5, -1])
    check_layout(torch.zeros(4, 2, dtype=torch.int64), space, 4)
    with pytest.raises(EnvError, match=r"expected \[4, 2\] torch.int64"):
        check_layout(torch.zeros(4, 2), space, 4)
    check_values(np.array([[5, -1], [6, 1]]), space, first_env=0)
    with pytest.raises(EnvError, match=r"env 8 got action \[7, 0\]: it must be in \[5, -1\] \.\. \[6, 1\]"):
        check_values(np.array([[5, -1], [7, 0]]), space, first_env=7)


def test_an_unknown_mode_names_the_key() -> None:
    with pytest.raises(EnvError, match=r"env\.action_map=clamp is unknown: clip, rescale, squash, none"):
        ActionMap(SPACE, "clamp")


@pytest.mark.parametrize(
    "actions",
    [
        torch.zeros(4, 3),
        torch.zeros(3, 2),
        torch.zeros(4),
        torch.zeros(4, 2, dtype=torch.float64),
        torch.zeros(4, 2, 1),
    ],
)
def test_a_wrong_layout_names_shape_and_dtype(actions: torch.Tensor) -> None:
    with pytest.raises(EnvError, match=r"expected \[4, 2\] torch.float32"):
        check_layout(actions, SPACE, 4)


def test_discrete_actions_are_int64() -> None:
    check_layout(torch.zeros(4, dtype=torch.int64), Discrete(2), 4)
    with pytest.raises(EnvError, match=r"expected \[4\] torch.int64"):
        check_layout(torch.zeros(4), Discrete(2), 4)


def test_the_first_bad_env_and_its_action_are_named() -> None:
    actions = np.zeros((5, 2), np.float32)
    actions[3, 1] = np.inf
    with pytest.raises(EnvError, match=r"env 40 got action \[0, inf\]: every value must be finite"):
        check_values(actions, SPACE, first_env=37)


@pytest.mark.parametrize("bad", [-1, 0, 4])
def test_a_discrete_action_outside_of_the_space_is_named(bad: int) -> None:
    with pytest.raises(EnvError, match=rf"env 1 got action {bad}: it must be in 1 \.\. 3"):
        check_values(np.array([1, bad, 3]), Discrete(3, start=1), first_env=0)


@pytest.mark.gpu
def test_discrete_actions_are_shifted_on_their_device() -> None:
    raw = torch.tensor([[0, 2]], device="cuda")
    shifted = ActionMap(MultiDiscrete([2, 3], start=[5, -1]))(raw)
    assert shifted.is_cuda and shifted.tolist() == [[5, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["clip", "rescale", "squash", "none"])
def test_a_cuda_graph_replays_the_map_on_new_actions(mode: str) -> None:
    action_map, raw = ActionMap(SPACE, mode), torch.zeros(4, 2, device="cuda")
    action_map(raw)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mapped = action_map(raw)
    raw.copy_(torch.tensor(RAW))
    graph.replay()
    torch.testing.assert_close(mapped.cpu(), ActionMap(SPACE, mode)(torch.tensor(RAW)))
