"""What engines that step on the host share: columns in pools, checked actions, and copies to the device."""

from __future__ import annotations

import abc
import itertools
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import Tensor

from envs.actions import check_layout, check_values, index_range
from envs.base import EnvError, StepResult, VecEnv
from envs.checks import usable_device
from envs.seeding import first_seed
from envs.staging import Field, HostCopy, StagingRing


class Rows(NamedTuple):
    """One step of a pool as its engine gave it, row ``i`` for env ``i`` of the pool."""

    observations: NDArray  #: ``[n, *observation_shape]``, of a dtype that casts to the space's
    rewards: NDArray  #: ``[n]``; those of filler rows do not matter
    terminated: NDArray  #: ``[n]`` bool
    truncated: NDArray  #: ``[n]`` bool
    valid: NDArray  #: ``[n]`` bool


class HostVecEnv(VecEnv):
    """``num_envs`` envs in ``pools`` groups that step apart, and whose results and actions are NumPy arrays.

    Every action is checked before the engine sees it. On a CPU results are the engine's own arrays, or casts of them;
    on CUDA each step is one asynchronous copy to the same tensors (`envs.staging`).

    Args:
        id: an exact id of the engine.
        num_envs: envs of this rank.
        observation_space: of one env, float32 or uint8.
        action_space: of one env.
        device: where results go.
        seed: of the whole run, over all ranks; see `envs.seeding.first_seed`.
        rank: this process among ``world_size``.
        world_size: processes of the run, each with ``num_envs`` envs.
        pools: contiguous groups of envs; their sizes differ by at most one.

    Raises:
        EnvError: an impossible number of pools, or a device that is absent.
    """

    def __init__(
        self,
        id: str,
        num_envs: int,
        observation_space: Box,
        action_space: gymnasium.Space,
        *,
        device: torch.device | str,
        seed: int,
        rank: int,
        world_size: int,
        pools: int,
    ) -> None:
        if not 1 <= pools <= num_envs:
            raise EnvError(f"env.pools={pools}: it must be 0 (automatic) or in 1 .. num_envs={num_envs}")
        self.id, self.num_envs, self.device = id, num_envs, usable_device(device)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        bounds = [num_envs * pool // pools for pool in range(pools + 1)]
        self.pools = tuple(slice(*ends) for ends in itertools.pairwise(bounds))
        self.fixed_results = self.device.type == "cuda"
        self._rings = self._make_rings() if self.fixed_results else []
        self._action_copies = self._make_action_copies() if self.fixed_results else []
        self._stream = {"seed": seed, "rank": rank, "world_size": world_size}
        self._first_number = rank * num_envs
        self.reseed(epoch=0)

    @abc.abstractmethod
    def _start(self, first_seed: int) -> None:
        """Let the next `reset` begin anew, env ``n`` from the seed ``first_seed + n``; build what is not built yet."""

    @abc.abstractmethod
    def _reset_pool(self, pool: int) -> NDArray:
        """Start every env of a pool anew and return the observations; a step under way is dropped."""

    @abc.abstractmethod
    def _send_to(self, pool: int, actions: NDArray) -> None:
        """Start a step with checked ``actions``, which the caller may overwrite afterwards."""

    @abc.abstractmethod
    def _recv_from(self, pool: int) -> Rows:
        """Wait for the step under way; the arrays stay as they are until the pool's next one."""

    def reset(self) -> Tensor:
        """Start every env anew and return the first observations ``[num_envs, *observation_shape]``."""
        with self.clock.phase("env_step"):
            observations = np.concatenate([self._reset_pool(pool) for pool in range(len(self.pools))])
        with self.clock.phase("transfer"):
            return torch.from_numpy(self._converted(observations)).to(self.device)

    def send(self, pool: int, actions: Tensor) -> None:
        """Check ``actions`` on the host and start one step of a pool; on CUDA this waits for the actions.

        Raises:
            EnvError: wrong shape or dtype, a value that is not finite or not in the space, or a step is under way.
        """
        columns = self.pools[pool]
        check_layout(actions, self.single_action_space, columns.stop - columns.start)
        with self.clock.phase("transfer"):
            actions = actions.detach()
            is_staged = self.fixed_results and actions.is_cuda
            on_host = self._action_copies[pool].to_host(actions) if is_staged else actions.cpu().numpy()
        check_values(on_host, self.single_action_space, self._numbers(pool).start)
        with self.clock.phase("env_step"):
            self._send_to(pool, on_host)

    def recv(self, pool: int) -> StepResult:
        """Wait for the pool's step; on a CPU the result is fresh memory, on CUDA the same tensors every time, written
        in the order of the current stream.

        Raises:
            EnvError: no step was sent, the step took longer than ``timeout``, or the engine failed.
        """
        with self.clock.phase("env_step"):
            rows = self._recv_from(pool)
        with self.clock.phase("transfer"):
            rewards = np.where(rows.valid, rows.rewards, 0).astype(np.float32, copy=False)
            flags = (rows.terminated, rows.truncated & ~rows.terminated, rows.valid)
            if self.fixed_results:
                return StepResult(*self._rings[pool].to_device((rows.observations, rewards, *flags)))
            return StepResult(*map(torch.from_numpy, (self._converted(rows.observations), rewards, *flags)))

    def reseed(self, epoch: int) -> None:
        """Derive all random streams anew from (seed, rank, epoch); the next `reset` starts episodes from them."""
        self._start(first_seed(self.num_envs, epoch=epoch, **self._stream))

    def _numbers(self, pool: int) -> slice:
        """The envs of a pool, counted over all ranks: by these numbers messages name them."""
        columns = self.pools[pool]
        return slice(self._first_number + columns.start, self._first_number + columns.stop)

    def _converted(self, observations: NDArray) -> NDArray:
        return observations.astype(self.single_observation_space.dtype, copy=False)

    def _make_rings(self) -> list[StagingRing]:
        space = self.single_observation_space
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        rings = []
        for columns in self.pools:
            n = columns.stop - columns.start
            observations = Field((n, *(space.shape or ())), dtype)
            flags = [Field((n,), torch.bool)] * 3
            rings.append(StagingRing([observations, Field((n,), torch.float32), *flags], self.device))
        return rings

    def _make_action_copies(self) -> list[HostCopy]:
        shape = self.single_action_space.shape or ()
        dtype = torch.float32 if index_range(self.single_action_space) is None else torch.int64
        return [HostCopy(Field((columns.stop - columns.start, *shape), dtype)) for columns in self.pools]


def check_timing(num_threads: int, timeout: float) -> None:
    """Refuse a number of threads or a time that cannot be.

    Raises:
        EnvError: names the key.
    """
    if num_threads < 0:
        raise EnvError(f"env.num_threads={num_threads}: it must be 0 (automatic) or more")
    if not timeout > 0:
        raise EnvError(f"env.timeout={timeout}: it must be above 0 seconds")
