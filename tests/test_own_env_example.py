"""The code of docs/own_env.md, run as it stands."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import pytest
import torch
from gymnasium.spaces import Box, MultiBinary

import envs
from envs.base import EnvError
from envs.torch_tasks import TASKS, Task, register_task

PAGE = Path(__file__).parents[1] / "docs" / "own_env.md"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """What the page's code defines; its registrations are undone afterwards."""
    names: dict[str, Any] = {}
    with patch.dict(TASKS), patch.dict(envs.ENGINES), patch.dict(gymnasium.registry):
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(block, names)
        yield names


def test_the_examples_policy_reaches_its_goals(example: dict[str, Any]) -> None:
    env, observations = example["env"], example["observations"]
    arrived = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    for _ in range(200):
        observations, _, terminated, truncated, _ = env.step(observations[:, :2] - 2 * observations[:, 2:])
        arrived |= terminated & ~truncated
    assert arrived.float().mean() > 0.99
    assert env.counters() == {"faulty_steps": 0}


def test_the_example_starts_at_rest_with_a_new_goal_in_every_episode(example: dict[str, Any]) -> None:
    env = example["same"]
    first, second = env.reset(), env.reset()
    assert env.id == "Reach-v0"
    assert torch.equal(first[:, 2:], torch.zeros(4, 2))
    assert not torch.isclose(first[:, :2], second[:, :2]).any()


def test_the_gymnasium_example_rests_where_it_starts_and_takes_its_option(example: dict[str, Any]) -> None:
    env = example["slides"]
    start = env.reset().clone()
    assert env.id == "Slide-v0" and len(start.unique(dim=0)) == 4
    result = env.step(torch.zeros(4, 1))
    assert torch.equal(result.observations, start) and torch.equal(result.rewards, -start[:, 0].abs())
    assert torch.equal(result.terminated, start[:, 0].abs() < 0.1)


def test_the_example_is_about_fifty_lines_long() -> None:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(block.splitlines()) <= 60


def test_a_taken_id_is_refused() -> None:
    with pytest.raises(EnvError, match="CartPole-v1"):
        register_task("CartPole-v1", TASKS["CartPole-v1"])


@pytest.mark.parametrize("wrong", [{"start_high": (1.0,)}, {"max_episode_steps": 0}, {"action_space": MultiBinary(2)}])
def test_a_task_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match=next(iter(wrong))):
        Task(**(vars(TASKS["Pendulum-v1"]) | wrong))


def test_observations_of_another_width_than_declared_are_refused() -> None:
    narrow = Box(-9, 9, (2,))
    with patch.dict(TASKS):
        register_task("Narrow-v0", replace(TASKS["Pendulum-v1"], observation_space=narrow))
        with pytest.raises(EnvError, match=r"Narrow-v0: observe gives \[5, 3\], its observation_space says \[5, 2\]"):
            envs.make("Narrow", "torch", 5)


def test_a_task_may_take_one_number_per_env() -> None:
    scalar = replace(
        TASKS["Pendulum-v1"],
        action_space=Box(-2, 2, ()),
        step=lambda state, action: TASKS["Pendulum-v1"].step(state, action[:, None]),
    )
    with patch.dict(TASKS):
        register_task("Scalar-v0", scalar)
        env, twin = envs.make("Scalar", "torch", 3, seed=1), envs.make("Pendulum", "torch", 3, seed=1)
        env.reset(), twin.reset()
        actions = torch.tensor([-1.0, torch.nan, 1.5])
        for found, expected in zip(env.step(actions), twin.step(actions[:, None]), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
@pytest.mark.parametrize("engine", ["envpool", "gymnasium", "torch"])
def test_a_device_that_is_absent_is_refused_by_every_engine(engine: str) -> None:
    with pytest.raises(EnvError, match="device=cuda cannot be used: "):
        envs.make("CartPole", engine, 2, device="cuda")


def test_an_id_that_another_engine_has_is_told_with_that_engine() -> None:
    with patch.dict(TASKS):
        register_task("Glide-v0", TASKS["Pendulum-v1"])
        with pytest.raises(EnvError, match=r"unknown to env.engine=gymnasium.*; env.engine=torch has Glide-v0"):
            envs.resolve("Glide", "gymnasium")
