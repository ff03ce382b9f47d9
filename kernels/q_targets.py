"""Off-policy Q targets: Retrace(lambda), from expectations and ratios or from a categorical policy.

Arguments that all operations share, and their errors, are described in `kernels.credit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import operations
from kernels.dispatch import solve
from kernels.operations import Backend, TorchMode


def retrace(
    rewards: Tensor,
    q_taken: Tensor,
    expected_q: Tensor,
    log_rhos: Tensor,
    last_expected_q: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_expected_q: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    retrace_lambda: float = 1.0,
    c_bar: float = 1.0,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Retrace(lambda) targets (Munos et al. 2016, equations 3 and 4), ``[T, N]``.

    ``Qret[t] = q[t] + delta[t] + gamma * (1 - done[t]) * c[t + 1] * (Qret[t + 1] - q[t + 1])`` with
    ``delta[t] = r[t] + gamma * (1 - terminated[t]) * EQ_next[t] - q[t]``,
    ``c = retrace_lambda * min(c_bar, exp(log_rho))``, and ``EQ_next`` as ``V_next``, of the expected Q.

    Args:
        rewards: ``[T, N]``, r.
        q_taken: ``[T, N]``, Q of the action taken.
        expected_q: ``[T, N]``, expectation of Q under the target policy.
        log_rhos: ``[T, N]``, target minus behaviour log-probability of the action taken, in nats.
        last_expected_q: ``[N]``, the expectation after the last row.
        terminated, truncated, valid: ``[T, N]`` flags.
        next_expected_q: ``[T, N]``, the expectation at each row's true successor.
        gamma: discount per step.
        retrace_lambda: in [0, 1].
        c_bar: upper bound of the ratio, at least 0.
        backend, torch_mode, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    return solve(
        operations.RETRACE,
        (rewards, q_taken, expected_q, log_rhos, last_expected_q, terminated, truncated, valid, next_expected_q),
        gamma,
        (retrace_lambda, c_bar),
        backend,
        torch_mode,
        out,
        out_dtype,
    )[0]


def retrace_categorical(
    rewards: Tensor,
    q_values: Tensor,
    target_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    actions: Tensor,
    last_expected_q: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    next_expected_q: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    retrace_lambda: float = 1.0,
    c_bar: float = 1.0,
    backend: Backend = "triton",
    torch_mode: TorchMode = "auto",
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`retrace` for a categorical policy, with expectation and ratio built on the way, ``[T, N]``.

    ``EQ[t] = sum_a exp(target[t, a]) * q[t, a]``, where an action of probability 0 counts nothing whatever its Q;
    ``log_rho[t] = target[t, action[t]] - behaviour[t]``.

    Args:
        rewards: ``[T, N]``, r.
        q_values, target_log_probs: ``[T, N, A]``, Q and the target policy's log-probabilities of every action.
        behaviour_log_probs: ``[T, N]``, log-probability of the action taken under the behaviour policy, in nats.
        actions: ``[T, N]``, int64 or int32 in ``0 .. A - 1`` (not read in filler rows); another one gives NaN.
        last_expected_q: ``[N]``, the expectation after the last row.
        terminated, truncated, valid: ``[T, N]`` flags.
        next_expected_q: ``[T, N]``, the expectation at each row's true successor.
        gamma, retrace_lambda, c_bar: see `retrace`.
        backend, torch_mode, out, out_dtype: see `kernels.credit`.

    Raises:
        TypeError, ValueError: a refused argument, see `kernels.credit`.
    """
    return solve(
        operations.RETRACE_CATEGORICAL,
        (
            rewards,
            q_values,
            target_log_probs,
            behaviour_log_probs,
            actions,
            last_expected_q,
            terminated,
            truncated,
            valid,
            next_expected_q,
        ),
        gamma,
        (retrace_lambda, c_bar),
        backend,
        torch_mode,
        out,
        out_dtype,
    )[0]
