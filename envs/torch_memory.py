"""A task of the torch engine that only a policy with memory can solve."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from envs.torch_tasks import Outcome, State, Task, register_task

CORRIDOR = 10  # steps between the cue and the choice


def tmaze_step(state: State, action: Tensor) -> Outcome:
    """``(cue, its sign counts; position)``: one step along the corridor, and at its end a turn left (0) or right (1),
    which earns 1 where a cue above 0 meant right and another one left, else -1, and ends the episode."""
    cue, position = state
    at_junction = position >= CORRIDOR
    is_right = (action == 1) == (cue > 0)
    reward = torch.where(at_junction, torch.where(is_right, 1.0, -1.0), 0.0).to(cue.dtype)
    return (cue, position + 1), reward, at_junction


def tmaze_observe(state: State) -> Tensor:
    """``[N, 2]``: the cue's sign, shown at the start only, and whether this is the junction."""
    cue, position = state
    sign = torch.where(cue > 0, 1.0, -1.0).to(cue.dtype)
    return torch.stack((torch.where(position < 1, sign, 0.0), (position >= CORRIDOR).to(cue.dtype)), dim=-1)


#: The T-maze of Bakker (2002, "Reinforcement learning with long short-term memory"), walked without choices until the
#: junction: without memory the best mean return is 0, with it 1.
TMAZE = Task(
    observation_space=spaces.Box(np.array([-1, 0], np.float32), np.array([1, 1], np.float32)),
    action_space=spaces.Discrete(2),
    max_episode_steps=CORRIDOR + 2,
    start_low=(-1.0, 0.0),
    start_high=(1.0, 0.0),
    step=tmaze_step,
    observe=tmaze_observe,
)
register_task("TMaze-v0", TMAZE)
