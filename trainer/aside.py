"""Reading what the device has done, while it goes on with something else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Aside:
    """A stream of its own for what the host reads of one point in the order of work, without waiting for what follows.

    On a CPU nothing is under way when a call has returned: there it does nothing.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> None:
        """The point: `reading` sees what was launched on the current stream until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def reading(self) -> AbstractContextManager[Any]:
        """In this block tensors from before the mark are read, and only they are waited for."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
