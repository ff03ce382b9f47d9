"""The tasks of the torch engine: each row is two spaces, a time limit, a box of first states and two pure functions.

A state is a tuple of ``[N]`` vectors, one per variable: a whole control step then compiles into few pointwise kernels.
The five classic tasks repeat Gymnasium's arithmetic, which makes them equal in float64, step for step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from envs.base import EnvError

State: TypeAlias = tuple[Tensor, ...]
Outcome: TypeAlias = tuple[State, Tensor, Tensor]


def _stack(state: State) -> Tensor:
    return torch.stack(state, dim=-1)


@dataclass(frozen=True)
class Task:
    """One env, batched over ``N`` columns; resets, time limits and randomness are added by the engine.

    Every function must be pure, free of host synchronization (no ``.item()``, no tensor-valued ``if``) and must treat
    its columns independently; then it also compiles and runs inside a CUDA graph.
    """

    observation_space: spaces.Box
    action_space: spaces.Box | spaces.Discrete | spaces.MultiDiscrete
    max_episode_steps: int  #: transitions until an episode is truncated
    #: Episodes start uniformly in ``[start_low, start_high)``; one number per state variable.
    start_low: Sequence[float]
    start_high: Sequence[float]
    #: ``(state, actions) -> (next state, rewards, terminated)``; all ``[N]`` in the engine's dtype, terminated bool;
    #: actions are ``[N, *shape]`` in the engine's dtype, or int64 inside the space if discrete.
    step: Callable[[State, Tensor], Outcome]
    #: ``state -> [N, *observation_shape]``; by default the variables, stacked.
    observe: Callable[[State], Tensor] = _stack

    def __post_init__(self) -> None:
        if len(self.start_low) != len(self.start_high):
            raise EnvError(f"start_low={self.start_low} and start_high={self.start_high}: they must be equally long")
        if not isinstance(self.action_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete):
            raise EnvError(f"action_space={self.action_space}: it must be a Box, Discrete or MultiDiscrete")
        if self.max_episode_steps < 1:
            raise EnvError(f"max_episode_steps={self.max_episode_steps}: it must be at least 1")


def _wrap_angle(angle: Tensor) -> Tensor:
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def _box(*high: float, low: Sequence[float] | None = None) -> spaces.Box:
    upper = np.array(high, dtype=np.float32)
    return spaces.Box(-upper if low is None else np.array(low, dtype=np.float32), upper, dtype=np.float32)


# CartPole: Barto, Sutton & Anderson (1983), with the equations of Florian (2007), explicit Euler.
GRAVITY, POLE_MASS, TOTAL_MASS, HALF_LENGTH, FORCE, CARTPOLE_DT = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
POSITION_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360


def cartpole_step(state: State, action: Tensor) -> Outcome:
    """``(x [m], x' [m/s], theta [rad], theta' [rad/s])``, pushed with 10 N left (0) or right (1) for 0.02 s."""
    x, x_dot, theta, theta_dot = state
    force = FORCE * (2 * action.to(x.dtype) - 1)
    sin, cos = torch.sin(theta), torch.cos(theta)
    push = (force + POLE_MASS * HALF_LENGTH * theta_dot**2 * sin) / TOTAL_MASS
    theta_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos**2 / TOTAL_MASS))
    x_acc = push - POLE_MASS * HALF_LENGTH * theta_acc * cos / TOTAL_MASS
    x, x_dot = x + CARTPOLE_DT * x_dot, x_dot + CARTPOLE_DT * x_acc
    theta, theta_dot = theta + CARTPOLE_DT * theta_dot, theta_dot + CARTPOLE_DT * theta_acc
    terminated = (x.abs() > POSITION_LIMIT) | (theta.abs() > ANGLE_LIMIT)
    return (x, x_dot, theta, theta_dot), torch.ones_like(x), terminated


def pendulum_step(state: State, action: Tensor) -> Outcome:
    """``(theta [rad, 0 is upright], theta' [rad/s])``, a torque within 2 Nm for 0.05 s; a quadratic cost."""
    theta, theta_dot = state
    torque = action[:, 0].clamp(-2.0, 2.0)
    cost = _wrap_angle(theta) ** 2 + 0.1 * theta_dot**2 + 0.001 * torque**2
    theta_dot = (theta_dot + (15.0 * torch.sin(theta) + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
    theta = theta + theta_dot * 0.05
    return (theta, theta_dot), -cost, torch.zeros_like(theta, dtype=torch.bool)


def pendulum_observe(state: State) -> Tensor:
    """``[N, 3]``: cosine and sine of the angle, and its speed."""
    theta, theta_dot = state
    return torch.stack((torch.cos(theta), torch.sin(theta), theta_dot), dim=-1)


def _acrobot_derivatives(state: State, torque: Tensor) -> State:
    """Equations of motion (Sutton & Barto 1998, section 11.3): links of 1 m, 1 kg and inertia 1, centred halfway."""
    theta1, theta2, speed1, speed2 = state
    sin2, cos2 = torch.sin(theta2), torch.cos(theta2)
    d1 = 0.25 + (1.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * GRAVITY * torch.cos(theta1 + theta2 - math.pi / 2)
    phi1 = -0.5 * speed2**2 * sin2 - speed2 * speed1 * sin2 + 1.5 * GRAVITY * torch.cos(theta1 - math.pi / 2) + phi2
    acc2 = (torque + d2 / d1 * phi1 - 0.5 * speed1**2 * sin2 - phi2) / (1.25 - d2**2 / d1)
    return speed1, speed2, -(d2 * acc2 + phi1) / d1, acc2


def acrobot_step(state: State, action: Tensor) -> Outcome:
    """``(theta1, theta2 [rad], theta1', theta2' [rad/s])``, a torque of -1, 0 or 1 Nm for 0.2 s (RK4)."""
    torque, dt = action.to(state[0].dtype) - 1.0, 0.2

    def shifted(slope: State, by: float) -> State:
        return tuple(value + by * change for value, change in zip(state, slope, strict=True))

    k1 = _acrobot_derivatives(state, torque)
    k2 = _acrobot_derivatives(shifted(k1, dt / 2), torque)
    k3 = _acrobot_derivatives(shifted(k2, dt / 2), torque)
    k4 = _acrobot_derivatives(shifted(k3, dt), torque)
    mean = tuple(a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
    theta1, theta2, speed1, speed2 = shifted(mean, dt / 6)
    theta1, theta2 = _wrap_angle(theta1), _wrap_angle(theta2)
    speed1, speed2 = speed1.clamp(-4 * math.pi, 4 * math.pi), speed2.clamp(-9 * math.pi, 9 * math.pi)
    terminated = -torch.cos(theta1) - torch.cos(theta2 + theta1) > 1.0
    return (theta1, theta2, speed1, speed2), terminated.to(theta1.dtype) - 1.0, terminated


def acrobot_observe(state: State) -> Tensor:
    """``[N, 6]``: cosine and sine of both angles, and their speeds."""
    theta1, theta2, speed1, speed2 = state
    return torch.stack(
        (torch.cos(theta1), torch.sin(theta1), torch.cos(theta2), torch.sin(theta2), speed1, speed2), dim=-1
    )


LEFT_WALL, RIGHT_WALL, MAX_SPEED = -1.2, 0.6, 0.07


def _drive(state: State, acceleration: Tensor) -> State:
    """One step on the hill (Moore 1990); the left wall stops the car."""
    position, velocity = state
    velocity = (velocity + (acceleration - 0.0025 * torch.cos(3 * position))).clamp(-MAX_SPEED, MAX_SPEED)
    position = (position + velocity).clamp(LEFT_WALL, RIGHT_WALL)
    return position, torch.where((position == LEFT_WALL) & (velocity < 0), 0.0, velocity)


def mountain_car_step(state: State, action: Tensor) -> Outcome:
    """``(position, velocity)``, full throttle back (0), none (1) or forward (2); reward -1 until the flag at 0.5."""
    position, velocity = _drive(state, (action.to(state[0].dtype) - 1.0) * 0.001)
    return (position, velocity), torch.full_like(position, -1.0), (position >= 0.5) & (velocity >= 0)


def mountain_car_continuous_step(state: State, action: Tensor) -> Outcome:
    """``(position, velocity)``, a throttle within 1; 100 at the flag at 0.45, minus a tenth of the action squared."""
    throttle = action[:, 0]
    position, velocity = _drive(state, throttle.clamp(-1.0, 1.0) * 0.0015)
    terminated = (position >= 0.45) & (velocity >= 0)
    return (position, velocity), 100.0 * terminated - 0.1 * throttle**2, terminated


_CAR_SPACE = _box(RIGHT_WALL, MAX_SPEED, low=(LEFT_WALL, -MAX_SPEED))

TASKS: dict[str, Task] = {
    "CartPole-v1": Task(
        observation_space=_box(2 * POSITION_LIMIT, math.inf, 2 * ANGLE_LIMIT, math.inf),
        action_space=spaces.Discrete(2),
        max_episode_steps=500,
        start_low=(-0.05,) * 4,
        start_high=(0.05,) * 4,
        step=cartpole_step,
    ),
    "Pendulum-v1": Task(
        observation_space=_box(1.0, 1.0, 8.0),
        action_space=_box(2.0),
        max_episode_steps=200,
        start_low=(-math.pi, -1.0),
        start_high=(math.pi, 1.0),
        step=pendulum_step,
        observe=pendulum_observe,
    ),
    "Acrobot-v1": Task(
        observation_space=_box(1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi),
        action_space=spaces.Discrete(3),
        max_episode_steps=500,
        start_low=(-0.1,) * 4,
        start_high=(0.1,) * 4,
        step=acrobot_step,
        observe=acrobot_observe,
    ),
    "MountainCar-v0": Task(
        observation_space=_CAR_SPACE,
        action_space=spaces.Discrete(3),
        max_episode_steps=200,
        start_low=(-0.6, 0.0),
        start_high=(-0.4, 0.0),
        step=mountain_car_step,
    ),
    "MountainCarContinuous-v0": Task(
        observation_space=_CAR_SPACE,
        action_space=_box(1.0),
        max_episode_steps=999,
        start_low=(-0.6, 0.0),
        start_high=(-0.4, 0.0),
        step=mountain_car_continuous_step,
    ),
}


def register_task(id: str, task: Task) -> None:
    """Add a task to the table, so that ``envs.make(id, engine="torch", ...)`` and ``env.id=<id>`` know it.

    Raises:
        EnvError: the id is taken.
    """
    if id in TASKS:
        raise EnvError(f"the torch engine already has a task {id!r}; choose another id")
    TASKS[id] = task
