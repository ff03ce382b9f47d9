"""EnvPool: C++ envs on the CPU, stepped in pools that take turns, so that the policy works while envs step."""

from __future__ import annotations

import difflib
import itertools
import math
import queue
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import envpool
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from torch import Tensor

from envs.actions import check_layout, check_values
from envs.base import EnvError, StepResult, VecEnv
from envs.cores import local_ranks, usable_cores
from envs.seeding import first_seed
from envs.staging import Field, StagingRing

_OWN_OPTIONS = {"num_envs", "batch_size", "seed", "env_seed", "num_threads", "base_path", "gym_reset_return_info"}


class EnvPoolVecEnv(VecEnv):
    """``num_envs`` copies of an EnvPool env in ``pools`` synchronous pools.

    Observations become float32, except uint8 (images), which stays. Every action is checked on the host before C++ sees
    it, because EnvPool checks only its first call and then misreads memory or aborts. Results are bitwise the same for
    any number of pools and threads. A process that holds such an env must not fork: the child hangs on the pool.

    Args:
        id: an exact EnvPool id, e.g. ``Ant-v5``.
        num_envs: envs of this rank.
        device: where results go; on CUDA through a pinned ring, one asynchronous copy per step.
        seed: of the whole run, over all ranks; see `envs.seeding.first_seed`.
        rank: this process among ``world_size``.
        world_size: processes of the run, each with ``num_envs`` envs.
        pools: contiguous groups of envs that step apart; their sizes differ by at most one.
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
        pools: int = 2,
        num_threads: int = 0,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if not 1 <= pools <= num_envs:
            raise EnvError(f"env.pools={pools}: it must be in 1 .. num_envs={num_envs}")
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
        with _quiet_spaces():
            self.single_observation_space = _observation_space(id, spec.gymnasium_observation_space)
            self.single_action_space = _action_space(id, spec.gymnasium_action_space)
        self._workers = self._start_workers(epoch=0)
        self._rings = self._make_rings() if self.device.type == "cuda" else None

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """All ids that the installed EnvPool has registered."""
        return envpool.list_all_envs()

    def reset(self) -> Tensor:
        """Start every env anew and return the first observations ``[num_envs, *observation_shape]``."""
        with self.clock.phase("env_step"):
            batches = [worker.reset() for worker in self._workers]
        with self.clock.phase("transfer"):
            observations = torch.from_numpy(np.concatenate([batch.observations for batch in batches]))
            return observations.to(self.device, self._observation_dtype)

    def send(self, pool: int, actions: Tensor) -> None:
        """Check ``actions`` on the host and start one step of a pool; on CUDA this waits for the actions.

        Raises:
            EnvError: wrong shape or dtype, a value that is not finite or not in the space, or a step is under way.
        """
        columns = self.pools[pool]
        check_layout(actions, self.single_action_space, columns.stop - columns.start)
        with self.clock.phase("transfer"):
            on_host = actions.detach().cpu().numpy()
        check_values(on_host, self.single_action_space, columns.start)
        with self.clock.phase("env_step"):
            self._workers[pool].send(on_host)

    def recv(self, pool: int) -> StepResult:
        """Wait for the pool's step; the result is fresh memory, on CUDA in the order of the current stream.

        Raises:
            EnvError: no step was sent, the step took longer than ``timeout``, or EnvPool failed.
        """
        with self.clock.phase("env_step"):
            batch = self._workers[pool].recv()
        with self.clock.phase("transfer"):
            valid = batch.elapsed != 0
            fields = (
                batch.observations,
                np.where(valid, batch.rewards, np.float32(0)),
                batch.terminated,
                batch.truncated & ~batch.terminated,
                valid,
            )
            tensors = [torch.from_numpy(field) for field in fields]
            if self._rings is None:
                return StepResult(tensors[0].to(self._observation_dtype), *tensors[1:])
            return StepResult(*self._rings[pool].to_device(tensors))

    def reseed(self, epoch: int) -> None:
        """Rebuild the pools from the seeds of ``epoch`` (EnvPool ignores a seed at reset), as slowly as at first."""
        self.close()
        self._workers = self._start_workers(epoch)

    def close(self) -> None:
        """End the pools' threads and free their memory; calling it twice is fine."""
        for worker in self._workers:
            worker.close()
        self._workers = ()

    @property
    def _observation_dtype(self) -> torch.dtype:
        return torch.uint8 if self.single_observation_space.dtype == np.uint8 else torch.float32

    def _start_workers(self, epoch: int) -> tuple[_PoolWorker, ...]:
        seed = first_seed(self.num_envs, epoch=epoch, **self._seeds)
        return tuple(
            _PoolWorker(
                self.id,
                columns,
                self._timeout,
                {**self._options, "seed": seed + columns.start, "num_threads": self._num_threads},
            )
            for columns in self.pools
        )

    def _make_rings(self) -> list[StagingRing]:
        observation_shape = self.single_observation_space.shape or ()
        rings = []
        for columns in self.pools:
            n = columns.stop - columns.start
            observations = Field((n, *observation_shape), self._observation_dtype)
            flags = [Field((n,), torch.bool)] * 3
            rings.append(StagingRing([observations, Field((n,), torch.float32), *flags], self.device))
        return rings


class _Batch(NamedTuple):
    """One step of a pool as EnvPool gave it, row ``i`` for env ``i`` of the pool."""

    observations: NDArray
    rewards: NDArray
    terminated: NDArray
    truncated: NDArray
    elapsed: NDArray


class _PoolWorker:
    """One EnvPool and the daemon thread that waits for it: a wait inside C++ cannot time out, one on a queue can."""

    def __init__(self, id: str, columns: slice, timeout: float, options: dict[str, Any]) -> None:
        self._name = f"pool of envs {columns.start} .. {columns.stop - 1} of {id}"
        self._num_envs = columns.stop - columns.start
        self._timeout = timeout
        self._busy = False
        with _quiet_spaces():
            self._pool = envpool.make_gymnasium(id, num_envs=self._num_envs, **options)
            _ = self._pool.observation_space  # EnvPool builds it on first use: here, not in the thread
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        args = (self._pool, self._requests, self._replies)
        self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
        self._thread.start()

    def reset(self) -> _Batch:
        if self._busy:
            self.recv()
        self._pool.async_reset()
        self._expect_reply()
        return self.recv()

    def send(self, actions: NDArray) -> None:
        if self._busy:
            raise EnvError(f"{self._name}: send before the recv of the step under way")
        self._pool.send(actions)
        self._expect_reply()

    def recv(self) -> _Batch:
        if not self._busy:
            raise EnvError(f"{self._name}: recv without a send")
        try:
            reply = self._replies.get(timeout=self._timeout)
        except queue.Empty:
            raise EnvError(f"{self._name}: no answer for env.timeout={self._timeout} s, an env is stuck") from None
        self._busy = False
        if isinstance(reply, Exception):
            raise EnvError(f"{self._name}: {type(reply).__name__}: {reply}") from reply
        return _in_env_order(self._name, self._num_envs, *reply)

    def close(self) -> None:
        self._requests.put(False)
        self._thread.join(self._timeout)
        del self._pool  # EnvPool's own close() frees nothing

    def _expect_reply(self) -> None:
        self._busy = True
        self._requests.put(True)


def _serve(pool: Any, requests: queue.SimpleQueue[bool], replies: queue.SimpleQueue[Any]) -> None:
    while requests.get():
        try:
            replies.put(pool.recv())
        except Exception as error:
            replies.put(error)


def _in_env_order(
    name: str, n: int, observations: NDArray, rewards: NDArray, terminated: NDArray, truncated: NDArray, info: Any
) -> _Batch:
    """Rows placed by env id, after a check that each of the ``n`` envs answered once."""
    fields = (observations, rewards, terminated, truncated, info["elapsed_step"])
    order = np.argsort(info["env_id"], kind="stable")
    if any(len(field) != n for field in fields) or not np.array_equal(info["env_id"][order], np.arange(n)):
        raise EnvError(f"{name}: got rows of envs {info['env_id'].tolist()}, expected each of {n} once")
    if np.array_equal(order, np.arange(n)):
        return _Batch(*fields)
    return _Batch(*(field[order] for field in fields))


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


@contextmanager
def _quiet_spaces() -> Iterator[None]:
    """Drop Gymnasium's warnings that float64 bounds were rounded to the float32 that the env declares."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield


def _observation_space(id: str, space: Any) -> Box:
    if not isinstance(space, Box):
        raise EnvError(f"env.id={id} has observations of {type(space).__name__}; only Box is supported")
    return space if space.dtype == np.uint8 else _as_float32(space)


def _action_space(id: str, space: Any) -> Box | Discrete:
    if isinstance(space, Discrete):
        return space
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        raise EnvError(f"env.id={id} has actions of {space}; only Discrete and Box of floats are supported")
    return _as_float32(space)


def _as_float32(space: Box) -> Box:
    with np.errstate(over="ignore", under="ignore"):
        return Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
