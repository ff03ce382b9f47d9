"""The transition contract of `envs.base`, the same tests for every engine; each row of `CASES` adds one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from gymnasium.spaces import Discrete
from torch import Tensor

import envs
from envs.base import EnvError, StepResult, VecEnv

NUM_ENVS = 5
LIMIT = 3  # steps per episode in most tests: too few for any of these tasks to end by itself


class Case(NamedTuple):
    id: str
    engine: str
    options: dict[str, Any]


CASES = [
    Case("CartPole-v1", "envpool", {"num_threads": 1}),
    Case("Pendulum-v1", "envpool", {"num_threads": 1, "pools": 1}),
    Case("Ant-v5", "envpool", {"num_threads": 1}),
    Case("CartPole-v1", "gymnasium", {}),
    Case("CartPole-v1", "gymnasium", {"vectorization_mode": "async"}),
    Case("Pendulum-v1", "gymnasium", {"pools": 2}),
    Case("CartPole-v1", "torch", {}),
    Case("Pendulum-v1", "torch", {}),
    Case("Ant-v5", "mujoco_warp", {}),
]

Make = Callable[..., VecEnv]


def name_of(case: Case) -> str:
    return "-".join([case.engine, case.id, *map(str, case.options.values())])


@pytest.fixture(params=CASES, ids=name_of)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds envs of one case and closes them; skips the case only where the engine's package is missing."""
    case: Case = request.param
    made = []

    def build(num_envs: int = NUM_ENVS, **options: Any) -> VecEnv:
        try:
            env = envs.make(case.id, case.engine, num_envs, **{**case.options, **options})
        except EnvError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                pytest.skip(str(error))
            raise
        made.append(env)
        return env

    yield build
    for env in made:
        env.close()


def actions_for(env: VecEnv, value: int = 0) -> Tensor:
    """The same legal action for all envs, another one for another ``value`` in 0, 1."""
    space = env.single_action_space
    if isinstance(space, Discrete):
        return torch.full((env.num_envs,), int(space.start) + value)
    return torch.full((env.num_envs, *(space.shape or ())), 0.5 * value)


def steps(env: VecEnv, count: int, value: int = 0) -> list[StepResult]:
    """Results of ``count`` steps, copied, because engines may reuse the memory."""
    return [StepResult(*(field.clone() for field in env.step(actions_for(env, value)))) for _ in range(count)]


def test_results_have_the_stated_shapes_and_dtypes(make: Make) -> None:
    env = make()
    shape = (NUM_ENVS, *(env.single_observation_space.shape or ()))
    observations = env.reset()
    result = env.step(actions_for(env))
    for tensor in (observations, result.observations):
        assert tensor.shape == shape and tensor.dtype == torch.float32 and tensor.device == env.device
    assert env.single_observation_space.dtype == "float32"
    assert result.rewards.shape == (NUM_ENVS,) and result.rewards.dtype == torch.float32
    for flag in (result.terminated, result.truncated, result.valid):
        assert flag.shape == (NUM_ENVS,) and flag.dtype == torch.bool


def test_the_pools_cover_all_columns_in_order(make: Make) -> None:
    env = make()
    assert [column for pool in env.pools for column in range(NUM_ENVS)[pool]] == list(range(NUM_ENVS))


def test_send_and_recv_of_the_pools_make_up_a_step(make: Make) -> None:
    one, other = make(seed=5), make(seed=5)
    one.reset(), other.reset()
    expected = steps(one, 1)[0]
    actions = actions_for(other)
    for pool in reversed(range(len(other.pools))):
        other.send(pool, actions[other.pools[pool]])
    for pool, columns in enumerate(other.pools):
        for field, whole in zip(other.recv(pool), expected, strict=True):
            assert torch.equal(field, whole[columns])


def test_the_row_after_an_end_is_filler(make: Make) -> None:
    env = make(max_episode_steps=LIMIT)
    env.reset()
    results = steps(env, 2 * (LIMIT + 1))
    assert [result.valid.unique().tolist() for result in results] == [[True]] * LIMIT + [[False]] + [[True]] * LIMIT + [
        [False]
    ]
    for result in (results[LIMIT], results[2 * LIMIT + 1]):
        assert not result.rewards.any() and not result.terminated.any() and not result.truncated.any()


def test_a_time_limit_truncates_and_never_terminates(make: Make) -> None:
    env = make(max_episode_steps=LIMIT)
    env.reset()
    results = steps(env, LIMIT + 1)
    assert [bool(result.truncated.all()) for result in results] == [False, False, True, False]
    assert not any(result.terminated.any() or result.truncated.any() for result in results[: LIMIT - 1])


def test_the_ending_row_carries_the_true_final_observation_and_reward(make: Make) -> None:
    limited, unlimited = make(seed=3, max_episode_steps=LIMIT), make(seed=3)
    limited.reset(), unlimited.reset()
    for ending, going_on in zip(steps(limited, LIMIT), steps(unlimited, LIMIT), strict=True):
        assert torch.equal(ending.observations, going_on.observations)
        assert torch.equal(ending.rewards, going_on.rewards)


def test_the_filler_row_ignores_its_action_and_shows_a_fresh_start(make: Make) -> None:
    one, other = make(seed=3, max_episode_steps=LIMIT), make(seed=3, max_episode_steps=LIMIT)
    first = one.reset().clone()
    other.reset()
    final = steps(one, LIMIT)[-1], steps(other, LIMIT)[-1]
    fresh = steps(one, 1, value=0)[0], steps(other, 1, value=1)[0]
    assert torch.equal(fresh[0].observations, fresh[1].observations)
    assert not torch.equal(fresh[0].observations, final[0].observations)
    assert not torch.equal(fresh[0].observations, first)


def test_a_reset_in_mid_episode_starts_whole_episodes(make: Make) -> None:
    env = make(max_episode_steps=LIMIT)
    env.reset()
    steps(env, LIMIT)
    env.reset()
    results = steps(env, LIMIT + 1)
    assert [bool(result.valid.all()) for result in results] == [True] * LIMIT + [False]


def test_a_seed_decides_the_whole_run(make: Make) -> None:
    one, other = make(seed=7, max_episode_steps=LIMIT), make(seed=7, max_episode_steps=LIMIT)
    assert torch.equal(one.reset(), other.reset())
    for result, twin in zip(steps(one, 6), steps(other, 6), strict=True):
        assert all(torch.equal(field, same) for field, same in zip(result, twin, strict=True))


def test_no_two_envs_of_any_rank_or_seed_start_alike(make: Make) -> None:
    starts = torch.cat(
        [make(4, seed=seed, rank=rank, world_size=2).reset().clone() for seed in (0, 1, 43) for rank in (0, 1)]
    )
    assert len(starts.unique(dim=0)) == 3 * 2 * 4


def test_an_epoch_starts_other_episodes_and_the_same_epoch_the_same(make: Make) -> None:
    env = make(seed=0)
    first = env.reset().clone()
    env.reseed(1)
    second = env.reset().clone()
    env.reseed(0)
    assert not torch.equal(first, second)
    assert torch.equal(env.reset(), first)


def test_wrong_layouts_are_refused_and_the_env_stays_usable(make: Make) -> None:
    env, twin = make(seed=2), make(seed=2)
    env.reset(), twin.reset()
    good = actions_for(env)[env.pools[0]]
    for bad in (good[1:], good[..., None], good.to(torch.float64), good.to(torch.int32)):
        with pytest.raises(EnvError, match="expected"):
            env.send(0, bad)
    assert torch.equal(steps(env, 1)[0].observations, steps(twin, 1)[0].observations)


@pytest.mark.parametrize("make", [case for case in CASES if case.id == "CartPole-v1"], indirect=True, ids=name_of)
def test_a_fallen_pole_is_terminated_at_reward_one(make: Make) -> None:
    env = make()
    env.reset()
    results = steps(env, 25, value=1)
    terminated = torch.stack([result.terminated for result in results])
    valid = torch.stack([result.valid for result in results])
    assert terminated.any(0).all() and not torch.stack([result.truncated for result in results]).any()
    assert torch.equal(valid[1:], ~terminated[:-1])
    assert torch.equal(torch.stack([result.rewards for result in results]), valid.float())


def test_state_is_restored_exactly_or_not_offered(make: Make) -> None:
    env = make(seed=1, max_episode_steps=LIMIT)
    env.reset()
    steps(env, 2)
    state = env.state_dict()
    if state is None:
        with pytest.raises(EnvError, match="re-seeded on resume"):
            env.load_state_dict({})
        return
    state = {name: tensor.clone() for name, tensor in state.items()}
    expected = steps(env, LIMIT + 2)
    other = make(seed=9, max_episode_steps=LIMIT)
    other.reset()
    other.load_state_dict(state)
    for result, twin in zip(steps(other, LIMIT + 2), expected, strict=True):
        assert all(torch.equal(field, same) for field, same in zip(result, twin, strict=True))


def test_closing_twice_is_fine_and_leaves_other_envs_alone(make: Make) -> None:
    env, other = make(), make()
    env.reset()
    env.close()
    env.close()
    assert torch.isfinite(other.reset().float()).all()
