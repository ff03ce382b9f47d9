"""Without a GPU the Triton kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Neither an actor nor a pool of envs that was not there before the test."""
    before = set(threading.enumerate())
    yield

    def left() -> list[threading.Thread]:
        return [t for t in set(threading.enumerate()) - before if t.name.startswith(("actor", "pool"))]

    for thread in left():
        thread.join(2.0 if thread.name.startswith("pool") else 0.0)
    assert [thread.name for thread in left()] == []
