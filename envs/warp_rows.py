"""What a row of the task table says: model, observation, reward, end and beginning of an episode.

A row speaks of *signals*: scalars of one world, named by a `Field` of the simulation's data and a flat index into it.
So one set of kernels (`envs.warp_kernels`) serves all rows (`envs.warp_tasks`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from envs.base import EnvError

_INFINITY = math.inf


class Field(enum.IntEnum):
    """Where a signal is read: an array of the simulation's data, one flat row per world.

    All but QPOS and QVEL are what the integrator's last stage computed, so they lag the state, as in Gymnasium.
    """

    QPOS = 0
    QVEL = 1
    XPOS = 2  #: bodies, 3 entries each
    SITE_XPOS = 3  #: sites, 3 entries each
    SUBTREE_COM = 4  #: bodies, 3 entries each; body 0 is the whole model
    CINERT = 5  #: bodies, 10 entries each
    CVEL = 6  #: bodies, 6 entries each
    QFRC_ACTUATOR = 7  #: from here on forces: 0 in a first observation
    QFRC_CONSTRAINT = 8
    CFRC_EXT = 9  #: bodies, 6 entries each


FORCES = (Field.QFRC_ACTUATOR, Field.QFRC_CONSTRAINT, Field.CFRC_EXT)
STATE = (Field.QPOS, Field.QVEL)


class Transform(enum.IntEnum):
    """What an observation does to its signal, before the clip."""

    IDENTITY = 0
    SIN = 1
    COS = 2


@dataclass(frozen=True)
class Part:
    """A run of observation entries: signals ``start .. stop`` of a field, less those from ``minus`` on, clipped."""

    field: Field
    start: int = 0
    stop: int | None = None
    minus: int | None = None
    transform: Transform = Transform.IDENTITY
    clip: float = _INFINITY


@dataclass(frozen=True)
class Measure:
    """The scalar m that a reward follows from step to step: a coordinate, or with ``minus`` the distance of two points.

    ``at_reset`` names the state entry that equals m in a first observation, where that saves computing kinematics.
    """

    field: Field = Field.QPOS
    start: int = 0
    minus: int | None = None
    at_reset: int | None = None


@dataclass(frozen=True)
class Healthy:
    """The signals ``start .. stop`` of a field must stay in ``[low, high]``; the name is Gymnasium's option."""

    name: str
    field: Field
    start: int
    stop: int | None
    low: float
    high: float


@dataclass(frozen=True)
class Penalty:
    """A cost ``weight * (signal - target)^2``."""

    field: Field
    index: int
    weight: float
    target: float = 0.0


@dataclass(frozen=True)
class Task:
    """One row. With m, m' the measure before and after the step, a the raw action and f the clipped contact forces:

    ``reward = rate * (m' - m) / dt + now * m' + before * m + healthy_reward * is_healthy
    - ctrl_cost_weight * |a|^2 - min(contact_cost_weight * |f|^2, contact_cost_max) - penalties``
    """

    model: str  #: a file of gymnasium/envs/mujoco/assets
    frame_skip: int
    observation: tuple[Part, ...]
    measure: Measure = Measure()
    forward_reward_weight: float = 0.0  #: rate
    measure_weight: float = 0.0  #: now
    measure_before_weight: float = 0.0  #: before
    ctrl_cost_weight: float = 0.0
    contact_cost_weight: float = 0.0
    contact_force_limit: float = _INFINITY
    contact_cost_max: float = _INFINITY
    penalties: tuple[Penalty, ...] = ()
    healthy: tuple[Healthy, ...] = ()
    healthy_reward: float = 0.0
    healthy_reward_at_end: bool = False  #: v4 pays it on the step that terminates, too
    terminate_when_unhealthy: bool = True
    reset_noise_scale: float = 0.0  #: positions: uniform in +- this
    reset_velocity_scale: float | None = None  #: velocities; None: as the positions
    reset_velocity_normal: bool = False  #: normal instead of uniform
    goal_radius: float = 0.0  #: the last two positions are a goal, uniform on a disc of this radius, at rest
    contacts: int = 0  #: room for contacts per world, shared by all worlds
    constraints: int = 8  #: room for constraint rows in each world

    @property
    def reads_contact_forces(self) -> bool:
        """True if observation or reward need ``rne_postconstraint``."""
        return self.contact_cost_weight != 0.0 or any(part.field is Field.CFRC_EXT for part in self.observation)

    @property
    def reads_kinematics_at_reset(self) -> bool:
        """True if a first observation, or m at that time, is more than a function of qpos and qvel."""
        observed = {part.field for part in self.observation}
        if self.measure.at_reset is None:
            observed.add(self.measure.field)
        return not observed <= {*STATE, *FORCES}


#: Gymnasium's options that a caller may override (with each row's ``healthy_*_range``), and the room of the simulation.
OPTIONS = (
    "forward_reward_weight",
    "ctrl_cost_weight",
    "contact_cost_weight",
    "healthy_reward",
    "terminate_when_unhealthy",
    "reset_noise_scale",
    "frame_skip",
    "contacts",
    "constraints",
)
_AT_LEAST = {"frame_skip": 1, "contacts": 0, "constraints": 0}


def customize(task: Task, options: Mapping[str, Any]) -> Task:
    """Return the row with options (``healthy_z_range=(0.3, 1.0)``, ``reset_noise_scale=0.0`` ...) applied.

    Raises:
        EnvError: an option that the row does not have, a value of another type or not finite, or a range not in order.
    """
    ranges = {check.name for check in task.healthy}
    for name, value in options.items():
        if name in ranges:
            continue
        if name not in OPTIONS:
            raise EnvError(f"env.options.{name} is unknown: this task has {', '.join((*OPTIONS, *sorted(ranges)))}")
        _check_option(name, value, type(getattr(task, name)))
    healthy = tuple(_with_range(check, options.get(check.name, (check.low, check.high))) for check in task.healthy)
    return replace(task, healthy=healthy, **{name: options[name] for name in options.keys() - ranges})


def _check_option(name: str, value: Any, kind: type) -> None:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool) or not math.isfinite(value):
        raise EnvError(f"env.options.{name}={value!r}: it must be a {kind.__name__}, finite")
    if value < _AT_LEAST.get(name, value):
        raise EnvError(f"env.options.{name}={value}: it must be at least {_AT_LEAST[name]}")


def _with_range(check: Healthy, bounds: Any) -> Healthy:
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        raise EnvError(f"env.options.{check.name}={bounds!r}: it must be two numbers") from None
    if not low <= high:
        raise EnvError(f"env.options.{check.name}={bounds!r}: it must be ordered, low <= high")
    return replace(check, low=low, high=high)
