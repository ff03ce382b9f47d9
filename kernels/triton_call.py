"""A launch of a Triton kernel as a value: to run it, or to compile it ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One kernel with its grid, its arguments and the constants that it compiles for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]  #: warps and stages of the pipeline among them

    def compile(self) -> Any:
        """The compiled kernel for Triton's active target; the tensors may be on ``meta``."""
        return self.kernel.warmup(*self.arguments, **self.constants, grid=self.grid)


def run(launches: Iterable[Launch], device: torch.device) -> None:
    """Launch one after the other on the device's current stream."""
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: no device to change to
        for kernel, grid, arguments, constants in launches:
            kernel[grid](*arguments, **constants)
