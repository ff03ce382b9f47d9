"""First-order linear recurrences along time in plain torch, solved in one of three modes.

- ``loop``: a Python loop over time, what most training code does;
- ``scan``: log2(T) doubling steps over the whole ``[T, N]`` tensor;
- ``compiled``: ``torch.compile`` of the whole operation with torch's associative scan inside, the strongest baseline in
  torch. One graph is kept per shape, layout, dtype and coefficient, so changing any of them compiles anew.

``auto`` is ``compiled`` on CUDA and ``scan`` elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

Mode = Literal["auto", "loop", "scan", "compiled"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Graphs kept per operation; torch's own limit of 8 is fewer than one benchmark has shapes.
_MAX_GRAPHS = 256


def selectable(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``mode`` choose how an operation runs; compiled as a whole, so that alpha and beta fuse into the scan."""

    @functools.wraps(operation)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in (*args, *kwargs.values()))
        if kwargs.get("mode", "auto") == "auto":
            kwargs["mode"] = "compiled" if on_gpu else "scan"
        chosen = _compile(operation, on_gpu) if kwargs["mode"] == "compiled" else operation
        with torch.no_grad():
            return chosen(*args, **kwargs)

    return run


@functools.cache
def _compile(operation: Callable[_P, _R], on_gpu: bool) -> Callable[_P, _R]:
    import torch._dynamo.config as dynamo  # a second of every start that compiles nothing

    dynamo.recompile_limit = max(dynamo.recompile_limit, _MAX_GRAPHS)
    # Shifts by one row are concatenations: on a GPU they are to fuse into the scan's kernel, not cost a pass each.
    return torch.compile(operation, fullgraph=True, dynamic=False, options={"force_pointwise_cat": on_gpu})


def linear_recurrence(alpha: Tensor, beta: Tensor, initial: Tensor | None, *, reverse: bool, mode: Mode) -> Tensor:
    """Solve ``x[t] = alpha[t] + beta[t] * x[t - 1]``, or ``x[t + 1]`` if ``reverse``, along the first axis.

    Args:
        alpha: ``[T, N]``, float.
        beta: ``[T, N]``, same dtype. Where it is exactly 0 the neighbour is not read, whatever it holds.
        initial: ``[N]``, the state before the first row (after the last one if ``reverse``); None is 0.
        reverse: Whether time runs backward.
        mode: ``loop``, ``scan`` or ``compiled`` (the last only inside a compiled function).

    Returns:
        All states, ``[T, N]``.
    """
    if alpha.numel() == 0:
        return alpha
    if mode == "loop":
        return _loop(alpha, beta, initial, reverse)
    if initial is not None:
        alpha = _absorb(alpha, beta, initial, reverse)
    if mode == "scan":
        return _doubling_scan(alpha, beta, reverse)
    combine_mode = "pointwise" if alpha.is_cuda else "generic"
    states, _ = associative_scan(_compose, (alpha, beta), dim=0, reverse=reverse, combine_mode=combine_mode)
    return states


def _compose(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Compose two steps of the recurrence; a second step that cuts (beta 0) never reads the first."""
    alpha_first, beta_first = first
    alpha, beta = second
    return _step(alpha, beta, alpha_first), torch.where(beta == 0, beta, beta * beta_first)


def _step(alpha: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    return torch.where(beta == 0, alpha, alpha + beta * state)


def _absorb(alpha: Tensor, beta: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """Fold the initial state into the first row that is solved."""
    edge = slice(-1, None) if reverse else slice(0, 1)
    row = _step(alpha[edge], beta[edge], initial)
    return torch.cat([alpha[:-1], row] if reverse else [row, alpha[1:]])


def _loop(alpha: Tensor, beta: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    states = torch.empty_like(alpha)
    state = torch.zeros_like(alpha[0]) if initial is None else initial
    # The comparison and the row views are hoisted: two kernels a step are left.
    rows = list(zip(alpha, beta, beta != 0, states, strict=True))
    for alpha_t, beta_t, continues, out in reversed(rows) if reverse else rows:
        state = torch.where(continues, torch.addcmul(alpha_t, beta_t, state), alpha_t, out=out)
    return states


def _doubling_scan(alpha: Tensor, beta: Tensor, reverse: bool) -> Tensor:
    """Hillis and Steele: after step k every row has taken in the 2^k rows before it."""
    alpha, beta = alpha.clone(), beta.clone()
    offset = 1
    while offset < len(alpha):
        early, late = slice(None, -offset), slice(offset, None)
        taken, taking = (late, early) if reverse else (early, late)
        cuts = beta[taking] == 0
        states = torch.addcmul(alpha[taking], beta[taking], alpha[taken])
        products = beta[taking] * beta[taken]
        torch.where(cuts, alpha[taking], states, out=alpha[taking])
        torch.where(cuts, beta[taking], products, out=beta[taking])
        offset *= 2
    return alpha
