"""The T-maze, and tasks of the torch engine whose actions have several discrete components."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch_envs import make

from envs.torch_memory import CORRIDOR
from envs.torch_tasks import TASKS, Outcome, State, Task, register_task
from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.schema import compose_config

N = 64


@pytest.mark.parametrize("choice", [0, 1])
def test_only_the_first_row_of_the_t_maze_tells_which_turn_is_right(choice: int) -> None:
    env = make("TMaze-v0", N, seed=3)
    cue = env.reset()[:, 0]
    assert set(cue.tolist()) == {-1.0, 1.0}
    actions = torch.full((N,), choice)
    for position in range(1, CORRIDOR + 1):
        result = env.step(actions)
        assert not result.observations[:, 0].any() and not result.rewards.any() and not result.terminated.any()
        assert (result.observations[:, 1] == (position == CORRIDOR)).all()
    result = env.step(actions)
    assert result.terminated.all() and not result.truncated.any()
    assert torch.equal(result.rewards, cue if choice == 1 else -cue)
    assert not env.step(actions).valid.any()


def grid_step(state: State, action: Tensor) -> Outcome:
    """One variable that counts up by the first component less the second."""
    (x,) = state
    return (x + action[:, 0] - action[:, 1],), action.sum(1).to(x.dtype), torch.zeros_like(x, dtype=torch.bool)


@pytest.fixture
def grid() -> Iterator[str]:
    numbers = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    space = spaces.MultiDiscrete([3, 2], start=[0, 1])
    register_task("Grid-v0", Task(numbers, space, 5, start_low=(0,), start_high=(0,), step=grid_step))
    yield "Grid-v0"
    del TASKS["Grid-v0"]


def test_a_task_sees_all_components_and_a_row_outside_of_any_ends(grid: str) -> None:
    env = make(grid, 4)
    env.reset()
    result = env.step(torch.tensor([[0, 1], [2, 2], [3, 1], [1, 0]]))
    assert result.terminated.tolist() == [False, False, True, True]
    assert result.rewards.tolist() == [1.0, 4.0, 0.0, 0.0]
    assert result.observations[:2, 0].tolist() == [-1.0, 0.0]
    assert env.counters() == {"faulty_steps": 2}


def test_a_compiled_task_takes_several_components(grid: str) -> None:
    eager, compiled = make(grid, 4, compile=False), make(grid, 4, compile=True)
    actions = torch.tensor([[0, 1], [2, 2], [3, 1], [1, 0]])
    for env in (eager, compiled):
        env.reset()
    for found, expected in zip(compiled.step(actions), eager.step(actions), strict=True):
        assert torch.equal(found, expected)


def test_ppo_learns_to_choose_every_component(grid: str) -> None:
    small = ("num_envs=32", "rollout_length=8", "policy=mlp_small", "normalize.observations=false")
    settings = ("ppo.learning_rate=3e-3", "ppo.lr_schedule=constant", "ppo.value_coef=0.5", "device=cpu")
    trainer = Trainer(compose_config(["env.id=Grid-v0", "env.engine=torch", *small, *settings]), QuietConsole())
    rows = [trainer.train_one_update() for _ in range(25)]
    trainer.close()
    assert not any(row["skipped_minibatches"] for row in rows)
    assert rows[-1]["episode_return"] > 0.9 * 5 * 4  # the largest indices of both, five times
