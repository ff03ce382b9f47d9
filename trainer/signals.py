"""Stopping: the first signal asks the loop to save and leave, the second leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from trainer import distributed

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_STDERR = 2
_STOPPING = b"\nrollscan: stopping after this update, then saving; a second signal leaves at once, without saving\n"
_SHOW_CURSOR = b"\x1b[?25h"  # the live console hides it


class StopSignal:
    """Remembers the first signal; as a context manager it puts the former handlers back.

    SIGTERM, SIGINT, SIGUSR1 (what schedulers send before they preempt) and SIGHUP (the terminal is gone) all mean:
    finish the update, save a checkpoint, and leave with ``128 + signal number``. Under ``nohup`` SIGHUP means nothing.
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
        """143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1, 129 for SIGHUP, 0 if none came."""
        return 0 if self.number is None else 128 + self.number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            os._exit(128 + number)  # files are replaced whole, so none is harmed
        self.number = number
        if distributed.rank() == 0:
            with contextlib.suppress(OSError):  # not `print`: it may be what the signal interrupted
                os.write(_STDERR, _STOPPING)

    def __enter__(self) -> StopSignal:
        for number in _HANDLED:
            self._former[number] = signal.signal(number, self._handle)
        if self._former[signal.SIGHUP] is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
