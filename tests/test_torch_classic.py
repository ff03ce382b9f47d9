"""The torch engine against Gymnasium, the transition contract and wrong use."""

import math
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_envs import TASKS, assert_same, make, random_actions, states

import envs
from envs.base import EnvError, StepResult
from envs.torch_classic import TorchVecEnv

FLOAT32_ROUNDING = 2.0**-24
# wider than any task's own range, so that clips, walls, wraps and ends all occur
STATE_RANGES = {
    "CartPole-v1": (3.0, 3.0, 0.4, 3.0),
    "Pendulum-v1": (12.0, 8.0),
    "Acrobot-v1": (math.pi, math.pi, 4 * math.pi, 9 * math.pi),
    "MountainCar-v0": (1.2, 0.07),
    "MountainCarContinuous-v0": (1.2, 0.07),
}


def gymnasium_env(id: str, **options) -> Any:
    env = gymnasium.make(id, disable_env_checker=True, **options)
    env.reset(seed=0)
    return env


def with_states(env: TorchVecEnv, values: np.ndarray, elapsed: int = 0) -> Tensor:
    saved = env.state_dict()
    for index in range(values.shape[1]):
        saved[f"state.{index}"] = torch.as_tensor(values[:, index], dtype=saved["state.0"].dtype)
    return env.load_state_dict(saved | {"elapsed": torch.full_like(saved["elapsed"], elapsed)})


def gymnasium_step(env: Any, state: np.ndarray, action: Tensor):
    """One step from ``state``, with continuous actions in float64 lest numpy rounds the arithmetic to float32."""
    env.unwrapped.state = state.copy()
    observation, reward, terminated, truncated, _ = env.step(
        action.numpy().astype(np.float64) if action.ndim else int(action)
    )
    return np.array(env.unwrapped.state, dtype=np.float64), observation, float(reward), terminated, truncated


def assert_row_equal(id: str, state: np.ndarray, result: StepResult, row: int, expected) -> None:
    next_state, observation, reward, terminated, truncated = expected
    if id == "MountainCarContinuous-v0":  # Gymnasium stores this state in float32
        np.testing.assert_array_equal(state[row].astype(np.float32), next_state)
    else:
        np.testing.assert_allclose(state[row], next_state, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.observations[row].numpy(), observation, rtol=FLOAT32_ROUNDING, atol=1e-12)
    assert float(result.rewards[row]) == pytest.approx(reward, rel=0, abs=1e-12)
    assert bool(result.terminated[row]) == terminated
    assert bool(result.truncated[row]) == (truncated and not terminated)


@pytest.mark.parametrize("id", TASKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_spaces_equal_gymnasium(id: str, dtype: str) -> None:
    env, reference = make(id, 1, dtype=dtype), gymnasium_env(id)
    space: Any = env.single_observation_space
    assert env.single_action_space == reference.action_space
    np.testing.assert_array_equal(space.low, reference.observation_space.low)
    np.testing.assert_array_equal(space.high, reference.observation_space.high)
    assert space.dtype == env.reset().numpy().dtype == np.dtype(dtype)


@pytest.mark.parametrize("id", TASKS)
def test_one_step_from_anywhere_equals_gymnasium(id: str) -> None:
    count, generator = 2000, torch.Generator().manual_seed(3)
    env, reference = make(id, count, dtype="float64"), gymnasium_env(id, max_episode_steps=10**6)
    env.reset()
    start = np.random.default_rng(5).uniform(-1, 1, (count, len(STATE_RANGES[id]))) * STATE_RANGES[id]
    with_states(env, start)
    actions = random_actions(env, generator)[0]
    result = env.step(actions)
    after = states(env)
    for row in range(count):
        reference.reset()
        assert_row_equal(id, after, result, row, gymnasium_step(reference, start[row], actions[row]))
    assert 0 < int(result.terminated.sum()) < count or id == "Pendulum-v1"


@pytest.mark.parametrize("id", TASKS)
def test_long_trajectories_equal_gymnasium_step_for_step_with_filler_after_every_end(id: str) -> None:
    env, generator = make(id, 3, dtype="float64", max_episode_steps=83, seed=4), torch.Generator().manual_seed(1)
    references = [gymnasium_env(id, max_episode_steps=83) for _ in range(3)]
    env.reset()
    before, ended = states(env), [False] * 3
    for actions in random_actions(env, generator, steps=500):
        result = env.step(actions)
        after = states(env)
        for row, reference in enumerate(references):
            assert bool(result.valid[row]) != ended[row]
            if ended[row]:
                assert result.rewards[row] == 0
                assert not result.terminated[row]
                assert not result.truncated[row]
                reference.reset()
            else:
                assert_row_equal(id, after, result, row, gymnasium_step(reference, before[row], actions[row]))
            ended[row] = bool(result.terminated[row] | result.truncated[row])
        before = after
    assert int(env.state_dict()["episode"].min()) > 5


@pytest.mark.parametrize("id", TASKS)
def test_the_default_time_limit_is_gymnasiums(id: str) -> None:
    limit = gymnasium_env(id).spec.max_episode_steps
    env = make(id, 1)
    env.reset()
    with_states(env, states(env), elapsed=limit - 2)
    actions = torch.zeros_like(random_actions(env, torch.Generator())[0])
    assert [bool(env.step(actions).truncated) for _ in range(3)] == [False, True, False]


def test_a_row_that_ends_both_ways_is_terminated_only() -> None:
    env = make("CartPole-v1", 2, max_episode_steps=7)
    env.reset()
    with_states(env, np.array([[2.39, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), elapsed=6)
    result = env.step(torch.ones(2, dtype=torch.int64))
    assert result.terminated.tolist() == [True, False]
    assert result.truncated.tolist() == [False, True]
    assert result.rewards.tolist() == [1.0, 1.0]


def test_the_step_that_ends_an_episode_returns_the_final_observation_and_the_next_one_a_start() -> None:
    env = make("CartPole-v1", 1)
    env.reset()
    with_states(env, np.array([[2.39, 3.0, 0.0, 0.0]]))
    push = torch.ones(1, dtype=torch.int64)
    assert env.step(push).observations[0, 0] > 2.4
    assert env.step(push).observations.abs().max() <= 0.05


def test_filler_rows_ignore_their_action() -> None:
    env = make("Pendulum-v1", 2, max_episode_steps=1)
    env.reset()
    env.step(torch.zeros(2, 1))
    result = env.step(torch.full((2, 1), math.nan))
    assert not result.valid.any()
    assert not result.terminated.any()
    assert env.counters() == {"faulty_steps": 0}


@pytest.mark.parametrize("id", TASKS)
def test_float32_stays_within_rounding_of_float64(id: str) -> None:
    double, single = make(id, 64, dtype=torch.float64), make(id, 64)
    torch.testing.assert_close(single.reset(), double.reset().float(), rtol=1e-6, atol=1e-6)
    actions = random_actions(double, torch.Generator().manual_seed(0))[0]
    torch.testing.assert_close(
        single.step(actions).observations, double.step(actions).observations.float(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "id, actions, faulty",
    [
        ("Pendulum-v1", [[0.5], [math.nan], [math.inf]], [False, True, True]),
        ("MountainCarContinuous-v0", [[0.5], [-math.inf], [1e30]], [False, True, True]),  # 1e30 squared is no float32
        ("CartPole-v1", [1, 2, -1], [False, True, True]),
        ("Acrobot-v1", [2, 3, 2**40], [False, True, True]),
    ],
)
def test_an_unusable_action_ends_its_env_alone_and_is_counted(id: str, actions: list, faulty: list[bool]) -> None:
    env, undisturbed = make(id, 3, seed=1), make(id, 3, seed=1)
    start = env.reset()
    undisturbed.reset()
    good = torch.tensor([actions[0]] * 3)
    result, expected = env.step(torch.tensor(actions)), undisturbed.step(good)
    assert result.terminated.tolist() == faulty
    assert result.rewards.tolist() == [float(expected.rewards[0]), 0.0, 0.0]
    assert torch.equal(result.observations[1:], start[1:])
    assert env.counters() == {"faulty_steps": 2}
    assert env.counters() == {"faulty_steps": 0}
    state = env.state_dict()
    env.load_state_dict(state)
    assert env.counters() == {"faulty_steps": 0}, "told before"
    for _ in range(5):
        assert_same(StepResult(*(x[:1] for x in env.step(good))), StepResult(*(x[:1] for x in undisturbed.step(good))))


def test_faults_are_counted_once_while_another_thread_steps() -> None:
    env = make("CartPole-v1", 64, seed=1)
    env.reset()

    def steps() -> None:
        for _ in range(100):
            env.step(torch.full((64,), 2))  # no action: every env is faulty, and filler in the next step

    thread = threading.Thread(target=steps)
    thread.start()
    counted = 0
    while thread.is_alive():
        counted += env.counters()["faulty_steps"]
    assert counted + env.counters()["faulty_steps"] == 64 * 50


@pytest.mark.parametrize(
    "actions, message",
    [
        (torch.zeros(3), "actions are"),
        (torch.zeros(2, 1), "actions are"),
        (torch.zeros(3, 2), "actions are"),
        (torch.zeros(3, 1, dtype=torch.int64), "actions are"),
        (torch.zeros(3, 1, device="meta"), "actions are on meta"),
    ],
)
def test_actions_of_a_wrong_form_are_refused_and_the_env_stays_usable(actions: Tensor, message: str) -> None:
    env = make("Pendulum-v1", 3)
    start = env.reset()
    with pytest.raises(EnvError, match=message):
        env.step(actions)
    assert torch.equal(env.load_state_dict(env.state_dict()), start)
    assert env.step(torch.zeros(3, 1)).valid.all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"id": "Ant-v5"}, "env.id=Ant-v5"),
        ({"num_envs": 0}, "num_envs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"dtype": "float16"}, "env.options.dtype=float16"),
        ({"max_episode_steps": 0}, "env.max_episode_steps=0"),
        ({"pools": 2}, "no option pools"),
        ({"device": "nonsense"}, "device=nonsense"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        TorchVecEnv(**({"id": "CartPole-v1", "num_envs": 2, "device": "cpu"} | options))


def test_envs_that_do_not_fit_into_memory_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(EnvError, match="num_envs=3: Pendulum-v1 does not fit"):
        envs.make("Pendulum", "torch", 3)


def test_calls_out_of_order_are_refused() -> None:
    env, actions = make("CartPole-v1", 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(EnvError, match="before its first reset"):
        env.send(0, actions)
    env.reset()
    with pytest.raises(EnvError, match="no step"):
        env.recv(0)
    with pytest.raises(EnvError, match="pool=1"):
        env.send(1, actions)
    env.close()
    env.close()
    with pytest.raises(EnvError, match="before its first reset"):
        env.step(actions)


def test_actions_that_carry_gradients_or_strides_step_alike() -> None:
    env, other = make("Pendulum-v1", 3), make("Pendulum-v1", 3)
    env.reset()
    other.reset()
    wide = torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_()
    result = env.step(wide[:, :1])
    assert not result.rewards.requires_grad
    with torch.inference_mode():
        assert_same(other.step(wide[:, :1].clone()), result)
    assert_same(other.step(wide[:, :1]), env.step(wide[:, :1]))
