"""Randomness and state of the torch engine: who starts where, and what a restored env does next."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_envs import TASKS, assert_same, make, random_actions, states

from envs.base import EnvError
from envs.counter_rng import stream_key, uniform


def starts(seed: int, rank: int = 0, epoch: int = 0, num_envs: int = 4, resets: int = 3) -> Tensor:
    """First observations ``[resets * num_envs, 4]``."""
    env = make("CartPole-v1", num_envs, seed=seed, rank=rank, world_size=4)
    env.reseed(epoch)
    return torch.cat([env.reset() for _ in range(resets)])


def test_starts_are_a_function_of_seed_rank_and_epoch() -> None:
    assert torch.equal(starts(5, 1, 2), starts(5, 1, 2))


def test_no_start_is_shared_between_envs_episodes_ranks_seeds_and_epochs() -> None:
    every = [starts(seed, rank, epoch) for seed in (0, 1, 43, 2**32, 2**80) for rank in range(4) for epoch in (0, 1, 7)]
    values = torch.cat(every).flatten()
    assert len(values.unique()) > 0.999 * len(values)  # float32 holds few enough numbers that a pair may meet
    assert len(torch.cat(every).unique(dim=0)) == len(torch.cat(every))


def test_starts_do_not_depend_on_the_number_of_envs_or_on_the_actions() -> None:
    assert torch.equal(starts(1, num_envs=3, resets=1), starts(1, num_envs=7, resets=1)[:3])
    episodes = []
    for action in (0, 1):
        env = make("CartPole-v1", 1, seed=9)
        env.reset()
        rows = [env.step(torch.tensor([action])) for _ in range(60)]
        episodes.append(torch.stack([row.observations[0] for row in rows if not row.valid][:3]))
    assert torch.equal(*episodes)


@pytest.mark.parametrize("num_envs, resets", [(20000, 1), (20, 1000)])
def test_starts_are_uniform_in_gymnasiums_box_over_envs_and_over_episodes(num_envs: int, resets: int) -> None:
    env = make("Pendulum-v1", num_envs, seed=2)
    draws = []
    for _ in range(resets):
        env.reset()
        draws.append(states(env))
    fractions: np.ndarray = np.concatenate(draws) / [2 * math.pi, 2.0] + 0.5
    count = len(fractions)
    distance = np.abs(np.sort(fractions, axis=0) - (np.arange(count)[:, None] + 0.5) / count).max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, level 0.001
    assert abs(np.corrcoef(fractions[:, 0], fractions[:, 1])[0, 1]) < 4 / math.sqrt(count)


def test_the_generator_is_splitmix64() -> None:
    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    key = stream_key(7, rank=1, epoch=2)
    first, second = (int(word) % 2**64 for word in key)
    numbers = uniform(key, torch.tensor([0, 70000]), torch.tensor([1, 2**31 + 5]), torch.arange(3))
    for column, (env, episode) in enumerate([(0, 1), (70000, 2**31 + 5)]):
        for lane in range(3):
            stream = mix((first + (env << 32) + episode) % 2**64)
            word = mix((stream + lane * 0x9E3779B97F4A7C15) % 2**64 ^ second)
            assert float(numbers[lane, column]) == (word >> 11) * 2.0**-53


@pytest.mark.parametrize("id", TASKS)
def test_a_restored_state_continues_bit_for_bit(id: str) -> None:
    env, generator = make(id, 5, seed=3, max_episode_steps=11), torch.Generator().manual_seed(0)
    env.reset()
    before, after = random_actions(env, generator, 17), random_actions(env, generator, 40)
    last = [env.step(actions) for actions in before][-1]
    saved = env.state_dict()
    straight = [env.step(actions) for actions in after]

    restored = make(id, 5, seed=8, max_episode_steps=11)
    assert torch.equal(restored.load_state_dict(saved), last.observations)
    for actions, expected in zip(after, straight, strict=True):
        assert_same(restored.step(actions), expected)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    env = make("CartPole-v1", 3)
    env.reset()
    saved = env.state_dict()
    missing = {name: value for name, value in saved.items() if name != "key"}
    for wrong in (make("CartPole-v1", 2).state_dict(), missing, saved | {"elapsed": saved["elapsed"].long()}):
        with pytest.raises(EnvError, match="expected"):
            env.load_state_dict(wrong)
    assert all(torch.equal(value, saved[name]) for name, value in env.state_dict().items())
