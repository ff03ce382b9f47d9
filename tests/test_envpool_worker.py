"""The thread behind a pool of EnvPool's: rows in their places, errors, an engine that does not answer."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

import envs
from envs import envpool_worker
from envs.base import EnvError


class FakePool:
    """An engine's pool whose answers are what ``answer`` returns for its number of envs."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs: int, answer: Callable[[int], Any]) -> None:
        self._recv = lambda: answer(num_envs)

    def async_reset(self) -> None: ...

    def recv(self) -> Any:
        return self._recv()


def rows(ids: list[int]) -> tuple[Any, ...]:
    column = np.array(ids)
    info = {"env_id": column, "elapsed_step": column}
    return column[:, None], column.astype(np.float32), column > 9, column > 9, info


def worker(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], Any], timeout: float = 5.0) -> Any:
    fake = SimpleNamespace(make_gymnasium=lambda id, num_envs: FakePool(num_envs, answer))
    monkeypatch.setattr(envpool_worker, "envpool", fake)
    return envpool_worker.PoolWorker("Toy-v0", slice(8, 12), timeout, {}, lambda observations: observations)


def test_rows_are_placed_by_env_id(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = worker(monkeypatch, lambda n: rows([2, 0, 3, 1])).reset()
    assert batch.observations[:, 0].tolist() == batch.elapsed.tolist() == batch.rewards.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], []])
def test_a_missing_or_repeated_row_is_an_error(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvError, match=r"pool of envs 8 \.\. 11 of Toy-v0: got .* expected one row of each of 4"):
        worker(monkeypatch, lambda n: rows(ids)).reset()


def test_an_error_inside_the_engine_keeps_its_type_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(num_envs: int) -> Any:
        raise RuntimeError("boom")

    with pytest.raises(EnvError, match=r"envs 8 \.\. 11 of Toy-v0: RuntimeError: boom") as caught:
        worker(monkeypatch, explode).reset()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_stuck_env_is_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    stuck = worker(monkeypatch, lambda n: release.wait(30), timeout=0.1)
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"envs 8 \.\. 11 of Toy-v0: no answer for env\.timeout=0\.1 s"):
        stuck.reset()
    stuck.close()
    assert time.monotonic() - started < 5
    release.set()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_close_and_garbage_collection_end_every_thread() -> None:
    def threads() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    before = threads()
    closed = envs.make("CartPole-v1", "envpool", 4, num_threads=2)
    dropped = envs.make("CartPole-v1", "envpool", 4, num_threads=2)
    assert threads() >= before + 2 * 2 * 2
    closed.close()
    del dropped
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before
