"""One control step of a torch task in the transition contract of `envs.base`, as a function that compiles whole."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from envs.actions import index_range
from envs.base import StepResult
from envs.counter_rng import uniform
from envs.torch_tasks import State, Task


class Columns(NamedTuple):
    """What a step reads and updates in place, one entry per env."""

    state: State  #: the task's variables
    elapsed: Tensor  #: int32, transitions since the episode began
    episode: Tensor  #: int64, counts the env's episodes and so selects its random stream
    done: Tensor  #: bool, the episode has ended: the next row is filler
    faults: Tensor  #: int32, transitions ended by an unusable action or outcome


class Starts(NamedTuple):
    """What first states are drawn from; all of it tensors, so that a captured step sees a new key."""

    key: Tensor  #: ``[2]`` int64
    columns: Tensor  #: ``[N]`` int64
    variables: Tensor  #: ``[D]`` int64
    low: Tensor  #: ``[D, 1]`` float64
    high: Tensor  #: ``[D, 1]`` float64

    def draw(self, episode: Tensor, dtype: torch.dtype) -> State:
        """The first state of every env's given episode."""
        numbers = uniform(self.key, self.columns, episode, self.variables)
        return (self.low + (self.high - self.low) * numbers).to(dtype).unbind()


StepFunction = Callable[[Columns, Starts, Tensor], StepResult]


def assign(buffers: State, values: State) -> None:
    """Copy every value into its buffer."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def step_function(task: Task, max_episode_steps: int) -> StepFunction:
    """Build the step of a task: dynamics, flags, observation, and the reset of the envs whose episode had ended."""
    bounds = _index_bounds(task.action_space)  # here: NumPy in a compiled step is work for the host, and C++ to compile

    def step(columns: Columns, starts: Starts, actions: Tensor) -> StepResult:
        valid = ~columns.done
        usable, actions = _usable(actions, bounds)
        moved, rewards, terminated = task.step(columns.state, actions)
        for outcome in (*moved, rewards):
            usable = usable & outcome.isfinite()
        rewards = torch.where(valid & usable, rewards, 0.0)
        terminated = valid & (terminated | ~usable)
        elapsed = torch.where(valid, columns.elapsed + 1, 0)
        truncated = valid & ~terminated & (elapsed >= max_episode_steps)

        episode = columns.episode + columns.done
        first = starts.draw(episode, rewards.dtype)
        state = tuple(
            torch.where(valid, torch.where(usable, new, old), start)
            for old, new, start in zip(columns.state, moved, first, strict=True)
        )
        observations = task.observe(state)

        assign(columns.state, state)
        columns.elapsed.copy_(elapsed)
        columns.episode.copy_(episode)
        columns.faults.add_(valid & ~usable)
        columns.done.copy_(terminated | truncated)
        return StepResult(observations, rewards, terminated, truncated, valid)

    # torch.compile caches by code object and gives up after eight shapes, so every env gets a code object of its own
    return types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


def _index_bounds(space: spaces.Space) -> list[tuple[int, int]] | None:
    """First and last index of each component of a discrete action; None where actions are continuous."""
    indices = index_range(space)
    return None if indices is None else list(zip(*(bound.ravel().tolist() for bound in indices), strict=True))


def _usable(actions: Tensor, bounds: list[tuple[int, int]] | None) -> tuple[Tensor, Tensor]:
    """``[N]`` flags of the actions that are finite and in the space, and actions that a task can index with."""
    if bounds is None:
        return actions.view(len(actions), -1).isfinite().all(dim=1), actions
    components = actions.view(len(actions), -1).unbind(1)
    legal = torch.stack([c.clamp(first, last) for c, (first, last) in zip(components, bounds, strict=True)], dim=1)
    legal = legal.view(actions.shape)
    return (legal == actions).view(len(actions), -1).all(dim=1), legal
