"""Advantages: `gae` and `vtrace`, and what all credit operations share.

The other operations are in `kernels.q_targets`, `kernels.returns` and `kernels.traces`. All of them solve
``x[t] = alpha[t] + beta[t] * x[t + 1]`` (or its mirror, forward in time) over rollouts of T steps of N envs, and:

- Tensors are time first, ``[T, N]``, with any strides; an env-major buffer is passed as its transposed view and read in
  place. Floating inputs are float32, bfloat16, float16 or float64; sums are float32, or float64 where any input is.
  Results have the dtype that the inputs promote to, or ``out_dtype``; carries and moments have that of the sums. Flags
  are bool or uint8 (any nonzero is true).
- ``terminated``: the episode ended in this row, nothing follows. ``truncated``: it was cut in this row (a time limit);
  its successor's value still counts. Where both are set, termination wins. ``done`` below is either of them.
- ``valid`` is false in *filler* rows (the step on which an autoreset happened). They return 0, count nowhere, and only
  their value is read, as V of the final observation, by the row before; no trace crosses them.
- ``V_next[t]``, the value of the true successor, is ``next_values[t]`` where given, else ``values[t + 1]``, and
  ``last_value`` in the last row.
- ``gamma`` is a float in [0, 1] or a float32 or float64 tensor ``[N]``, one for each env.
- Inputs are constants: they are never modified, and no gradient flows through the results.
- ``backend``: ``triton`` (one fused kernel, CUDA), ``torch`` in the ``torch_mode`` ``loop``, ``scan``, ``compiled`` or
  ``auto`` (compiled on CUDA, else scan), or ``auto`` (Triton where it runs, else torch).
- ``out``: tensors for the results, in their order, of exactly their shape, dtype and device, apart from the inputs.
  One that begins where an input or another one does is refused; Triton sees views of one memory in a first call only.
- ``moments=True`` adds a ``[3]`` tensor: count, mean and sum of squared deviations of the valid advantages.

Refused with a message that names the argument, its shape, dtype and device: ``TypeError`` for a wrong kind or dtype,
``ValueError`` for a wrong shape, device or range, a negative view (torch's lazy negation), missing bootstrap values,
and a backend that cannot run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from kernels import operations
from kernels.dispatch import solve
from kernels.operations import Backend, TorchMode


class Credit(NamedTuple):
    """What `gae` returns."""

    advantages: Tensor  #: ``[T, N]``, in units of reward
    value_targets: Tensor  #: ``[T, N]``, in units of reward


class CreditWithMoments(NamedTuple):
    """What `gae` returns with ``moments=True``."""

    advantages: Tensor
    value_targets: Tensor
    moments: Tensor  #: ``[3]``: count, mean and sum of squared deviations of the valid advantages


class VTrace(NamedTuple):
    """What `vtrace` returns."""

    value_targets: Tensor  #: ``[T, N]``, in units of reward
    pg_advantages: Tensor  #: ``[T, N]``, in units of reward


class VTraceWithMoments(NamedTuple):
    """What `vtrace` returns with ``moments=True``."""

    value_targets: Tensor
    pg_advantages: Tensor
    moments: Tensor  #: ``[3]``: count, mean and sum of squared deviations of the valid policy-gradient advantages


class Scan(NamedTuple):
    """What the forward scans return."""

    values: Tensor  #: ``[T, N]``
    carry: Tensor  #: ``[N]``: what the next window takes as its ``carry``; 0 where the last row is done or filler


@overload
def gae(*tensors: Any, moments: Literal[True], **options: Any) -> CreditWithMoments: ...
@overload
def gae(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    gae_lambda: float = 0.95,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    moments: Literal[False] = False,
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Credit: ...
def gae(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    gae_lambda: float = 0.95,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    moments: bool = False,
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Credit | CreditWithMoments:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16).

    ``A[t] = delta[t] + gamma * gae_lambda * (1 - done[t]) * A[t + 1]`` with ``A[T] = 0`` and
    ``delta[t] = r[t] + gamma * (1 - terminated[t]) * V_next[t] - V[t]``; the value targets are ``A + V``.

    Args:
        rewards: ``[T, N]``, r.
        values: ``[T, N]``, V of the observation that the row acted on.
        last_value: ``[N]``, V of the observation after the last row.
        terminated, truncated, valid: ``[T, N]`` flags.
        next_values: ``[T, N]``, V of each row's true successor.
        gamma: discount per step.
        gae_lambda: in [0, 1]; 0 is one-step TD, 1 is Monte Carlo.
        backend, torch_mode, moments, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    results = solve(
        operations.GAE,
        (rewards, values, last_value, terminated, truncated, valid, next_values),
        gamma,
        (gae_lambda,),
        backend,
        torch_mode,
        out,
        out_dtype,
        moments,
    )
    return CreditWithMoments(*results) if moments else Credit(*results)


@overload
def vtrace(*tensors: Any, moments: Literal[True], **options: Any) -> VTraceWithMoments: ...
@overload
def vtrace(
    behaviour_log_probs: Tensor,
    target_log_probs: Tensor,
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    vtrace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    moments: Literal[False] = False,
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> VTrace: ...
def vtrace(
    behaviour_log_probs: Tensor,
    target_log_probs: Tensor,
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    vtrace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    moments: bool = False,
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> VTrace | VTraceWithMoments:
    """V-trace (Espeholt et al. 2018, equation 1, in the recursive form of remark 1).

    With ``rho[t] = exp(target[t] - behaviour[t])`` and ``c[t] = vtrace_lambda * min(c_bar, rho[t])``:
    ``vs[t] = V[t] + min(rho_bar, rho[t]) * (r[t] + gamma * (1 - terminated[t]) * V_next[t] - V[t])``
    ``+ gamma * c[t] * (1 - done[t]) * (vs[t + 1] - V[t + 1])`` and
    ``pg[t] = min(pg_rho_bar, rho[t]) * (r[t] + gamma * (1 - terminated[t]) * vs_next[t] - V[t])``, where ``vs_next`` is
    ``vs[t + 1]``, or ``V_next[t]`` where the trace ends.

    Args:
        behaviour_log_probs, target_log_probs: ``[T, N]``, log-probabilities of the action taken, in nats.
        rewards: ``[T, N]``, r.
        values: ``[T, N]``, V of the observation that the row acted on.
        last_value: ``[N]``, V of the observation after the last row.
        terminated, truncated, valid: ``[T, N]`` flags.
        next_values: ``[T, N]``, V of each row's true successor.
        gamma: discount per step.
        vtrace_lambda: in [0, 1].
        rho_bar, c_bar, pg_rho_bar: upper bounds of the ratios, at least 0; infinity bounds nothing.
        backend, torch_mode, moments, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    results = solve(
        operations.VTRACE,
        (behaviour_log_probs, target_log_probs, rewards, values, last_value, terminated, truncated, valid, next_values),
        gamma,
        (vtrace_lambda, rho_bar, c_bar, pg_rho_bar),
        backend,
        torch_mode,
        out,
        out_dtype,
        moments,
    )
    return VTraceWithMoments(*results) if moments else VTrace(*results)
