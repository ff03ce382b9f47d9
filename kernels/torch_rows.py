"""Rows of the torch backend: inside an episode, ending one, or filler; and the entry of a row's action."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The kinds of row, as bool ``[T, N]``; ``valid`` is None where no row is filler."""

    valid: Tensor | None
    terminated: Tensor
    truncated: Tensor | None
    done: Tensor
    #: the trace does not reach the next row: done, filler, directly before filler, or the last row
    closing: Tensor

    def keep(self, x: Tensor) -> Tensor:
        """Zero out filler rows."""
        return x if self.valid is None else torch.where(self.valid, x, 0.0)

    def successor(self, value: Tensor) -> Tensor:
        """The part of a successor's value that counts: none after termination."""
        return torch.where(self.terminated, 0.0, value)

    def trace(self, factor: float | Tensor, dtype: torch.dtype) -> Tensor:
        """``factor`` where the trace goes on, exactly 0 where it is cut."""
        if not isinstance(factor, Tensor):
            factor = torch.full((), factor, dtype=dtype, device=self.done.device)
        return torch.where(self.closing, 0.0, factor)


def classify(terminated: Tensor, truncated: Tensor | None, valid: Tensor | None) -> Rows:
    """Sort the rows of a window by their flags, bool or integer ``[T, N]``."""
    terminated = terminated.bool()
    truncated = None if truncated is None else truncated.bool()
    valid = None if valid is None else valid.bool()
    done = terminated if truncated is None else terminated | truncated
    inner = done[:-1] if valid is None else done[:-1] | ~valid[:-1] | ~valid[1:]
    closing = torch.cat([inner, torch.ones_like(done[-1:])])
    return Rows(valid, terminated, truncated, done, closing)


def taken(of_actions: Tensor, actions: Tensor) -> Tensor:
    """The entry of each row's action in ``[..., A]``; NaN where it is no index, as in a filler row it may be."""
    is_index = (actions >= 0) & (actions < of_actions.shape[-1])
    entries = of_actions.gather(-1, torch.where(is_index, actions, 0).long().unsqueeze(-1)).squeeze(-1)
    return torch.where(is_index, entries, torch.nan)
