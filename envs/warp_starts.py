"""First states on the device: random numbers from counters, which advance under graph replay and repeat anywhere."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels are written in Warp's language, whose types are not Python's.

from __future__ import annotations

import warp as wp

wp.set_module_options({"enable_backward": False})

_GOLDEN = wp.constant(wp.uint64(0x9E3779B97F4A7C15))


@wp.struct
class Starts:
    """The distribution of first states and the key of the random streams."""

    key: wp.array[wp.uint64]
    qpos: wp.array[float]
    position_scale: float
    velocity_scale: float
    velocity_normal: bool
    goal_radius: float


@wp.func
def _mix(value: wp.uint64) -> wp.uint64:
    """SplitMix64's finalizer, as in `envs.counter_rng`."""
    value = (value ^ (value >> wp.uint64(30))) * wp.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> wp.uint64(27))) * wp.uint64(0x94D049BB133111EB)
    return value ^ (value >> wp.uint64(31))


@wp.func
def uniform(key: wp.array[wp.uint64], world: int, episode: wp.int64, lane: int) -> float:
    """Number ``lane`` in [0, 1) of the stream of (key, world, episode): `envs.counter_rng.uniform` cut to 24 bits."""
    stream = _mix(key[0] + (wp.uint64(world) << wp.uint64(32)) + wp.uint64(episode))
    word = _mix((stream + wp.uint64(lane) * _GOLDEN) ^ key[1])
    return float(word >> wp.uint64(40)) * 5.9604644775390625e-08


@wp.func
def _normal(key: wp.array[wp.uint64], world: int, episode: wp.int64, lane: int) -> float:
    """Box and Muller (1958), from lanes ``lane`` and ``lane + 1``."""
    radius = wp.sqrt(-2.0 * wp.log(1.0 - uniform(key, world, episode, lane)))
    return radius * wp.cos(2.0 * wp.pi * uniform(key, world, episode, lane + 1))


@wp.func
def write_first_state(
    starts: Starts,
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    warmstart: wp.array2d[float],
    world: int,
    episode: wp.int64,
):
    """Write the first state of one world's episode; a world that still has the counter gets the same state again."""
    nq = starts.qpos.shape[0]
    nv = qvel.shape[1]
    for i in range(nq):
        noise = (2.0 * uniform(starts.key, world, episode, i) - 1.0) * starts.position_scale
        qpos[world, i] = starts.qpos[i] + noise
    for i in range(nv):
        warmstart[world, i] = 0.0
        lane = nq + 2 * i
        if starts.velocity_normal:
            qvel[world, i] = _normal(starts.key, world, episode, lane) * starts.velocity_scale
        else:
            qvel[world, i] = (2.0 * uniform(starts.key, world, episode, lane) - 1.0) * starts.velocity_scale
    if starts.goal_radius > 0.0:
        radius = starts.goal_radius * wp.sqrt(uniform(starts.key, world, episode, nq - 2))
        angle = 2.0 * wp.pi * uniform(starts.key, world, episode, nq - 1)
        qpos[world, nq - 2] = radius * wp.cos(angle)
        qpos[world, nq - 1] = radius * wp.sin(angle)
        qvel[world, nv - 2] = 0.0
        qvel[world, nv - 1] = 0.0
