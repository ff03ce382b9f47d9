"""The EnvPool engine: what C++ would not survive, pools in turns, one result whatever threads and device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import envs
from envs.base import EnvError, VecEnv

Make = Callable[..., VecEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def build(id: str, num_envs: int, **options: Any) -> VecEnv:
        made.append(envs.make(id, "envpool", num_envs, **{"num_threads": 1, **options}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def random_actions(env: VecEnv, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if isinstance(env.single_action_space, gymnasium.spaces.Discrete):
        choices = int(env.single_action_space.n)
        return list(torch.randint(choices, (count, env.num_envs), generator=generator))
    shape = (count, env.num_envs, *(env.single_action_space.shape or ()))
    return list(torch.rand(shape, generator=generator) * 2 - 1)


def rollout(env: VecEnv, count: int) -> list[Tensor]:
    """The first observations, then observations, rewards and flags ``[count, num_envs, ...]`` under random actions."""
    first = env.reset()
    results = [env.step(batch) for batch in random_actions(env, count)]
    return [first, *(torch.stack(field) for field in zip(*results, strict=True))]


@pytest.mark.parametrize("id", ["CartPole-v1", "Hopper-v5"])
def test_pools_and_threads_change_no_bit(id: str, make: Make) -> None:
    expected = rollout(make(id, 7, pools=1, num_threads=1), 60)
    assert not expected[-1].all()  # some episodes ended
    for pools, num_threads in ((1, 3), (2, 1), (3, 2), (7, 1)):
        found = rollout(make(id, 7, pools=pools, num_threads=num_threads), 60)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_envs, pools", [(1, (slice(0, 1),)), (3, (slice(0, 1), slice(1, 3)))])
def test_envs_lie_in_two_pools_unless_there_is_one_alone(make: Make, num_envs: int, pools: tuple[slice, ...]) -> None:
    assert make("CartPole", num_envs).pools == pools


def test_pools_that_do_not_divide_differ_by_one_env(make: Make) -> None:
    assert make("CartPole", 7, pools=3).pools == (slice(0, 2), slice(2, 4), slice(4, 7))


def test_cartpole_equals_gymnasium_step_for_step(make: Make) -> None:
    env = make("CartPole-v1", 3)
    starts = env.reset().double().numpy()
    actions = random_actions(env, 40)
    results = [env.step(batch) for batch in actions]
    for column, start in enumerate(starts):
        reference = gymnasium.make("CartPole-v1")
        reference.reset(seed=0)
        reference.unwrapped.state = start  # type: ignore[attr-defined]
        for batch, result in zip(actions, results, strict=True):
            observation, reward, terminated, truncated, _ = reference.step(int(batch[column]))
            # float32 starts against float64: the difference grows with the pole's own instability
            np.testing.assert_allclose(result.observations[column], observation, rtol=1e-4, atol=1e-5)
            assert result.rewards[column] == reward
            assert (bool(result.terminated[column]), bool(result.truncated[column])) == (terminated, truncated)
            if terminated:
                break


def test_images_stay_uint8(make: Make) -> None:
    env = make("Pong", 2, pools=1)
    assert env.id == "Pong-v5" and env.single_observation_space.dtype == np.uint8
    first = env.reset()
    result = env.step(random_actions(env, 1)[0])
    for observations in (first, result.observations):
        assert observations.dtype == torch.uint8
        assert observations.shape == (2, *(env.single_observation_space.shape or ()))


def test_observations_lie_within_their_space_where_the_engine_gives_placeholders_for_bounds(make: Make) -> None:
    env = make("HumanoidStand-v1", 2, seed=1)
    observations = env.reset().numpy()
    assert (observations < 0).any()
    assert all(env.single_observation_space.contains(row) for row in observations)


def test_results_are_fresh_memory(make: Make) -> None:
    env = make("CartPole-v1", 4)
    held = [env.reset(), *(env.step(batch).observations for batch in random_actions(env, 5))]
    copies = [tensor.clone() for tensor in held]
    rollout(env, 5)
    assert all(torch.equal(one, copy) for one, copy in zip(held, copies, strict=True))


def test_sent_actions_may_be_overwritten_at_once(make: Make) -> None:
    env, twin = make("Hopper-v5", 4, pools=1, seed=1), make("Hopper-v5", 4, pools=1, seed=1)
    env.reset(), twin.reset()
    actions = random_actions(env, 1)[0]
    expected = twin.step(actions)
    env.send(0, actions)
    actions.fill_(math.nan)
    assert torch.equal(env.recv(0).observations, expected.observations)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_names_its_env_and_reaches_nothing(bad: float, make: Make) -> None:
    env, twin = make("Hopper-v5", 5, seed=1), make("Hopper-v5", 5, seed=1)
    env.reset(), twin.reset()
    actions = random_actions(env, 1)[0]
    broken = actions.clone()
    broken[3, 1] = bad
    with pytest.raises(EnvError, match=rf"env 3 got action \[.*{bad}.*\]: every value must be finite"):
        env.send(1, broken[env.pools[1]])
    assert torch.equal(env.step(actions).observations, twin.step(actions).observations)


@pytest.mark.parametrize("bad", [-1, 2, 2**31, -(2**40)])
def test_a_discrete_action_out_of_range_names_its_env(bad: int, make: Make) -> None:
    env = make("CartPole-v1", 5)
    env.reset()
    with pytest.raises(EnvError, match=rf"env 4 got action {bad}: it must be in 0 \.\. 1"):
        env.send(1, torch.tensor([0, 1, bad]))
    assert env.step(torch.zeros(5, dtype=torch.int64)).valid.all()


def test_send_and_recv_take_turns(make: Make) -> None:
    env = make("CartPole-v1", 2)
    env.reset()
    with pytest.raises(EnvError, match="recv without a send"):
        env.recv(1)
    env.send(1, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(EnvError, match=r"envs 1 \.\. 1 of CartPole-v1: send before the recv"):
        env.send(1, torch.zeros(1, dtype=torch.int64))
    env.reset()  # drops the step under way
    assert env.step(torch.zeros(2, dtype=torch.int64)).valid.all()


def test_the_clock_sees_waiting_and_copies_apart(make: Make) -> None:
    phases = []

    class Clock:
        @contextmanager
        def phase(self, name: str, /) -> Iterator[None]:
            phases.append(name)
            yield

    env = make("CartPole-v1", 2, pools=1)
    env.reset()
    env.clock = Clock()
    env.step(torch.zeros(2, dtype=torch.int64))
    assert phases == ["transfer", "env_step", "env_step", "transfer"]


@pytest.mark.gpu
def test_cuda_results_lie_still() -> None:
    with closing(envs.make("Pong-v5", "envpool", 3, num_threads=1, pools=1, device="cuda")) as env:
        env.reset()
        actions = torch.zeros(3, dtype=torch.int64, device="cuda")
        places = [[tensor.data_ptr() for tensor in env.step(actions)] for _ in range(3)]
        assert env.fixed_results and places[0] == places[1] == places[2]


@pytest.mark.gpu
@pytest.mark.parametrize("id", ["CartPole-v1", "Ant-v5", "Pong-v5"])
def test_cuda_results_equal_cpu_results(id: str, make: Make) -> None:
    on_cpu, on_cuda = make(id, 7), make(id, 7, device="cuda")
    assert torch.equal(on_cpu.reset(), on_cuda.reset().cpu())
    for batch in random_actions(on_cpu, 30):
        actions = batch.cuda()  # which both take
        for found, expected in zip(on_cuda.step(actions), on_cpu.step(actions), strict=True):
            assert found.device.type == "cuda" and torch.equal(found.cpu(), expected)
