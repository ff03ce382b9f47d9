"""Memory that the launches of one plan leave for each other: a counter, parts of moments, maps of tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable

import torch


class Workspace:
    """A counter, parts, words; zeroed once.

    Every launch leaves the counter at 0 and raises the number in all words by one, so that launches reset nothing.
    """

    def __init__(self, programs: int, envs: int, tiles: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = (4, 3 * programs * dtype.itemsize, 4 * tiles * envs * dtype.itemsize)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 16) * 16)
        self.memory = torch.zeros(starts.pop(), dtype=torch.uint8, device=device)
        counter, parts, words = (self.memory[start:] for start in starts)
        #: counter, parts, words
        self.tensors = (counter[:4].view(torch.int32), parts.view(dtype), words.view(torch.int64))
        self.addresses = tuple(x.data_ptr() for x in self.tensors)


class Workspaces:
    """The workspaces of one plan: one for each stream, and one for each stream of each captured graph.

    Launches that share one must follow each other. A graph may be replayed beside other streams, so it gets a workspace
    of its own. The one that lies ready was zeroed outside of the graph; without it, each replay zeroes a new one.
    """

    def __init__(self, programs: int, envs: int, tiles: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = (programs, envs, tiles, dtype, device)
        self.used: dict[Hashable, Workspace] = {}
        self.ready: Workspace | None = None

    def get(self, stream: int, capturing: bool) -> Workspace:
        """The workspace of a launch on ``stream``."""
        if not capturing:
            self.ready = self.ready or Workspace(*self.sizes)
            if stream not in self.used:
                self.used[stream] = Workspace(*self.sizes)
            return self.used[stream]
        user = (stream, capture_id(stream))
        if user not in self.used:
            self.used[user], self.ready = self.ready or Workspace(*self.sizes), None
        return self.used[user]


def capture_id(stream: int) -> int:
    """The number of the capture that ``stream`` takes part in, which no other capture of the process has."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    driver = ctypes.CDLL("libcuda.so.1")
    arguments = (ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if driver.cuStreamGetCaptureInfo_v2(*arguments) != 0:
        raise RuntimeError(f"stream {stream:#x}: the CUDA driver does not say which capture it takes part in")
    return number.value
