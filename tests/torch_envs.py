"""What the tests of the torch engine share: tasks, envs on the CPU, random actions and a look at the state."""

import gymnasium
import numpy as np
import torch
from torch import Tensor

from envs.base import StepResult
from envs.torch_classic import TorchVecEnv

TASKS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")


def make(id: str, num_envs: int, **options) -> TorchVecEnv:
    return TorchVecEnv(id, num_envs, device="cpu", **options)


def random_actions(env: TorchVecEnv, generator: torch.Generator, steps: int = 1) -> Tensor:
    """Actions ``[steps, num_envs, *shape]``, the continuous ones beyond the bounds."""
    space = env.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return torch.randint(0, int(space.n), (steps, env.num_envs), generator=generator)
    return 3 * torch.rand(steps, env.num_envs, *(space.shape or ()), generator=generator) - 1.5


def states(env: TorchVecEnv) -> np.ndarray:
    """The task's variables ``[num_envs, D]``."""
    saved = env.state_dict()
    return torch.stack([value for name, value in saved.items() if name.startswith("state.")], dim=1).numpy()


def assert_same(first: StepResult, second: StepResult) -> None:
    for name, a, b in zip(StepResult._fields, first, second, strict=True):
        assert torch.equal(a, b), name
