"""One pool of Gymnasium envs: its vector env, and how what fails in it is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from envs.base import EnvError

#: What a terminal or a scheduler sends to all of a run's processes: its first one saves, then closes the others.
_LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: Folders of code that is not the user's.
_INSTALLED = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))


class Pool:
    """One of Gymnasium's vector envs; its next-step autoreset is the contract's, up to the mark of filler rows."""

    def __init__(
        self, spec: EnvSpec, columns: slice, options: dict[str, Any], mode: str, num_threads: int, timeout: float
    ) -> None:
        self._id, self._first, self._timeout = spec.id, columns.start, timeout
        self._take_turns = mode == "async" and num_threads > 0
        self._name = f"envs {columns.start} .. {columns.stop - 1} of {spec.id}"
        self._busy = self._broken = False
        self._ended = np.zeros(columns.stop - columns.start, np.bool_)
        make = [partial(_make, spec, options, n, os.getpid()) for n in range(columns.start, columns.stop)]
        with self._told():
            self._vec = _in_processes(make, spec, num_threads) if mode == "async" else _InTurn(make)
        # a worker ignores the signal by which Python ends what was not closed
        self._kill = Finalize(self, _kill, (self._vec.processes,), exitpriority=0)

    def reset(self, seed: int | None) -> Any:
        """Start every env anew, env ``i`` from ``seed + i``; a step under way is finished and dropped."""
        if self._busy:
            self.recv()
        self._ended[:] = False
        with self._told():
            self._vec.reset_async(seed=seed)
            return self._vec.reset_wait(self._time_left())[0]

    def send(self, actions: NDArray) -> None:
        """Start a step with a copy of ``actions``."""
        if self._busy:
            raise EnvError(f"{self._name}: send before the recv of the step under way")
        with self._told():
            self._vec.step_async(actions.astype(self._vec.single_action_space.dtype))
        self._busy = True

    def recv(self) -> tuple[Any, NDArray, NDArray, NDArray, NDArray]:
        """Wait for the step under way and return what `envs.host.Rows` holds, the observations as the env gives them.

        Raises:
            EnvError: none is under way, it took longer than ``timeout``, or an env failed.
        """
        if not self._busy:
            raise EnvError(f"{self._name}: recv without a send")
        self._busy = False
        with self._told():
            observations, rewards, terminated, truncated, _ = self._vec.step_wait(self._time_left())
        valid = ~self._ended
        self._ended = terminated | truncated
        return observations, rewards, terminated, truncated, valid

    def close(self) -> None:
        """Let every env close itself; after a failure processes are ended by force."""
        if self._busy and not self._broken:
            with suppress(EnvError):
                self.recv()
        if self._broken and self._vec.processes:
            self._kill()
            self._vec.closed = True
        with self._told():
            self._vec.close()

    def _time_left(self) -> float:
        """Seconds left of the timeout; where envs take turns, once all have answered.

        Raises:
            EOFError: a process ended: those that wait for their turn would wait for the end of its own.
        """
        deadline = time.monotonic() + self._timeout
        if self._take_turns:
            ends = [process.sentinel for process in self._vec.processes]
            for pipe in self._vec.parent_pipes:
                ready = [pipe] if pipe.poll() else wait([pipe, *ends], max(0.0, deadline - time.monotonic()))
                if ready and pipe not in ready:
                    raise EOFError
        return max(0.0, deadline - time.monotonic())

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell of what fails in one line, with the env's number."""
        try:
            yield
        except Exception as error:
            self._broken = True
            raise EnvError(self._reason(error)) from error

    def _reason(self, error: Exception) -> str:
        if isinstance(error, EnvError):
            return str(error)
        if isinstance(error, multiprocessing.TimeoutError):
            silent = [self._first + i for i, pipe in enumerate(self._vec.parent_pipes) if not pipe.poll()]
            turns = self._take_turns and len(silent) > 1
            who = f"envs {', '.join(map(str, silent))}" if turns else f"env {silent[0]}"
            what = "they take turns (env.num_threads) and one of them is stuck" if turns else "it is stuck"
            return f"{who} of {self._id}: no answer for env.timeout={self._timeout} s, {what}"
        if isinstance(error, EOFError | ConnectionError):
            return f"{self._name}: {_deaths(self._vec.processes, self._first)}"
        return f"{self._name}: {in_one_line(error)}"


class _InTurn(SyncVectorEnv):
    """Gymnasium's vector env in this process, with the calls of that in processes: it works when it is waited for."""

    processes: Sequence[BaseProcess] = ()
    parent_pipes: Sequence[Connection] = ()

    def reset_async(self, seed: int | None) -> None:
        """Remember what to reset from."""
        self._work: Callable[[], Any] = partial(self.reset, seed=seed)

    def step_async(self, actions: NDArray) -> None:
        """Remember what to step with."""
        self._work = partial(self.step, actions)

    def reset_wait(self, timeout: float) -> Any:
        """Reset now; nothing can cut it short."""
        return self._work()

    def step_wait(self, timeout: float) -> Any:
        """Step now; nothing can cut it short."""
        return self._work()


class NumberedEnv(gymnasium.Wrapper):
    """One env that gives numbers as numbers and no info, and whose failures are one line with its own number."""

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        super().__init__(env)
        self._name = name

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation."""
        observation, _ = self._call(self.env.reset, seed=seed, options=options)
        return self._checked(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The next row."""
        observation, *numbers = self._call(lambda: _row(*self.env.step(action)))
        return self._checked(observation), *numbers, {}

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:  # an env that exits ends no run as if it had finished
            raise EnvError(f"{self._name}: {in_one_line(error)}") from error

    def _checked(self, observation: Any) -> Any:
        misfit = self._call(_misfit, observation, self.env.observation_space)
        if misfit:
            raise EnvError(f"{self._name}: {misfit}")
        return observation


def _row(observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> tuple[Any, float, bool, bool]:
    """What a step returned, with numbers as numbers."""
    return observation, float(reward), bool(terminated), bool(truncated)


def _misfit(observation: Any, space: gymnasium.Space, name: str = "an observation") -> str | None:
    """What does not fit the declared space: memory that processes share would broadcast it, or cut fractions off."""
    if isinstance(space, Dict):
        parts = (_misfit(observation[key], part, f"{name}, {key}:") for key, part in space.spaces.items())
        return next((part for part in parts if part), None)
    got = np.asarray(observation)
    if isinstance(space, Box) and not (got.shape == space.shape and np.can_cast(got.dtype, space.dtype, "same_kind")):
        return f"{name} is {list(got.shape)} {got.dtype}, observation_space says {list(space.shape)} {space.dtype}"
    return None


def _make(spec: EnvSpec, options: dict[str, Any], number: int, run: int) -> gymnasium.Env:
    """Env ``number``; in a process of its own, which is not that of the ``run``, signals are left to that one."""
    if os.getpid() != run:
        for received in _LEFT_TO_THE_RUN:
            signal.signal(received, signal.SIG_IGN)
    checker = {"disable_env_checker": True} if number else {}
    return NumberedEnv(gymnasium.make(spec, **{**checker, **options}), f"env {number} of {spec.id}")


def _in_processes(make: Sequence[Callable[[], gymnasium.Env]], spec: EnvSpec, num_threads: int) -> AsyncVectorEnv:
    """Gymnasium's vector env with a process per env; none is a fork of this one, with its threads and its GPU."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    origin = [spec.entry_point.partition(":")[0]] if isinstance(spec.entry_point, str) else []
    multiprocessing.get_context(method).set_forkserver_preload(["torch", __name__, *origin])  # once for all processes
    limit: dict[str, Any] = {"max_concurrency": num_threads} if num_threads else {}
    return AsyncVectorEnv(make, context=method, autoreset_mode=AutoresetMode.NEXT_STEP, **limit)


def in_one_line(error: BaseException) -> str:
    """Type, text and the last place in the user's own code, e.g. ``ValueError: no such map (my_envs.py:31)``."""
    text = next(iter(str(error).splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    origin = next((frame for frame in reversed(frames) if not frame.filename.startswith(_INSTALLED)), frames[-1])
    return f"{type(error).__name__}: {text} ({Path(origin.filename).name}:{origin.lineno})"


def _deaths(processes: Sequence[BaseProcess], first: int) -> str:
    """Which of the processes of envs ``first`` .. have ended, and how."""
    ended = wait([process.sentinel for process in processes], timeout=1)
    codes = {first + i: p.exitcode for i, p in enumerate(processes) if p.sentinel in ended}
    told = (f"that of env {number} with exit code {code}" for number, code in codes.items())
    return f"a process ended: {', '.join(told) or 'unknown which'}"


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
