"""How the threads and streams of an asynchronous run wait for one another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

#: Seconds between two looks of a thread that watches while it waits.
WATCH_SECONDS = 0.5


class Closed(Exception):
    """The run is ending: whoever waits shall leave."""


class Gate:
    """One lock for all that actors and the learner share: a thread enters when its condition holds, and alone.

    Whoever leaves wakes the others, who look at their conditions again. Once closed, nobody enters any more.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._closed = False
        self.error: BaseException | None = None  #: what closed the gate first, if that was an error

    @contextmanager
    def when(self, ready: Callable[[], bool], watch: Callable[[], None] | None = None) -> Iterator[None]:
        """Wait until ``ready()``, then hold the lock for the block.

        Args:
            ready: looked at whenever somebody leaves.
            watch: called now and then meanwhile; what it raises ends the wait.

        Raises:
            Closed: the run is ending.
        """
        with self._condition:
            seconds = None if watch is None else WATCH_SECONDS
            while not self._condition.wait_for(lambda: self._closed or ready(), seconds):
                if watch is not None:
                    watch()
            if self._closed:
                raise Closed
            yield
            self._condition.notify_all()

    def alone(self) -> AbstractContextManager[None]:
        """Hold the lock for the block, whatever holds.

        Raises:
            Closed: the run is ending.
        """
        return self.when(lambda: True)

    def close(self, error: BaseException | None = None) -> None:
        """Let nobody in any more; the first error is kept."""
        with self._condition:
            self._closed = True
            self.error = self.error or error
            self._condition.notify_all()


class Fence:
    """Orders the work of several CUDA streams on the same memory; on a CPU nothing is needed.

    Every user of the memory calls `join` before its first and after its last access, with the gate's lock held: what
    follows a ``join`` on its stream begins after all that came before earlier ones on theirs. The host never waits.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def join(self) -> None:
        """Wait, on the current stream, for all earlier joins; later ones wait for what this stream was given."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._event)
            self._event.record(stream)
