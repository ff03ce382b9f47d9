"""EnvPool: C++ envs on the CPU, stepped in pools that take turns, so that the policy works while envs step."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import envpool
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from torch import Tensor

from envs.actions import check_layout, check_values
from envs.base import EnvError, StepResult, VecEnv
from envs.cores import local_ranks, usable_cores
from envs.envpool_worker import PoolWorker, quiet_spaces
from envs.observations import ObservationMap, as_float32
from envs.seeding import first_seed
from envs.staging import Field, HostCopy, StagingRing

_OWN_OPTIONS = {"num_envs", "batch_size", "seed", "env_seed", "num_threads", "base_path", "gym_reset_return_info"}


class EnvPoolVecEnv(VecEnv):
    """``num_envs`` copies of an EnvPool env in ``pools`` synchronous pools.

    Observations become float32, except uint8 (images), which stays; a ``Dict`` of vectors becomes one vector
    (`envs.observations`). Every action is checked on the host before C++ sees it, because EnvPool checks only its first
    call and then misreads memory or aborts. Results are bitwise the same for any number of pools and threads. A process
    that holds such an env must not fork: the child hangs on the pool.

    Args:
        id: an exact EnvPool id, e.g. ``Ant-v5``.
        num_envs: envs of this rank.
        device: where results go; on CUDA through a pinned ring, one asynchronous copy per step.
        seed: of the whole run, over all ranks; see `envs.seeding.first_seed`.
        rank: this process among ``world_size``.
        world_size: processes of the run, each with ``num_envs`` envs.
        pools: contiguous groups of envs that step apart; their sizes differ by at most one. 0 makes two, or one of a
            single env.
        num_threads: C++ threads per pool; 0 shares the cores that this process may use among pools and local ranks.
        timeout: seconds to wait for one step of a pool before the env counts as stuck.
        **options: passed to EnvPool, e.g. ``max_episode_steps`` or Atari's ``stack_num``.

    Raises:
        EnvError: an option is unknown or out of range, or the env's spaces are not supported.
    """

    engine = "envpool"

    def __init__(
        self,
        id: str,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pools: int = 0,
        num_threads: int = 0,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if not 0 <= pools <= num_envs:
            raise EnvError(f"env.pools={pools}: it must be 0 (automatic) or in 1 .. num_envs={num_envs}")
        pools = pools or min(2, num_envs)
        if num_threads < 0:
            raise EnvError(f"env.num_threads={num_threads}: it must be 0 (automatic) or more")
        if not timeout > 0:
            raise EnvError(f"env.timeout={timeout}: it must be above 0 seconds")
        self.id = id
        self.num_envs = num_envs
        self.device = torch.device(device)
        bounds = [num_envs * pool // pools for pool in range(pools + 1)]
        self.pools = tuple(slice(*ends) for ends in itertools.pairwise(bounds))
        self._seeds = {"seed": seed, "rank": rank, "world_size": world_size}
        self._num_threads = num_threads or math.ceil(usable_cores() / (local_ranks() * pools))
        self._timeout = timeout
        self._options = options
        spec = _make_spec(id, options)
        with quiet_spaces():
            self._join = ObservationMap(id, spec.gymnasium_observation_space)
            self.single_observation_space = self._join.space
            self.single_action_space = _action_space(id, spec.gymnasium_action_space)
        self._workers = self._start_workers(epoch=0)
        self.fixed_results = self.device.type == "cuda"
        self._rings = self._make_rings() if self.fixed_results else []
        self._action_copies = self._make_action_copies() if self.fixed_results else []

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """All ids that the installed EnvPool has registered."""
        return envpool.list_all_envs()

    def reset(self) -> Tensor:
        """Start every env anew and return the first observations ``[num_envs, *observation_shape]``."""
        with self.clock.phase("env_step"):
            batches = [worker.reset() for worker in self._workers]
        self._elapsed = [batch.elapsed for batch in batches]
        with self.clock.phase("transfer"):
            observations = np.concatenate([batch.observations for batch in batches])
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
            on_host = self._action_copies[pool].to_host(actions) if actions.is_cuda else actions.numpy()
        check_values(on_host, self.single_action_space, columns.start)
        with self.clock.phase("env_step"):
            self._workers[pool].send(on_host)

    def recv(self, pool: int) -> StepResult:
        """Wait for the pool's step; on a CPU the result is fresh memory, on CUDA the same tensors every time, written
        in the order of the current stream.

        Raises:
            EnvError: no step was sent, the step took longer than ``timeout``, or EnvPool failed.
        """
        with self.clock.phase("env_step"):
            batch = self._workers[pool].recv()
        with self.clock.phase("transfer"):
            # an autoreset sets the count to 0, or leaves it where Atari's `episodic_life` goes on after a lost life
            valid = batch.elapsed > self._elapsed[pool]
            self._elapsed[pool] = batch.elapsed
            fields = (
                batch.observations,
                np.where(valid, batch.rewards, np.float32(0)),
                batch.terminated,
                batch.truncated & ~batch.terminated,
                valid,
            )
            if self.fixed_results:
                return StepResult(*self._rings[pool].to_device(fields))
            return StepResult(*map(torch.from_numpy, (self._converted(fields[0]), *fields[1:])))

    def reseed(self, epoch: int) -> None:
        """Rebuild the pools from the seeds of ``epoch`` (EnvPool ignores a seed at reset), as slowly as at first."""
        self.close()
        self._workers = self._start_workers(epoch)

    def close(self) -> None:
        """End the pools' threads and free their memory; calling it twice is fine."""
        for worker in self._workers:
            worker.close()
        self._workers = ()

    def _converted(self, observations: NDArray) -> NDArray:
        return observations.astype(self.single_observation_space.dtype, copy=False)

    def _start_workers(self, epoch: int) -> tuple[PoolWorker, ...]:
        self._elapsed = [np.zeros(columns.stop - columns.start, np.int32) for columns in self.pools]
        seed = first_seed(self.num_envs, epoch=epoch, **self._seeds)
        return tuple(
            PoolWorker(
                self.id,
                columns,
                self._timeout,
                {**self._options, "seed": seed + columns.start, "num_threads": self._num_threads},
                self._join,
            )
            for columns in self.pools
        )

    def _make_rings(self) -> list[StagingRing]:
        space = self._join.space
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        rings = []
        for columns in self.pools:
            n = columns.stop - columns.start
            observations = Field((n, *space.shape), dtype)
            flags = [Field((n,), torch.bool)] * 3
            rings.append(StagingRing([observations, Field((n,), torch.float32), *flags], self.device))
        return rings

    def _make_action_copies(self) -> list[HostCopy]:
        shape = self.single_action_space.shape or ()
        dtype = torch.int64 if isinstance(self.single_action_space, Discrete) else torch.float32
        return [HostCopy(Field((columns.stop - columns.start, *shape), dtype)) for columns in self.pools]


def _make_spec(id: str, options: dict[str, Any]) -> Any:
    """EnvPool's description of the env, made without starting one; options are checked against what it declares."""
    try:
        spec = envpool.make_spec(id)
        known = set(spec.config._fields) - _OWN_OPTIONS
        for key in options.keys() - known:
            closest = difflib.get_close_matches(key, known, n=3)
            hint = f"; closest: {', '.join(closest)}" if closest else ""
            raise EnvError(f"env.options.{key}: {id} has no such option{hint}")
        return envpool.make_spec(id, **options)
    except (ImportError, AssertionError, TypeError) as error:
        raise EnvError(f"env.id={id}: EnvPool cannot make it: {error}") from error


def _action_space(id: str, space: Any) -> Box | Discrete:
    if isinstance(space, Discrete):
        return space
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        raise EnvError(f"env.id={id} has actions of {space}; only Discrete and Box of floats are supported")
    return as_float32(space)
