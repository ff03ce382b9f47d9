"""A stand-in for CUDA graphs on the CPU: the operators that a step called, called again on the very same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS_THE_DEVICE = torch.ops.aten._local_scalar_dense.default


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READS_THE_DEVICE:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def capture(steps: list[Callable[[], None]], *_: Any) -> Callable[[], None]:
    """In place of `trainer.graphs.capture`: what is no operator on a tensor happens now and never again.

    A capture runs nothing, a tape has to: the first replay is this run.
    """
    tape = _Tape()
    with tape:
        for step in steps:
            step()
    replays = iter(range(1))

    def replay() -> None:
        if next(replays, None) is None:
            with torch.no_grad():
                for func, args, kwargs, result in tape.calls:
                    _overwrite(result, func(*args, **kwargs))

    return replay


def _overwrite(before: Any, now: Any) -> None:
    """Put new results where the old ones lie; views and in-place results are there already."""
    for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.detach().copy_(new)
