"""The MuJoCo tasks as rows.

Every number is Gymnasium's (`gymnasium.envs.mujoco`, v5 and v4), but for the room for contacts and constraints: twice
the most that random and extreme actions were seen to need, fallen bodies included.
"""

from __future__ import annotations

import math
from dataclasses import replace

from envs.warp_rows import Field, Healthy, Measure, Part, Penalty, Task, Transform

_STATE_WITHOUT_X = (Part(Field.QPOS, 1), Part(Field.QVEL))
_CLIPPED_STATE_WITHOUT_X = (Part(Field.QPOS, 1), Part(Field.QVEL, clip=10.0))
_STATE_WITHOUT_XY = (Part(Field.QPOS, 2), Part(Field.QVEL))
_TORSO_X = Measure(Field.XPOS, 3, at_reset=0)  # a free root body: its position is qpos[:3]
_CENTRE_OF_MASS_X = Measure(Field.SUBTREE_COM, 0)
_FINGERTIP, _TARGET = 9, 12  # where the coordinates of these bodies begin in XPOS

_ANT_V4 = Task(
    model="ant.xml",
    frame_skip=5,
    observation=_STATE_WITHOUT_XY,
    measure=_TORSO_X,
    forward_reward_weight=1.0,
    ctrl_cost_weight=0.5,
    healthy=(Healthy("healthy_z_range", Field.QPOS, 2, 3, 0.2, 1.0),),
    healthy_reward=1.0,
    healthy_reward_at_end=True,
    reset_noise_scale=0.1,
    reset_velocity_normal=True,
    contacts=24,
    constraints=64,
)
_ANT_V5 = replace(
    _ANT_V4,
    observation=(*_STATE_WITHOUT_XY, Part(Field.CFRC_EXT, 6, clip=1.0)),
    contact_cost_weight=5e-4,
    contact_force_limit=1.0,
    healthy_reward_at_end=False,
)
_HALF_CHEETAH = Task(
    model="half_cheetah.xml",
    frame_skip=5,
    observation=_STATE_WITHOUT_X,
    forward_reward_weight=1.0,
    ctrl_cost_weight=0.1,
    reset_noise_scale=0.1,
    reset_velocity_normal=True,
    contacts=16,
    constraints=56,
)
_HOPPER_V5 = Task(
    model="hopper.xml",
    frame_skip=4,
    observation=_CLIPPED_STATE_WITHOUT_X,
    forward_reward_weight=1.0,
    ctrl_cost_weight=1e-3,
    healthy=(
        Healthy("healthy_state_range", Field.QPOS, 2, None, -100.0, 100.0),
        Healthy("healthy_state_range", Field.QVEL, 0, None, -100.0, 100.0),
        Healthy("healthy_z_range", Field.QPOS, 1, 2, 0.7, math.inf),
        Healthy("healthy_angle_range", Field.QPOS, 2, 3, -0.2, 0.2),
    ),
    healthy_reward=1.0,
    reset_noise_scale=5e-3,
    contacts=16,
    constraints=48,
)
_WALKER2D_V5 = replace(
    _HOPPER_V5,
    model="walker2d_v5.xml",
    healthy=(
        Healthy("healthy_z_range", Field.QPOS, 1, 2, 0.8, 2.0),
        Healthy("healthy_angle_range", Field.QPOS, 2, 3, -1.0, 1.0),
    ),
    constraints=80,
)
_HUMANOID_V4 = Task(
    model="humanoid.xml",
    frame_skip=5,
    observation=(
        *_STATE_WITHOUT_XY,
        Part(Field.CINERT),
        Part(Field.CVEL),
        Part(Field.QFRC_ACTUATOR),
        Part(Field.CFRC_EXT),
    ),
    measure=_CENTRE_OF_MASS_X,
    forward_reward_weight=1.25,
    ctrl_cost_weight=0.1,
    healthy=(Healthy("healthy_z_range", Field.QPOS, 2, 3, 1.0, 2.0),),
    healthy_reward=5.0,
    healthy_reward_at_end=True,
    reset_noise_scale=1e-2,
    contacts=48,
    constraints=80,
)
_HUMANOID_V5 = replace(
    _HUMANOID_V4,
    observation=(
        *_STATE_WITHOUT_XY,
        Part(Field.CINERT, 10),
        Part(Field.CVEL, 6),
        Part(Field.QFRC_ACTUATOR, 6),
        Part(Field.CFRC_EXT, 6),
    ),
    contact_cost_weight=5e-7,
    contact_cost_max=10.0,
    healthy_reward_at_end=False,
)
_INVERTED_PENDULUM_V5 = Task(
    model="inverted_pendulum.xml",
    frame_skip=2,
    observation=(Part(Field.QPOS), Part(Field.QVEL)),
    healthy=(Healthy("healthy_angle_range", Field.QPOS, 1, 2, -0.2, 0.2),),
    healthy_reward=1.0,
    reset_noise_scale=0.01,
)
_INVERTED_DOUBLE_PENDULUM_V4 = Task(
    model="inverted_double_pendulum.xml",
    frame_skip=5,
    observation=(
        Part(Field.QPOS, 0, 1),
        Part(Field.QPOS, 1, transform=Transform.SIN),
        Part(Field.QPOS, 1, transform=Transform.COS),
        Part(Field.QVEL, clip=10.0),
        Part(Field.QFRC_CONSTRAINT, clip=10.0),
    ),
    penalties=(
        Penalty(Field.SITE_XPOS, 0, 0.01),
        Penalty(Field.SITE_XPOS, 2, 1.0, target=2.0),
        Penalty(Field.QVEL, 1, 1e-3),
        Penalty(Field.QVEL, 2, 5e-3),
    ),
    healthy=(Healthy("healthy_tip_range", Field.SITE_XPOS, 2, 3, 1.0, math.inf),),
    healthy_reward=10.0,
    healthy_reward_at_end=True,
    reset_noise_scale=0.1,
    reset_velocity_normal=True,
)
_INVERTED_DOUBLE_PENDULUM_V5 = replace(
    _INVERTED_DOUBLE_PENDULUM_V4,
    observation=(*_INVERTED_DOUBLE_PENDULUM_V4.observation[:-1], Part(Field.QFRC_CONSTRAINT, 0, 1, clip=10.0)),
    healthy_reward_at_end=False,
)
_SWIMMER = Task(
    model="swimmer.xml",
    frame_skip=4,
    observation=_STATE_WITHOUT_XY,
    forward_reward_weight=1.0,
    ctrl_cost_weight=1e-4,
    reset_noise_scale=0.1,
)
_REACHER_V5 = Task(
    model="reacher.xml",
    frame_skip=2,
    observation=(
        Part(Field.QPOS, 0, 2, transform=Transform.COS),
        Part(Field.QPOS, 0, 2, transform=Transform.SIN),
        Part(Field.QPOS, 2),
        Part(Field.QVEL, 0, 2),
        Part(Field.XPOS, _FINGERTIP, _FINGERTIP + 2, minus=_TARGET),
    ),
    measure=Measure(Field.XPOS, _FINGERTIP, minus=_TARGET),
    measure_weight=-1.0,
    ctrl_cost_weight=1.0,
    reset_noise_scale=0.1,
    reset_velocity_scale=0.005,
    goal_radius=0.2,
)
_REACHER_V4 = replace(
    _REACHER_V5,
    observation=(*_REACHER_V5.observation[:-1], Part(Field.XPOS, _FINGERTIP, _FINGERTIP + 3, minus=_TARGET)),
    measure_weight=0.0,
    measure_before_weight=-1.0,
)

TASKS: dict[str, Task] = {
    "Ant-v4": _ANT_V4,
    "Ant-v5": _ANT_V5,
    "HalfCheetah-v4": _HALF_CHEETAH,
    "HalfCheetah-v5": _HALF_CHEETAH,
    "Hopper-v4": replace(_HOPPER_V5, healthy_reward_at_end=True),
    "Hopper-v5": _HOPPER_V5,
    "Humanoid-v4": _HUMANOID_V4,
    "Humanoid-v5": _HUMANOID_V5,
    "InvertedDoublePendulum-v4": _INVERTED_DOUBLE_PENDULUM_V4,
    "InvertedDoublePendulum-v5": _INVERTED_DOUBLE_PENDULUM_V5,
    "InvertedPendulum-v4": replace(_INVERTED_PENDULUM_V5, healthy_reward_at_end=True),
    "InvertedPendulum-v5": _INVERTED_PENDULUM_V5,
    "Reacher-v4": _REACHER_V4,
    "Reacher-v5": _REACHER_V5,
    "Swimmer-v4": _SWIMMER,
    "Swimmer-v5": _SWIMMER,
    "Walker2d-v4": replace(_WALKER2D_V5, model="walker2d.xml", healthy_reward_at_end=True),
    "Walker2d-v5": _WALKER2D_V5,
}
