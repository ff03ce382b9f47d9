"""One asynchronous copy per step and direction, through pinned memory that events guard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; each field starts on a boundary that any dtype's view accepts


class Field(NamedTuple):
    """Shape and dtype of one tensor of a packed buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


class StagingRing:
    """Copies the same ``fields`` to ``device``, step after step, without waiting for the copies.

    Each of ``depth`` slots is one pinned buffer. A slot is written again only after its last copy's event has passed,
    so the host may run ``depth - 1`` steps ahead of the copies. The tensors on the device are the same at every step:
    a CUDA graph may read them, and the next copy overwrites them in the order of its stream.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device, depth: int = 2) -> None:
        self._fields = tuple(fields)
        self._device = device
        num_bytes = sum(_padded(field.num_bytes) for field in fields)
        pinned = device.type == "cuda"
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(depth)]
        self._landing = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._results = unpack(self._landing, self._fields)
        self._slots = itertools.cycle(
            [
                (buffer, [view.numpy() for view in unpack(buffer, self._fields)], torch.cuda.Event())
                for buffer in buffers
            ]
        )

    def to_device(self, sources: Sequence[NDArray]) -> list[Tensor]:
        """Return each array of ``sources`` on the device in its field's dtype, ordered on the current stream."""
        buffer, views, copied = next(self._slots)
        copied.synchronize()
        for view, source in zip(views, sources, strict=True):
            # in this thread alone: torch's threads would compete with those that step the other pools
            np.copyto(view, source, casting="same_kind")
        self._landing.copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        return self._results


class HostCopy:
    """Copies tensors like one ``field`` from a CUDA device to the same pinned memory, step after step."""

    def __init__(self, field: Field) -> None:
        self._buffer = torch.empty(field.shape, dtype=field.dtype, pin_memory=True)
        self._view = self._buffer.numpy()
        self._copied = torch.cuda.Event()

    def to_host(self, source: Tensor) -> NDArray:
        """Wait for ``source`` on the current stream and return it; good until the next call."""
        self._buffer.copy_(source, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(source.device))
        self._copied.synchronize()
        return self._view


def unpack(buffer: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """Typed views of a byte ``buffer`` that holds ``fields`` one after another, each padded to 16 bytes."""
    starts = itertools.accumulate((_padded(field.num_bytes) for field in fields), initial=0)
    return [
        buffer[start : start + field.num_bytes].view(field.dtype).view(field.shape)
        for start, field in zip(starts, fields, strict=False)
    ]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
