"""The part of a control step that is not physics: reset, observation, reward, flags and faults, one thread per world.

All kernels work in place on the arrays of `Worlds`, `Signals` and `Rules`, allocate nothing and never synchronize, so a
captured graph may replay them. What differs between tasks is data (`envs.warp_rows`), never code.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels are written in Warp's language, whose types are not Python's.

from __future__ import annotations

from typing import Any

import warp as wp

from envs.warp_rows import Field, Transform
from envs.warp_starts import Starts, write_first_state

wp.set_module_options({"enable_backward": False})

_QPOS = wp.constant(int(Field.QPOS))
_QVEL = wp.constant(int(Field.QVEL))
_XPOS = wp.constant(int(Field.XPOS))
_SITE_XPOS = wp.constant(int(Field.SITE_XPOS))
_SUBTREE_COM = wp.constant(int(Field.SUBTREE_COM))
_CINERT = wp.constant(int(Field.CINERT))
_CVEL = wp.constant(int(Field.CVEL))
_QFRC_ACTUATOR = wp.constant(int(Field.QFRC_ACTUATOR))
_QFRC_CONSTRAINT = wp.constant(int(Field.QFRC_CONSTRAINT))
_SIN = wp.constant(int(Transform.SIN))
_COS = wp.constant(int(Transform.COS))


@wp.struct
class Signals:
    """The simulation's arrays that tasks read, each ``[world, entry]``; see `envs.warp_rows.Field`."""

    qpos: wp.array2d[float]
    qvel: wp.array2d[float]
    xpos: wp.array2d[float]
    site_xpos: wp.array2d[float]
    subtree_com: wp.array2d[float]
    cinert: wp.array2d[float]
    cvel: wp.array2d[float]
    qfrc_actuator: wp.array2d[float]
    qfrc_constraint: wp.array2d[float]
    cfrc_ext: wp.array2d[float]


@wp.struct
class Worlds:
    """What the envs keep per world, and what they return."""

    done: wp.array[bool]  # the last step ended the episode: the next one is filler
    valid: wp.array[bool]
    broken: wp.array[bool]  # a value that is not finite was seen in this step
    elapsed: wp.array[int]
    episode: wp.array[wp.int64]
    measure: wp.array[float]  # the task's measure when the last step ended
    observations: wp.array2d[float]
    rewards: wp.array[float]
    terminated: wp.array[bool]
    truncated: wp.array[bool]
    # broken worlds, steps that may have dropped contacts, or constraints; first broken world
    faults: wp.array[wp.int64]


@wp.struct
class Rules:
    """A task's row as arrays and numbers; see `envs.warp_rows.Task`."""

    entries: wp.array[wp.vec4i]  # per observation entry: field, index, index to subtract or -1, transform
    clips: wp.array[float]
    healthy: wp.array[wp.vec2i]  # field, index
    healthy_ranges: wp.array[wp.vec2]
    penalties: wp.array[wp.vec2i]  # field, index
    penalty_terms: wp.array[wp.vec2]  # weight, target
    measure: wp.vec3i  # field, index, index to subtract or -1
    measure_at_reset: int  # or -1
    rate: float  # of m' - m: forward_reward_weight / dt
    now: float
    before: float
    ctrl_cost_weight: float
    contact_cost_weight: float
    contact_force_limit: float
    contact_cost_max: float
    healthy_reward: float
    healthy_reward_at_end: bool
    terminate_when_unhealthy: bool
    max_episode_steps: wp.int32
    contact_faults: int  # bits of the simulation's overflow word
    constraint_faults: int


@wp.func
def _signal(signals: Signals, world: int, field: int, index: int) -> float:
    if field == _QPOS:
        return signals.qpos[world, index]
    if field == _QVEL:
        return signals.qvel[world, index]
    if field == _XPOS:
        return signals.xpos[world, index]
    if field == _SITE_XPOS:
        return signals.site_xpos[world, index]
    if field == _SUBTREE_COM:
        return signals.subtree_com[world, index]
    if field == _CINERT:
        return signals.cinert[world, index]
    if field == _CVEL:
        return signals.cvel[world, index]
    if field == _QFRC_ACTUATOR:
        return signals.qfrc_actuator[world, index]
    if field == _QFRC_CONSTRAINT:
        return signals.qfrc_constraint[world, index]
    return signals.cfrc_ext[world, index]


@wp.func
def _measure(signals: Signals, rules: Rules, world: int) -> float:
    field = rules.measure[0]
    start = rules.measure[1]
    if rules.measure[2] < 0:
        return _signal(signals, world, field, start)
    squares = wp.float32(0.0)
    for axis in range(3):
        here = _signal(signals, world, field, start + axis)
        there = _signal(signals, world, field, rules.measure[2] + axis)
        squares += (here - there) * (here - there)
    return wp.sqrt(squares)


@wp.kernel
def begin_step(
    actions: wp.array2d[float],
    worlds: Worlds,
    starts: Starts,
    signals: Signals,
    ctrl: wp.array2d[float],
    warmstart: wp.array2d[float],
):
    """Hand the actions to the physics; a world that is done gets its next first state and no action instead.

    Its state is written again by `end_step`: here it keeps a fallen or broken world from slowing the solver for all.
    """
    world = wp.tid()
    filler = worlds.done[world]
    worlds.valid[world] = not filler
    worlds.broken[world] = False
    for i in range(ctrl.shape[1]):
        if filler:
            ctrl[world, i] = 0.0
        else:
            ctrl[world, i] = actions[world, i]
    if filler:
        worlds.episode[world] = worlds.episode[world] + wp.int64(1)
        write_first_state(starts, signals.qpos, signals.qvel, warmstart, world, worlds.episode[world])


@wp.kernel
def observe(rules: Rules, worlds: Worlds, signals: Signals, of_valid: bool):
    """Write the observations of the valid worlds, or of the others: those have no forces yet. Launched over entries."""
    world, entry = wp.tid()  # pyright: ignore[reportAssignmentType]
    if worlds.valid[world] != of_valid:
        return
    source = rules.entries[entry]
    value = wp.float32(0.0)
    if of_valid or source[0] < _QFRC_ACTUATOR:
        value = _signal(signals, world, source[0], source[1])
    if source[2] >= 0:
        value -= _signal(signals, world, source[0], source[2])
    if source[3] == _SIN:
        value = wp.sin(value)
    if source[3] == _COS:
        value = wp.cos(value)
    if not wp.isfinite(value):
        worlds.broken[world] = True
    worlds.observations[world, entry] = wp.clamp(value, -rules.clips[entry], rules.clips[entry])


@wp.func
def _is_healthy(rules: Rules, signals: Signals, world: int) -> bool:
    for i in range(rules.healthy.shape[0]):
        at = rules.healthy[i]
        value = _signal(signals, world, at[0], at[1])
        if not (rules.healthy_ranges[i][0] <= value and value <= rules.healthy_ranges[i][1]):
            return False
    return True


@wp.func
def _costs(rules: Rules, signals: Signals, actions: wp.array2d[float], world: int) -> float:
    control = wp.float32(0.0)
    for i in range(actions.shape[1]):
        control += actions[world, i] * actions[world, i]
    cost = rules.ctrl_cost_weight * control
    if rules.contact_cost_weight > 0.0:
        contact = wp.float32(0.0)
        for i in range(signals.cfrc_ext.shape[1]):
            force = wp.clamp(signals.cfrc_ext[world, i], -rules.contact_force_limit, rules.contact_force_limit)
            contact += force * force
        cost += wp.min(rules.contact_cost_weight * contact, rules.contact_cost_max)
    for i in range(rules.penalties.shape[0]):
        at = rules.penalties[i]
        distance = _signal(signals, world, at[0], at[1]) - rules.penalty_terms[i][1]
        cost += rules.penalty_terms[i][0] * distance * distance
    return cost


@wp.func
def _is_finite(values: wp.array2d[float], world: int) -> bool:
    for i in range(values.shape[1]):  # noqa: SIM110  # Warp has no generators
        if not wp.isfinite(values[world, i]):
            return False
    return True


@wp.func
def _count_overflow(rules: Rules, worlds: Worlds, overflow: int):
    if overflow & rules.contact_faults:
        wp.atomic_add(worlds.faults, 1, wp.int64(1))
    if overflow & rules.constraint_faults:
        wp.atomic_add(worlds.faults, 2, wp.int64(1))


@wp.func
def _mend(worlds: Worlds, world: int):
    """End a broken world with a reward and an observation that cannot poison anything that learns from them."""
    worlds.rewards[world] = 0.0
    for i in range(worlds.observations.shape[1]):
        worlds.observations[world, i] = 0.0
    wp.atomic_add(worlds.faults, 0, wp.int64(1))
    wp.atomic_min(worlds.faults, 3, wp.int64(world))


@wp.kernel
def end_step(
    actions: wp.array2d[float],
    rules: Rules,
    worlds: Worlds,
    starts: Starts,
    signals: Signals,
    warmstart: wp.array2d[float],
    overflow: wp.array[int],
):
    """Reward and flags of the valid worlds; the others are put back to the first state that the physics moved."""
    world = wp.tid()
    faults = overflow[world]
    overflow[world] = 0
    worlds.rewards[world] = 0.0
    worlds.terminated[world] = False
    worlds.truncated[world] = False
    worlds.done[world] = False
    if not worlds.valid[world]:
        worlds.elapsed[world] = 0
        write_first_state(starts, signals.qpos, signals.qvel, warmstart, world, worlds.episode[world])
        return
    _count_overflow(rules, worlds, faults)
    before = worlds.measure[world]
    now = _measure(signals, rules, world)
    healthy = _is_healthy(rules, signals, world)
    terminated = rules.terminate_when_unhealthy and not healthy
    reward = rules.rate * (now - before) + rules.now * now + rules.before * before
    if healthy or (rules.healthy_reward_at_end and terminated):
        reward += rules.healthy_reward
    reward -= _costs(rules, signals, actions, world)
    worlds.rewards[world] = reward
    finite = wp.isfinite(reward) and _is_finite(signals.qpos, world) and _is_finite(signals.qvel, world)
    if worlds.broken[world] or not finite:
        terminated = True
        _mend(worlds, world)
    elapsed = worlds.elapsed[world] + 1
    truncated = elapsed >= rules.max_episode_steps and not terminated
    worlds.elapsed[world] = elapsed
    worlds.measure[world] = now
    worlds.terminated[world] = terminated
    worlds.truncated[world] = truncated
    worlds.done[world] = terminated or truncated


@wp.kernel
def begin_episode(rules: Rules, worlds: Worlds, signals: Signals):
    """Take the measure of the worlds that were reset, for the reward of their first step."""
    world = wp.tid()
    if not worlds.valid[world]:
        if rules.measure_at_reset >= 0:
            worlds.measure[world] = signals.qpos[world, rules.measure_at_reset]
        else:
            worlds.measure[world] = _measure(signals, rules, world)


def struct_of(struct: Any, **values: Any) -> Any:
    """Fill a `wp.struct`; its attributes can only be set one by one."""
    filled = struct()
    for name, value in values.items():
        setattr(filled, name, value)
    return filled
