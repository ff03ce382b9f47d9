"""Forward in time: eligibility traces and sums since the episode began.

Arguments that all operations share, and their errors, are described in `kernels.credit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import operations
from kernels.credit import Scan
from kernels.dispatch import solve
from kernels.operations import Backend, TorchMode


def eligibility_traces(
    inputs: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    carry: Tensor | None = None,
    previous_done: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    trace_lambda: float = 0.95,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Scan:
    """Accumulating eligibility traces (Sutton and Barto 2018, equation 12.5), forward in time.

    ``e[t] = x[t] + gamma * trace_lambda * (1 - done[t - 1]) * e[t - 1]``: the ending row still belongs to its episode.

    The windows of a long rollout chain exactly: pass the returned carry, and the last row's ``done``, to the next one.

    Args:
        inputs: ``[T, N]``, x.
        terminated, truncated, valid: ``[T, N]`` flags.
        carry: ``[N]``, what the window before returned; None is 0.
        previous_done: ``[N]`` flags of the row before the first one; None is false.
        gamma: discount per step.
        trace_lambda: in [0, 1].
        backend, torch_mode, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    return Scan(
        *solve(
            operations.ELIGIBILITY_TRACES,
            (inputs, terminated, truncated, valid, carry, previous_done),
            gamma,
            (trace_lambda,),
            backend,
            torch_mode,
            out,
            out_dtype,
        )
    )


def episodic_prefix_sum(
    inputs: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    carry: Tensor | None = None,
    previous_done: Tensor | None = None,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Scan:
    """Sums since the episode began, forward in time.

    ``S[t] = x[t] + (1 - done[t - 1]) * S[t - 1]``: the ending row still belongs to its episode.

    The windows of a long rollout chain exactly: pass the returned carry, and the last row's ``done``, to the next one.

    Args:
        inputs: ``[T, N]``, x.
        terminated, truncated, valid: ``[T, N]`` flags.
        carry: ``[N]``, what the window before returned; None is 0.
        previous_done: ``[N]`` flags of the row before the first one; None is false.
        backend, torch_mode, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    return Scan(
        *solve(
            operations.EPISODIC_PREFIX_SUM,
            (inputs, terminated, truncated, valid, carry, previous_done),
            1.0,
            (),
            backend,
            torch_mode,
            out,
            out_dtype,
        )
    )
