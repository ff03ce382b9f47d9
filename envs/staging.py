"""One asynchronous host-to-device copy per step: fields packed into pinned memory, guarded by events."""

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
    so the host may run ``depth - 1`` steps ahead of the copies. Device tensors are fresh memory at every step.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device, depth: int = 2) -> None:
        self._fields = tuple(fields)
        self._device = device
        num_bytes = sum(_padded(field.num_bytes) for field in fields)
        pinned = device.type == "cuda"
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(depth)]
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
        on_device = torch.empty(buffer.shape, dtype=torch.uint8, device=self._device).copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        return unpack(on_device, self._fields)


def unpack(buffer: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """Typed views of a byte ``buffer`` that holds ``fields`` one after another, each padded to 16 bytes."""
    starts = itertools.accumulate((_padded(field.num_bytes) for field in fields), initial=0)
    return [
        buffer[start : start + field.num_bytes].view(field.dtype).view(field.shape)
        for start, field in zip(starts, fields, strict=False)
    ]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
