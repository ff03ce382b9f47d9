"""`as_gymnasium`: a VecEnv as Gymnasium's users and wrappers expect it."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor

from envs.base import EnvError, StepResult, VecEnv
from envs.torch_classic import TorchVecEnv
from envs.vector_view import as_gymnasium


def make(id: str = "CartPole-v1", num_envs: int = 3, **options) -> TorchVecEnv:
    return TorchVecEnv(id, num_envs, device="cpu", **options)


class CountingEnv(VecEnv):
    """Two pools of unequal size that reuse their memory; every observation is the number of steps so far."""

    id, engine, num_envs, device = "Counting-v0", "counting", 3, torch.device("cpu")
    single_observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)
    pools = (slice(0, 1), slice(1, 3))

    def __init__(self) -> None:
        self.count = torch.zeros(3, 1)

    @classmethod
    def known_ids(cls) -> tuple[str, ...]:
        return (cls.id,)

    def reset(self) -> Tensor:
        return self.count.zero_()

    def send(self, pool: int, actions: Tensor) -> None:
        self.count[self.pools[pool]] += 1

    def recv(self, pool: int) -> StepResult:
        count = self.count[self.pools[pool]]
        no = torch.zeros(len(count), dtype=torch.bool)
        return StepResult(count, count[:, 0], no, no, ~no)

    def reseed(self, epoch: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_the_view_declares_next_step_autoreset_and_batched_spaces(id: str) -> None:
    view, reference = as_gymnasium(make(id)), gymnasium.make_vec(id, num_envs=3, vectorization_mode="sync")
    assert isinstance(view, VectorEnv)
    assert view.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert view.num_envs == 3
    for space in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(view, space) == getattr(reference, space)


def test_the_view_steps_like_the_env_and_marks_filler_rows_invalid() -> None:
    view, env = as_gymnasium(make(max_episode_steps=4, seed=1)), make(max_episode_steps=4, seed=1)
    observations, info = view.reset()
    assert info == {}
    np.testing.assert_array_equal(observations, env.reset().numpy())
    valid = []
    for _ in range(11):
        actions = view.action_space.sample()
        expected = env.step(torch.from_numpy(actions))
        observations, rewards, terminated, truncated, info = view.step(actions)
        result = StepResult(observations, rewards, terminated, truncated, info["valid"])
        for name, got, want in zip(StepResult._fields, result, expected, strict=True):
            assert isinstance(got, np.ndarray), name
            assert got.dtype == want.numpy().dtype, name
            np.testing.assert_array_equal(got, want.numpy(), err_msg=name)
        assert observations in view.observation_space
        valid.append(info["valid"].all())
    assert valid == [True] * 4 + [False] + [True] * 4 + [False, True]


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_results_belong_to_the_caller_also_where_the_engine_reuses_memory_and_has_pools(output) -> None:
    view = as_gymnasium(CountingEnv(), output)
    steps = [view.reset()[0], *(view.step(np.zeros(3, dtype=np.int64))[0] for _ in range(3))]
    assert [step.tolist() for step in steps] == [[[float(count)]] * 3 for count in range(4)]


def test_torch_output_gives_tensors_and_takes_them() -> None:
    view = as_gymnasium(make("Pendulum-v1"), output="torch")
    observations, _ = view.reset()
    *results, info = view.step(observations[:, :1].double())
    assert all(isinstance(value, Tensor) for value in (observations, *results, info["valid"]))


def test_equal_reset_seeds_give_equal_episodes_and_other_seeds_others() -> None:
    view = as_gymnasium(make())
    first, again, other, unseeded = (view.reset(seed=seed)[0] for seed in (7, 7, 8, None))
    np.testing.assert_array_equal(first, again)
    assert not np.isclose(first, other).any()
    assert not np.isclose(other, unseeded).any()


def test_gymnasiums_episode_statistics_count_no_filler() -> None:
    view = RecordEpisodeStatistics(as_gymnasium(make("MountainCar-v0", max_episode_steps=3)))
    view.reset()
    episodes = []
    for _ in range(8):
        info = view.step(view.action_space.sample())[-1]
        episodes += list(zip(info["episode"]["r"], info["episode"]["l"], strict=True)) if "episode" in info else []
    assert episodes == [(-3.0, 3)] * 6


def test_wrong_use_is_refused() -> None:
    with pytest.raises(EnvError, match="output=jax"):
        as_gymnasium(make(), output="jax")  # pyright: ignore[reportArgumentType]
    view = as_gymnasium(make())
    with pytest.raises(EnvError, match="low"):
        view.reset(options={"low": -1})
    view.reset()
    with pytest.raises(EnvError, match="needs integers"):
        view.step(np.array([0.5, 1.0, 0.0]))
    with pytest.raises(EnvError, match="actions are"):
        view.step(np.array([0, 1]))
    view.close()
    view.close()
    with pytest.raises(EnvError):
        view.step(np.array([0, 1, 0]))


@pytest.mark.gpu
def test_numpy_actions_reach_an_env_on_the_gpu_and_arrays_come_back() -> None:
    view, host = as_gymnasium(TorchVecEnv("CartPole-v1", 5, device="cuda")), as_gymnasium(make(num_envs=5))
    np.testing.assert_allclose(view.reset(seed=1)[0], host.reset(seed=1)[0], rtol=1e-6)
    actions = view.action_space.sample()
    for got, want in zip(view.step(actions)[:4], host.step(actions)[:4], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
