"""The MuJoCo Warp engine: Gymnasium's MuJoCo tasks with physics, reward and reset on the GPU, in torch's memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import torch
import warp as wp
from gymnasium.spaces import Box
from torch import Tensor

from envs.actions import check_layout, check_values
from envs.base import EnvError, StepResult, VecEnv
from envs.checks import check_columns, check_flag, check_limit, copy_state, usable_device
from envs.counter_rng import random_ages, stream_key
from envs.warp_rows import customize
from envs.warp_simulation import WarpSimulation, load_model
from envs.warp_tasks import TASKS

wp.config.log_level = wp.LOG_WARNING  # or Warp reports every kernel that it loads
wp.init()


class MujocoWarpVecEnv(VecEnv):
    """``num_envs`` worlds of a MuJoCo task, stepped as one graph on torch's current stream.

    A step is ``frame_skip`` physics steps, observation, reward, flags and the reset of the worlds whose episode has
    ended; nothing crosses to the host. Sent while torch captures a CUDA graph, it becomes part of that graph. Results
    are float32, in the same memory every step. First states depend on (seed, rank, epoch, world, episode) alone.

    Results repeat bit for bit on a CPU. On CUDA the hardware chooses the order in which a world's contacts are summed.

    A world that is no longer finite ends as terminated with reward 0 and observation 0; `counters` tells how many did.

    Args:
        id: a key of `envs.warp_tasks.TASKS`, e.g. ``Ant-v5``.
        num_envs: worlds of this rank, in one pool.
        device: a CUDA device, or ``cpu`` (slow; for tests).
        seed: a seed of any size, 0 or more.
        rank: this process among ``world_size``; no two ranks share a random stream.
        world_size: the number of processes.
        physics: ``rk4`` keeps the integrator of Gymnasium's model (RK4, but Euler in HalfCheetah); ``euler`` is faster
            and another task.
        max_episode_steps: transitions until truncation; None takes Gymnasium's limit.
        stagger: `reset` counts a random part of each world's time limit as past, lest all limits come at once.
        **options: Gymnasium's, see `envs.warp_rows.customize`: ``healthy_z_range``, ``reset_noise_scale`` ...

    Raises:
        EnvError: an unknown task or option, an impossible value, or a device that is absent.
    """

    engine = "mujoco_warp"

    def __init__(
        self,
        id: str,
        num_envs: int,
        *,
        device: torch.device | str,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        physics: str = "rk4",
        max_episode_steps: int | None = None,
        stagger: bool = False,
        **options: Any,
    ) -> None:
        if id not in TASKS:
            raise EnvError(f"env.id={id}: the mujoco_warp engine has {', '.join(TASKS)}")
        check_columns(num_envs, seed, rank, world_size)
        if physics not in ("rk4", "euler"):
            raise EnvError(f"env.physics={physics}: it must be rk4 or euler")
        check_limit(max_episode_steps)
        check_flag("stagger", stagger)

        self.id, self.num_envs, self.pools = id, num_envs, (slice(0, num_envs),)
        self.device = usable_device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise EnvError(f"device={device}: MuJoCo Warp runs on cuda and cpu")
        self.capturable = self.device.type == "cuda"
        self.physics = physics  #: as asked for; a run's name and logs show it
        self._seed, self._rank, self._stagger = seed, rank, stagger
        self._limit = max_episode_steps or cast(int, gymnasium.spec(id).max_episode_steps)  # every task of ours has one
        self._counted = [0, 0, 0]  #: faults that `counters` has told of

        task = customize(TASKS[id], options)
        model = load_model(task, physics)
        with wp.ScopedDevice(wp.device_from_torch(self.device)):
            self._worlds: WarpSimulation | None = WarpSimulation(
                task,
                model,
                num_envs,
                self.device,
                key=stream_key(seed, rank, epoch=0),
                max_episode_steps=self._limit,
            )
        self.single_observation_space = Box(-np.inf, np.inf, tuple(self._simulation.observations.shape[1:]), np.float32)
        self.single_action_space = Box(*model.actuator_ctrlrange.T.astype(np.float32), dtype=np.float32)

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """The ids of all rows of the table."""
        return tuple(TASKS)

    def reset(self) -> Tensor:
        """Start every world's next episode and return the first observations ``[num_envs, *observation_shape]``."""
        with self.clock.phase("env_step"):
            self._simulation.reset()
            if self._stagger:
                simulation = self._simulation
                simulation.elapsed.copy_(random_ages(simulation.key, simulation.episode, self._limit))
        return self._simulation.observations

    def send(self, pool: int, actions: Tensor) -> None:
        """Launch one step with ``actions`` ``[num_envs, *action_shape]`` float32, not clipped, as in Gymnasium.

        Raises:
            EnvError: wrong shape or dtype; on the CPU also a value that is not finite (on CUDA such a world is ended).
        """
        check_layout(actions, self.single_action_space, self.num_envs)
        if not self.capturable:
            check_values(actions.detach().numpy(), self.single_action_space, first_env=0)
        with self.clock.phase("env_step"):
            self._simulation.actions.copy_(actions.detach())
            self._simulation.launch_step()

    def recv(self, pool: int) -> StepResult:
        """The result of the step that ``send`` launched, in the order of the current stream."""
        simulation = self._simulation
        return StepResult(
            simulation.observations, simulation.rewards, simulation.terminated, simulation.truncated, simulation.valid
        )

    def reseed(self, epoch: int) -> None:
        """Derive all random streams anew from (seed, rank, epoch); the next `reset` starts episodes from them."""
        self._simulation.key.copy_(stream_key(self._seed, self._rank, epoch))
        self._simulation.episode.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """All state, as tensors; steps from it repeat as exactly as the engine does: on a CPU bit for bit."""
        return {name: tensor.clone() for name, tensor in self._simulation.state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> Tensor:
        """Restore what `state_dict` gave and return the current observations.

        Raises:
            EnvError: a tensor is missing, unknown, or of another shape or dtype.
        """
        copy_state(self.id, state, into=self._simulation.state())
        return self._simulation.observations

    def counters(self) -> dict[str, int]:
        """Faults since the last call; synchronizes, and warns with the number of a world that broke.

        ``nonfinite_worlds`` ended because a value was not finite; ``dropped_contacts`` and ``dropped_constraints``
        count transitions that lacked room for contacts (shared by all worlds) or for a world's constraints.
        """
        # read only: steps may be adding to them on another stream
        *totals, world = self._simulation.faults.tolist()
        nonfinite, contacts, constraints = (now - before for now, before in zip(totals, self._counted, strict=True))
        self._counted = totals
        if nonfinite:
            message = (
                f"{self.id}: {nonfinite} episodes ended because a value was not finite, so far from world {world} on"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return {"nonfinite_worlds": nonfinite, "dropped_contacts": contacts, "dropped_constraints": constraints}

    def close(self) -> None:
        """Free the worlds and the graph; calling it twice is fine."""
        self._worlds = None

    @property
    def _simulation(self) -> WarpSimulation:
        if self._worlds is None:
            raise EnvError(f"{self.id}: the env is closed")
        return self._worlds
