"""The credit operations in plain torch: the backend for a CPU and the baseline for the Triton kernels.

Every operation states its problem as ``x[t] = alpha[t] + beta[t] * x[t + 1]``, or forward in time, and leaves it to
`linear_recurrence`; ``mode`` chooses how that is solved (see `kernels.torch_recurrence`).

Arguments are those of `kernels.credit`, already validated: tensors are ``[T, N]`` with any strides, flags of any dtype
(nonzero is true), ``gamma`` a float or ``[N]``. Results are float32, or float64 where any input is, without gradient.

Filler rows and rows of other episodes are left out by selects, never by products with 0, so that inf and NaN stay where
they are. A row directly before a filler row ends its trace as a truncated one does, flagged or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.torch_recurrence import Mode, linear_recurrence, selectable
from kernels.torch_rows import Rows, classify, taken


def _accumulate_dtype(*tensors: Tensor | None) -> torch.dtype:
    has_float64 = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if has_float64 else torch.float32


def _coefficient(value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    return value.to(dtype) if isinstance(value, Tensor) else value


def _next(values: Tensor, last: Tensor) -> Tensor:
    """``values`` one row later, ``last`` ``[N]`` in the final row."""
    return torch.cat([values[1:], last.expand_as(values[-1:])])


def _clipped_ratio(log_ratio: Tensor, bar: float) -> Tensor:
    return log_ratio.exp().clamp(max=bar)


@selectable
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
    mode: Mode = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): advantages and value targets, ``[T, N]``.

    ``A[t] = delta[t] + gamma * lambda * (1 - done[t]) * A[t + 1]`` and
    ``delta[t] = r[t] + gamma * (1 - terminated[t]) * V_next[t] - V[t]``; targets are ``A + V``.
    """
    dtype = _accumulate_dtype(rewards, values, last_value, next_values)
    rows, gamma, values = classify(terminated, truncated, valid), _coefficient(gamma, dtype), values.to(dtype)
    next_values = _next(values, last_value.to(dtype)) if next_values is None else next_values.to(dtype)
    delta = rewards.to(dtype) + rows.successor(gamma * next_values) - values
    beta = rows.trace(gamma * gae_lambda, dtype)
    advantages = linear_recurrence(rows.keep(delta), beta, None, reverse=True, mode=mode)
    return advantages, rows.keep(advantages + values)


@selectable
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
    mode: Mode = "auto",
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al. 2018, eq. 1 in its recursive form): value targets and policy-gradient advantages.

    ``vs[t] - V[t] = rho[t] * delta[t] + gamma * c[t] * (1 - done[t]) * (vs[t + 1] - V[t + 1])`` and
    ``pg[t] = pg_rho[t] * (r[t] + gamma * (1 - terminated[t]) * vs_next[t] - V[t])``, where ``vs_next[t]`` is
    ``vs[t + 1]``, or V of the successor where the trace ends.
    """
    dtype = _accumulate_dtype(behaviour_log_probs, target_log_probs, rewards, values, last_value, next_values)
    rows, gamma = classify(terminated, truncated, valid), _coefficient(gamma, dtype)
    rewards, values, last_value = rewards.to(dtype), values.to(dtype), last_value.to(dtype)
    next_values = _next(values, last_value) if next_values is None else next_values.to(dtype)
    log_rho = target_log_probs.to(dtype) - behaviour_log_probs.to(dtype)
    delta = rewards + rows.successor(gamma * next_values) - values
    alpha = rows.keep(_clipped_ratio(log_rho, rho_bar) * delta)
    beta = rows.trace(gamma * vtrace_lambda * _clipped_ratio(log_rho, c_bar), dtype)
    value_targets = values + linear_recurrence(alpha, beta, None, reverse=True, mode=mode)
    vs_next = torch.where(rows.closing, next_values, _next(value_targets, last_value))
    pg_delta = rewards + rows.successor(gamma * vs_next) - values
    return rows.keep(value_targets), rows.keep(_clipped_ratio(log_rho, pg_rho_bar) * pg_delta)


def _retrace(
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
    mode: Mode = "auto",
) -> Tensor:
    """Retrace(lambda) (Munos et al. 2016, eq. 3): the Q targets of the actions taken, ``[T, N]``.

    ``Qret[t] - q[t] = delta[t] + gamma * (1 - done[t]) * c[t + 1] * (Qret[t + 1] - q[t + 1])``.
    """
    dtype = _accumulate_dtype(rewards, q_taken, expected_q, log_rhos, last_expected_q, next_expected_q)
    rows, gamma, q_taken = classify(terminated, truncated, valid), _coefficient(gamma, dtype), q_taken.to(dtype)
    if next_expected_q is None:
        next_expected_q = _next(expected_q.to(dtype), last_expected_q.to(dtype))
    delta = rewards.to(dtype) + rows.successor(gamma * next_expected_q.to(dtype)) - q_taken
    c = retrace_lambda * _clipped_ratio(log_rhos.to(dtype), c_bar)
    beta = rows.trace(gamma * _next(c, c.new_zeros(())), dtype)
    correction = linear_recurrence(rows.keep(delta), beta, None, reverse=True, mode=mode)
    return rows.keep(q_taken + correction)


retrace = selectable(_retrace)


@selectable
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
    mode: Mode = "auto",
) -> Tensor:
    """`retrace` with expectation and ratio made here from ``q_values`` and ``target_log_probs``, ``[T, N, A]``.

    An action of probability 0 contributes nothing to the expectation, even if its Q is not finite.
    """
    dtype = _accumulate_dtype(
        rewards, q_values, target_log_probs, behaviour_log_probs, last_expected_q, next_expected_q
    )
    q_values, target_log_probs = q_values.to(dtype), target_log_probs.to(dtype)
    probs = target_log_probs.exp()
    expected_q = torch.where(probs == 0, 0.0, probs * q_values).sum(-1)
    q_taken = taken(q_values, actions)
    log_rhos = taken(target_log_probs, actions) - behaviour_log_probs.to(dtype)
    return _retrace(
        rewards, q_taken, expected_q, log_rhos, last_expected_q, terminated, truncated, valid=valid,
        next_expected_q=next_expected_q, gamma=gamma, retrace_lambda=retrace_lambda, c_bar=c_bar, mode=mode,
    )  # fmt: skip


@selectable
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
    mode: Mode = "auto",
) -> Tensor:
    """TD(lambda) returns (Sutton and Barto 2018, eq. 12.2 and 12.3), ``[T, N]``.

    ``G[t] = r[t] + gamma * (1 - terminated[t]) * ((1 - lambda) * V_next[t] + lambda * G[t + 1])``, with the whole
    weight on ``V_next`` where the trace ends.
    """
    dtype = _accumulate_dtype(rewards, values, last_value, next_values)
    rows, gamma = classify(terminated, truncated, valid), _coefficient(gamma, dtype)
    next_values = _next(values.to(dtype), last_value.to(dtype)) if next_values is None else next_values.to(dtype)
    bootstrap = gamma * torch.where(rows.closing, next_values, (1 - td_lambda) * next_values)
    alpha = rows.keep(rewards.to(dtype) + rows.successor(bootstrap))
    return linear_recurrence(alpha, rows.trace(gamma * td_lambda, dtype), None, reverse=True, mode=mode)


@selectable
def discounted_returns(
    rewards: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    mode: Mode = "auto",
) -> Tensor:
    """Discounted returns (Sutton and Barto 2018, eq. 3.8), ``[T, N]``.

    ``G[t] = r[t] + gamma * (1 - terminated[t]) * G_next[t]``, where ``G_next[t]`` is ``G[t + 1]``, or
    ``bootstrap_values[t]`` in a truncated row, or ``last_value`` in the last row.
    """
    dtype = _accumulate_dtype(rewards, last_value, bootstrap_values)
    rows, gamma, rewards = classify(terminated, truncated, valid), _coefficient(gamma, dtype), rewards.to(dtype)
    tail = torch.zeros_like(rewards) if bootstrap_values is None else bootstrap_values.to(dtype)
    final = last_value.to(dtype).expand_as(tail[-1:])
    if rows.truncated is not None:
        final = torch.where(rows.truncated[-1:], tail[-1:], final)
    tail = gamma * torch.cat([tail[:-1], final])
    alpha = rows.keep(rewards + torch.where(rows.closing, rows.successor(tail), 0.0))
    return linear_recurrence(alpha, rows.trace(gamma, dtype), None, reverse=True, mode=mode)


@selectable
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
    mode: Mode = "auto",
) -> tuple[Tensor, Tensor]:
    """Accumulating eligibility traces (Sutton and Barto 2018, eq. 12.5): traces ``[T, N]`` and carry ``[N]``.

    ``e[t] = x[t] + gamma * lambda * (1 - done[t - 1]) * e[t - 1]``. The carry is what the row after the window takes
    over: ``e[T - 1]``, or 0 where that row is done or filler.
    """
    dtype = _accumulate_dtype(inputs, carry)
    rows, decay = classify(terminated, truncated, valid), _coefficient(gamma, dtype) * trace_lambda
    return _forward(inputs.to(dtype), rows, carry, previous_done, decay, mode)


@selectable
def episodic_prefix_sum(
    inputs: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    carry: Tensor | None = None,
    previous_done: Tensor | None = None,
    mode: Mode = "auto",
) -> tuple[Tensor, Tensor]:
    """Sums since the episode began: ``S[t] = x[t] + (1 - done[t - 1]) * S[t - 1]``, and the carry as for the traces."""
    dtype = _accumulate_dtype(inputs, carry)
    rows = classify(terminated, truncated, valid)
    return _forward(inputs.to(dtype), rows, carry, previous_done, 1.0, mode)


def _forward(
    inputs: Tensor,
    rows: Rows,
    carry: Tensor | None,
    previous_done: Tensor | None,
    decay: float | Tensor,
    mode: Mode,
) -> tuple[Tensor, Tensor]:
    carry = inputs.new_zeros(inputs.shape[1:]) if carry is None else carry.to(inputs.dtype)
    before = torch.zeros_like(carry, dtype=torch.bool) if previous_done is None else previous_done.bool()
    done = torch.cat([before.unsqueeze(0), rows.done])
    starting = done[:-1] if rows.valid is None else done[:-1] | ~rows.valid
    beta = rows._replace(closing=starting).trace(decay, inputs.dtype)
    values = linear_recurrence(rows.keep(inputs), beta, carry, reverse=False, mode=mode)
    last = values[-1] if len(values) else carry
    return values, torch.where(done[-1], 0.0, last)


def masked_moments(x: Tensor, valid: Tensor | None) -> Tensor:
    """Count, mean and sum of squared deviations of the valid entries, ``[3]`` in ``x``'s dtype; zeros without any.

    Two of these merge (Chan et al. 1979): ``M2 = M2_a + M2_b + (mean_b - mean_a)^2 * n_a * n_b / (n_a + n_b)``.
    """
    valid = torch.ones_like(x, dtype=torch.bool) if valid is None else valid.bool()
    count = valid.sum().to(x.dtype)
    mean = torch.where(valid, x, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(valid, x - mean, 0.0).square().sum()
    return torch.stack([count, mean, squares])
