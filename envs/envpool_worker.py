"""One pool of EnvPool and the thread that waits for it."""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import envpool
import numpy as np
from numpy.typing import NDArray

from envs.base import EnvError


class Batch(NamedTuple):
    """One step of a pool as EnvPool gave it, row ``i`` for env ``i`` of the pool."""

    observations: NDArray
    rewards: NDArray
    terminated: NDArray
    truncated: NDArray
    elapsed: NDArray


class PoolWorker:
    """One EnvPool and the daemon thread that waits for it: a wait inside C++ cannot time out, one on a queue can."""

    def __init__(
        self, id: str, columns: slice, timeout: float, options: dict[str, Any], join: Callable[[Any], NDArray]
    ) -> None:
        self._name = f"pool of envs {columns.start} .. {columns.stop - 1} of {id}"
        self._num_envs = columns.stop - columns.start
        self._timeout = timeout
        self._join = join  #: makes one array of an env's observations
        self._busy = self._stuck = False
        with quiet_spaces():
            self._pool = envpool.make_gymnasium(id, num_envs=self._num_envs, **options)
            _ = self._pool.observation_space  # EnvPool builds it on first use: here, not in the thread
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        args = (self._pool, self._requests, self._replies)
        self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._requests.put, False)  # ends the thread of a worker nobody closed, too

    def reset(self) -> Batch:
        """Start every env anew; a step under way is finished and dropped."""
        if self._busy:
            self.recv()
        self._pool.async_reset()
        self._expect_reply()
        return self.recv()

    def send(self, actions: NDArray) -> None:
        """Start a step with checked ``actions``; returns at once.

        Raises:
            EnvError: a step is under way.
        """
        if self._busy:
            raise EnvError(f"{self._name}: send before the recv of the step under way")
        self._pool.send(actions)
        self._expect_reply()

    def recv(self) -> Batch:
        """Wait for the step under way.

        Raises:
            EnvError: none is under way, it took longer than ``timeout``, EnvPool failed, or a row is missing.
        """
        if not self._busy:
            raise EnvError(f"{self._name}: recv without a send")
        try:
            reply = self._replies.get(timeout=self._timeout)
        except queue.Empty:
            self._stuck = True
            raise EnvError(f"{self._name}: no answer for env.timeout={self._timeout} s, an env is stuck") from None
        self._busy = False
        if isinstance(reply, Exception):
            raise EnvError(f"{self._name}: {type(reply).__name__}: {reply}") from reply
        observations, *rest = reply
        return _in_env_order(self._name, self._num_envs, self._join(observations), *rest)

    def close(self) -> None:
        """End the threads and free the envs' memory; a stuck pool keeps both until the process ends."""
        self._stop()
        self._thread.join(0 if self._stuck else self._timeout)
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
) -> Batch:
    """Rows placed by env id, after a check that each of the ``n`` envs answered once."""
    fields = (observations, rewards, terminated, truncated, info["elapsed_step"])
    ids, expected = info["env_id"], np.arange(n)
    if any(len(field) != n for field in fields) or not np.array_equal(np.sort(ids), expected):
        raise EnvError(f"{name}: got {len(ids)} rows of {len(np.unique(ids))} envs, expected one row of each of {n}")
    if np.array_equal(ids, expected):
        return Batch(*fields)
    order = np.argsort(ids)
    return Batch(*(field[order] for field in fields))


@contextmanager
def quiet_spaces() -> Iterator[None]:
    """Drop Gymnasium's warnings that float64 bounds were rounded to the float32 that the env declares."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield
