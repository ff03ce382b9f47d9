"""The bounded queue: batches in order, back-pressure, memory used again, and threads that leave when it ends."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from trainer.gate import Closed, Gate
from trainer.rollout import Rollout
from trainer.rollout_queue import RolloutQueue

T, N, PARTS = 3, 4, 2


def make_queue(batches: int = 2) -> tuple[Gate, RolloutQueue[str]]:
    gate = Gate()
    memory = [Rollout.allocate(T, N, (2,), torch.float32, (), torch.int64, torch.device("cpu")) for _ in range(batches)]
    return gate, RolloutQueue(gate, memory, PARTS)


def in_thread(function, *args) -> tuple[threading.Thread, list]:
    """Run a call that may wait; what it returned or raised is in the list afterwards."""
    results: list = []

    def run() -> None:
        try:
            results.append(function(*args))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def is_waiting(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return thread.is_alive()


def fill(queue: RolloutQueue[str], number: int, part: int) -> None:
    queue.acquire(number, part).rewards.fill_(10 * number + part)
    queue.submit(number, f"batch {number} part {part}")


def test_a_batch_is_taken_when_all_its_parts_are_there_and_holds_them_side_by_side():
    _, queue = make_queue()
    fill(queue, 0, 1)
    thread, results = in_thread(queue.take)
    assert is_waiting(thread)
    fill(queue, 0, 0)
    thread.join(5)
    (batch,) = results
    assert batch.number == 0
    assert batch.notes == ["batch 0 part 1", "batch 0 part 0"], "the last to submit is last"
    assert batch.rollout.rewards.tolist() == [[0, 0, 1, 1]] * T


def test_batches_are_taken_in_order_though_a_later_one_be_full_first():
    _, queue = make_queue()
    for part in range(PARTS):
        fill(queue, 1, part)
    thread, results = in_thread(queue.take)
    assert is_waiting(thread)
    for part in range(PARTS):
        fill(queue, 0, part)
    thread.join(5)
    assert results[0].number == 0
    assert queue.take().number == 1


def test_an_actor_that_is_ahead_waits_until_the_learner_lets_go_of_its_memory():
    _, queue = make_queue(batches=2)
    for number in (0, 1):
        for part in range(PARTS):
            fill(queue, number, part)
    thread, results = in_thread(queue.acquire, 2, 0)
    assert is_waiting(thread)
    batch = queue.take()
    assert is_waiting(thread), "the learner still reads it"
    queue.release()
    thread.join(5)
    assert results[0].rewards.data_ptr() == batch.rollout.rewards.data_ptr(), "the same memory, not a copy"


def test_the_memory_stays_where_it_is_over_many_batches():
    _, queue = make_queue(batches=3)
    places = set()
    for number in range(50):
        for part in range(PARTS):
            fill(queue, number, part)
        batch = queue.take()
        places.add(batch.rollout.observations.data_ptr())
        assert batch.rollout.rewards[0].tolist() == [10 * number, 10 * number, 10 * number + 1, 10 * number + 1]
        queue.release()
    assert len(places) == 3


def test_closing_sends_away_whoever_waits_and_whoever_comes():
    gate, queue = make_queue(batches=1)
    waiting = [in_thread(queue.take), in_thread(queue.acquire, 1, 0)]
    assert all(is_waiting(thread) for thread, _ in waiting)
    gate.close()
    for thread, results in waiting:
        thread.join(5)
        assert isinstance(results[0], Closed)
    with pytest.raises(Closed):
        queue.acquire(0, 0)


def test_the_first_error_is_the_one_that_is_kept():
    gate = Gate()
    first, second = ValueError("first"), ValueError("second")
    gate.close(first)
    gate.close(second)
    gate.close()
    assert gate.error is first


def test_actors_and_a_learner_of_different_speeds_lose_and_repeat_nothing():
    gate, queue = make_queue(batches=3)

    def act(part: int) -> None:
        for number in range(40):
            fill(queue, number, part)
            time.sleep(0.001 * ((number + part) % 3))

    threads = [in_thread(act, part)[0] for part in range(PARTS)]
    seen = []
    for _ in range(40):
        queue.release()
        seen.append(queue.take().rollout.rewards[0].tolist())
    assert seen == [[10.0 * n, 10.0 * n, 10.0 * n + 1, 10.0 * n + 1] for n in range(40)]
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    gate.close()
