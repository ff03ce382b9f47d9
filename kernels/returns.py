"""Returns: TD(lambda) and discounted.

Arguments that all operations share, and their errors, are described in `kernels.credit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import operations
from kernels.dispatch import solve
from kernels.operations import Backend, TorchMode


def td_lambda(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    td_lambda: float = 0.95,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """TD(lambda) returns (Sutton and Barto 2018, equations 12.2 and 12.3), ``[T, N]``.

    ``G[t] = r[t] + gamma * (1 - terminated[t]) * ((1 - td_lambda) * V_next[t] + td_lambda * G[t + 1])``, with the
    whole weight on ``V_next[t]`` where the trace ends (truncated, or the last row).

    Args:
        rewards: ``[T, N]``, r.
        values: ``[T, N]``, V of the observation that the row acted on.
        last_value: ``[N]``, V of the observation after the last row.
        terminated, truncated, valid: ``[T, N]`` flags.
        next_values: ``[T, N]``, V of each row's true successor.
        gamma: discount per step.
        td_lambda: in [0, 1].
        backend, torch_mode, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    return solve(
        operations.TD_LAMBDA,
        (rewards, values, last_value, terminated, truncated, valid, next_values),
        gamma,
        (td_lambda,),
        backend,
        torch_mode,
        out,
        out_dtype,
    )[0]


def discounted_returns(
    rewards: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Discounted returns (Sutton and Barto 2018, equation 3.8), ``[T, N]``.

    ``G[t] = r[t] + gamma * (1 - done[t]) * G[t + 1]`` with ``G[T] = last_value``; a truncated row continues with
    ``bootstrap_values[t]``.

    Args:
        rewards: ``[T, N]``, r.
        last_value: ``[N]``, what follows the last row.
        terminated, truncated, valid: ``[T, N]`` flags.
        bootstrap_values: ``[T, N]``, what follows a truncated row; needed where ``truncated`` is given.
        gamma: discount per step.
        backend, torch_mode, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    return solve(
        operations.DISCOUNTED_RETURNS,
        (rewards, last_value, terminated, truncated, valid, bootstrap_values),
        gamma,
        (),
        backend,
        torch_mode,
        out,
        out_dtype,
    )[0]
