"""EnvPool: C++ envs on the CPU, stepped in pools that take turns, so that the policy works while envs step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

import envpool
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from envs.actions import float_actions
from envs.base import EnvError
from envs.cores import local_ranks, usable_cores
from envs.envpool_worker import PoolWorker, quiet_spaces
from envs.host import HostVecEnv, Rows, check_timing
from envs.observations import ObservationMap

_OWN_OPTIONS = {"num_envs", "batch_size", "seed", "env_seed", "num_threads", "base_path", "gym_reset_return_info"}


class EnvPoolVecEnv(HostVecEnv):
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
    limits_steps = True

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
        check_timing(num_threads, timeout)
        spec = _make_spec(id, options)
        with quiet_spaces():
            self._join = ObservationMap(id, spec.gymnasium_observation_space)
            action_space = _action_space(id, spec.gymnasium_action_space)
        pools = pools or min(2, num_envs)
        self._num_threads = num_threads or math.ceil(usable_cores() / (local_ranks() * pools))
        self._timeout = timeout
        self._options = options
        self._workers: tuple[PoolWorker, ...] = ()
        super().__init__(
            id, num_envs, self._join.space, action_space,
            device=device, seed=seed, rank=rank, world_size=world_size, pools=pools,
        )  # fmt: skip

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """All ids that the installed EnvPool has registered."""
        return envpool.list_all_envs()

    def close(self) -> None:
        """End the pools' threads and free their memory; calling it twice is fine."""
        for worker in self._workers:
            worker.close()
        self._workers = ()

    def _start(self, first_seed: int) -> None:
        if self._workers:
            self.close()  # EnvPool ignores a seed at reset: the pools are built anew
        self._elapsed = [np.zeros(columns.stop - columns.start, np.int32) for columns in self.pools]
        self._workers = tuple(
            PoolWorker(
                self.id,
                self._numbers(pool),
                self._timeout,
                {**self._options, "seed": first_seed + columns.start, "num_threads": self._num_threads},
                self._join,
            )
            for pool, columns in enumerate(self.pools)
        )

    def _reset_pool(self, pool: int) -> NDArray:
        batch = self._workers[pool].reset()
        self._elapsed[pool] = batch.elapsed
        return batch.observations

    def _send_to(self, pool: int, actions: NDArray) -> None:
        self._workers[pool].send(actions)

    def _recv_from(self, pool: int) -> Rows:
        batch = self._workers[pool].recv()
        # an autoreset sets the count to 0, or leaves it where Atari's `episodic_life` goes on after a lost life
        valid = batch.elapsed > self._elapsed[pool]
        self._elapsed[pool] = batch.elapsed
        return Rows(*batch[:-1], valid)


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
    return space if isinstance(space, Discrete) else float_actions(id, space, "Discrete")
