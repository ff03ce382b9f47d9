"""Which backend a call runs on."""

from __future__ import annotations

import importlib.util
from typing import get_args

from kernels.operations import Backend

HAS_TRITON = importlib.util.find_spec("triton") is not None


def require_triton() -> None:
    """Refuse ``backend="triton"`` where there is none.

    Raises:
        ValueError: the package is not installed.
    """
    if not HAS_TRITON:
        raise ValueError("backend: 'triton' needs the package triton, which is not installed; use 'torch' or 'auto'")


def runs_triton(backend: Backend, on_cuda: bool) -> bool:
    """Whether a call goes to the fused kernels: ``auto`` takes them for CUDA tensors where Triton is installed.

    Raises:
        ValueError: no such backend, or Triton was asked for and is not installed.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "triton":
        require_triton()
    return backend == "triton" or (backend == "auto" and on_cuda and HAS_TRITON)
