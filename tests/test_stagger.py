"""Staggered starts: time limits spread over all steps instead of coming all at once."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

import envs
from envs.base import EnvError, VecEnv

LIMIT = 7
needs_warp = pytest.mark.skipif(not importlib.util.find_spec("mujoco_warp"), reason="the warp extra is not installed")
#: Neither task ends by itself.
CASES = [("Pendulum-v1", "torch"), pytest.param("Reacher-v5", "mujoco_warp", marks=needs_warp)]


def staggered(id: str, engine: str, **options) -> VecEnv:
    return envs.make(id, engine, 64, device="cpu", max_episode_steps=LIMIT, stagger=True, **options)


def truncations(env: VecEnv, steps: int = 2 * LIMIT + 1) -> Tensor:
    """``[steps, 64]`` bool, from a reset on; an end is followed by one filler row."""
    env.reset()
    actions = torch.zeros(env.num_envs, *(env.single_action_space.shape or ()))
    truncated, ended = [], torch.zeros(env.num_envs, dtype=torch.bool)
    for _ in range(steps):
        result = env.step(actions)
        assert torch.equal(result.valid, ~ended)
        assert not result.terminated.any()
        ended = result.truncated.clone()
        truncated.append(ended)
    return torch.stack(truncated)


@pytest.mark.parametrize(("id", "engine"), CASES)
def test_first_time_limits_spread_over_all_steps_and_later_episodes_are_whole(id: str, engine: str) -> None:
    truncated = truncations(staggered(id, engine))
    first = truncated.int().argmax(dim=0)
    counts = first.bincount(minlength=LIMIT)
    assert len(counts) == LIMIT
    expected = 64 / LIMIT
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # chi squared with 6 degrees of freedom: 0.1 %
    every = torch.zeros_like(truncated)
    every[first, torch.arange(64)] = True
    every[first + LIMIT + 1, torch.arange(64)] = True
    assert torch.equal(truncated, every)


def ages(env: VecEnv) -> Tensor:
    env.reset()
    state = env.state_dict()
    assert state is not None
    return state["elapsed"]


@pytest.mark.parametrize(("id", "engine"), CASES)
def test_ages_follow_from_seed_and_epoch_and_leave_first_states_alone(id: str, engine: str) -> None:
    env, same, other = (staggered(id, engine, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(env.reset(), envs.make(id, engine, 64, device="cpu", seed=3).reset())
    same.reset()
    assert torch.equal(ages(env), ages(same))
    assert not torch.equal(ages(env), ages(other))
    for each in (env, other):
        each.reseed(1)
    assert not torch.equal(ages(env), ages(same))


@pytest.mark.parametrize(("id", "engine"), CASES)
def test_a_value_that_is_no_switch_is_refused(id: str, engine: str) -> None:
    with pytest.raises(EnvError, match=r"env\.options\.stagger='yes': it must be true or false"):
        envs.make(id, engine, 2, device="cpu", stagger="yes")
