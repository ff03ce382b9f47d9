"""Stopping: the first signal asks the loop to save and leave, the second leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Remembers the first signal; as a context manager it puts the former handlers back.

    SIGTERM, SIGINT and SIGUSR1 (what schedulers send before they preempt) all mean: finish the update, save a
    checkpoint, and leave with ``128 + signal number``.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._former: dict[int, object] = {}

    @property
    def received(self) -> bool:
        """True once a signal came."""
        return self.number is not None

    @property
    def exit_status(self) -> int:
        """143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1."""
        return 128 + (self.number or 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)  # files are replaced whole, so none is harmed
        self.number = number

    def __enter__(self) -> StopSignal:
        for number in _HANDLED:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
