"""Compare the MuJoCo Warp engine with MuJoCo's C code, through Gymnasium, from the same states under the same actions.

    python scripts/parity_mujoco.py Ant-v5 HalfCheetah-v5        # all tasks if none is named

Prints per task how many of the rollouts agree, and the same for the C code against itself when every coordinate is
rounded once per physics step as float32 would: more than that cannot be asked of a float32 engine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import gymnasium
import numpy as np
import torch
from mujoco import mj_resetData, mj_rnePostConstraint, mj_step  # pyright: ignore[reportAttributeAccessIssue]
from numpy.typing import NDArray

from envs.mujoco_warp import MujocoWarpVecEnv
from envs.warp_rows import Task
from envs.warp_tasks import TASKS

TOLERANCE = 1e-4
FLOAT32_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Starts:
    """Where ``S`` rollouts begin and what is done in their ``H`` control steps; the states are exact in float32."""

    qpos: NDArray[np.float64]  #: ``[S, nq]``
    qvel: NDArray[np.float64]  #: ``[S, nv]``
    measure: NDArray[np.float64]  #: ``[S]``, see `envs.warp_rows.Measure`
    actions: NDArray[np.float32]  #: ``[S, H, action]``


class Rollouts(NamedTuple):
    """What came back, rollouts first."""

    observations: NDArray  #: ``[S, H, observation]``
    rewards: NDArray  #: ``[S, H]``
    terminated: NDArray  #: ``[S, H]`` bool


def draw_starts(id: str, states: int, horizon: int = 5, seed: int = 0) -> Starts:
    """States that a random policy visits within 40 steps of a reset, and random actions from there."""
    env, rng = _gymnasium(id), np.random.default_rng(seed)
    low, high = env.action_space.low, env.action_space.high
    qpos, qvel = [], []
    env.reset(seed=seed)
    for _ in range(states):
        env.reset()
        for _ in range(rng.integers(40)):
            if env.step(rng.uniform(low, high))[2]:
                env.reset()
        qpos.append(env.data.qpos.astype(np.float32))
        qvel.append(env.data.qvel.astype(np.float32))
    actions = rng.uniform(low, high, (states, horizon, len(low))).astype(np.float32)
    return starts_at(id, np.array(qpos), np.array(qvel), actions)


def starts_at(id: str, qpos: NDArray[np.float32], qvel: NDArray[np.float32], actions: NDArray[np.float32]) -> Starts:
    """The given states, with the task's measure in each as MuJoCo has it."""
    env, measure = _gymnasium(id), []
    env.reset(seed=0)
    states = qpos.astype(np.float64), qvel.astype(np.float64)
    for state in zip(*states, strict=True):
        _begin(env, *state)
        measure.append(_measure(TASKS[id], env.data))
    return Starts(*states, np.array(measure), actions)


def mujoco_rollouts(id: str, starts: Starts, rounding: float = 0.0) -> Rollouts:
    """Gymnasium's env on MuJoCo's C code; ``rounding`` is the size of the error put on the state per physics step."""
    env, rng = _gymnasium(id), np.random.default_rng(0)
    env.reset(seed=0)

    def step_with_rounding(ctrl: NDArray, frames: int) -> None:
        data = env.data
        data.ctrl[:] = ctrl
        for _ in range(frames):
            data.qpos[:] += rounding * rng.standard_normal(len(data.qpos))
            data.qvel[:] += rounding * rng.standard_normal(len(data.qvel)) * np.maximum(1.0, np.abs(data.qvel))
            mj_step(env.model, data)
        mj_rnePostConstraint(env.model, data)

    if rounding:
        env._step_mujoco_simulation = step_with_rounding
    rollouts = []
    for qpos, qvel, actions in zip(starts.qpos, starts.qvel, starts.actions, strict=True):
        _begin(env, qpos, qvel)
        rollouts.append([env.step(action)[:3] for action in actions])
    return Rollouts(*(np.array(field) for field in zip(*(zip(*steps, strict=True) for steps in rollouts), strict=True)))


def warp_rollouts(env: MujocoWarpVecEnv, starts: Starts) -> Rollouts:
    """The engine from the same states, ``env.num_envs`` rollouts at a time; what follows an end is not to be read."""
    parts = []
    for first in range(0, len(starts.qpos), env.num_envs):
        rows = slice(first, first + env.num_envs)
        state = {name: torch.zeros_like(tensor) for name, tensor in env.state_dict().items()}
        for name in ("qpos", "qvel", "measure"):
            state[name].copy_(torch.from_numpy(getattr(starts, name)[rows]))
        env.load_state_dict(state)
        steps = []
        for t in range(starts.actions.shape[1]):
            result = env.step(torch.from_numpy(starts.actions[rows, t]).to(env.device))
            steps.append([x.cpu().numpy().copy() for x in (result.observations, result.rewards, result.terminated)])
        parts.append([np.stack(field, axis=1) for field in zip(*steps, strict=True)])
    return Rollouts(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def departures(rollouts: Rollouts, reference: Rollouts) -> Rollouts:
    """Per rollout the largest ``|x - y| / (1 + |y|)`` over the steps up to its end: ``[S, observation]`` and ``[S]``.

    ``terminated`` says whether the flags differ on any of these steps: ``[S]`` bool.
    """
    before_end = np.cumsum(reference.terminated, axis=1) - reference.terminated == 0

    def largest(x: NDArray, y: NDArray) -> NDArray:
        mask = before_end.reshape(before_end.shape + (1,) * (x.ndim - 2))
        return np.where(mask, np.abs(x - y) / (1 + np.abs(y)), 0).max(axis=1)

    flags = (rollouts.terminated != reference.terminated) & before_end
    observations, rewards = (largest(x, y) for x, y in zip(rollouts[:2], reference[:2], strict=True))
    return Rollouts(observations, rewards, flags.any(axis=1))


def agree(errors: Rollouts) -> NDArray:
    """Which rollouts agree in every observation entry and reward to `TOLERANCE`, and in every flag: ``[S]`` bool."""
    return (errors.observations.max(axis=1) < TOLERANCE) & (errors.rewards < TOLERANCE) & ~errors.terminated


def _gymnasium(id: str) -> Any:
    return gymnasium.make(id).unwrapped


def _begin(env: Any, qpos: NDArray, qvel: NDArray) -> None:
    mj_resetData(env.model, env.data)  # so that no warm start is left over
    env.set_state(qpos, qvel)


def _measure(task: Task, data: Any) -> float:
    measure = task.measure
    signal = getattr(data, measure.field.name.lower()).ravel()
    if measure.minus is None:
        return signal[measure.start]
    return float(np.linalg.norm(signal[measure.start :][:3] - signal[measure.minus :][:3]))


def _summary(errors: Rollouts) -> str:
    worst = errors.observations.max(axis=1)
    quantiles = (f"{np.quantile(worst, q):.1e}" for q in (0.5, 0.9, 1.0))
    return f"{agree(errors).sum():5d}  " + "  ".join(quantiles) + f"  {errors.rewards.max():.1e}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", default=list(TASKS))
    parser.add_argument("--states", type=int, default=64)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    columns = "agree  median   90 %     max      reward"
    print(f"{args.states} states, 5 control steps\n{'':26}  {'MuJoCo Warp':41}  C code, rounded to float32")
    print(f"{'task':26}  {columns:41}  {columns}")
    for id in args.ids:
        starts = draw_starts(id, args.states)
        reference = mujoco_rollouts(id, starts)
        warp = warp_rollouts(MujocoWarpVecEnv(id, args.num_envs, device=args.device), starts)
        rounded = mujoco_rollouts(id, starts, rounding=FLOAT32_ROUNDING)
        print(
            f"{id:26}  {_summary(departures(warp, reference)):41}  {_summary(departures(rounded, reference))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
