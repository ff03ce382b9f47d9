"""The credit operations in float64, written as the sums that the papers print: slow, the ground truth of the tests.

Names and keywords are those of `kernels.credit`; results are float64 tensors on the CPU. Nothing here is recursive: an
env is split into the runs of rows that one trace spans, and each row's result is a sum over the rest of its run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.credit import Credit, Scan, VTrace
from kernels.reference_rows import Array, flags_of, float64, successors_of, window_of


def _traced_sum(x: Array, factors: Array) -> float:
    """Sum of ``x[j]`` times the product of all ``factors[i]`` with i < j."""
    return float(np.cumprod(np.concatenate([[1.0], factors[: len(x) - 1]])) @ x)


def _clipped_ratio(log_ratio: Array, bar: float) -> Array:
    with np.errstate(over="ignore"):
        return np.minimum(bar, np.exp(log_ratio))


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
) -> Credit:
    """Generalized advantage estimation as the sum of Schulman et al. 2016, equation 16.

    ``A[t] = sum_l (gamma * lambda)^l * delta[t + l]``, over the rows that the trace spans.
    """
    window = window_of(rewards, terminated, truncated, valid, gamma)
    r, v, successors = float64(rewards), float64(values), successors_of(window, values, last_value, next_values)
    advantages, targets = np.zeros_like(r), np.zeros_like(r)
    for env, rows in window.runs():
        gamma_env = window.gammas[env]
        delta = r[rows, env] + gamma_env * successors[rows, env] - v[rows, env]
        weights = (gamma_env * gae_lambda) ** np.arange(len(delta))
        advantages[rows, env] = [weights[: len(delta) - i] @ delta[i:] for i in range(len(delta))]
        targets[rows, env] = advantages[rows, env] + v[rows, env]
    return Credit(torch.from_numpy(advantages), torch.from_numpy(targets))


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
) -> VTrace:
    """V-trace as the double sum of Espeholt et al. 2018, equation 1, and the policy gradient of section 4.2.

    ``vs[s] = V[s] + sum_t gamma^(t - s) * (prod_(s <= i < t) c[i]) * rho[t] * (r[t] + gamma * V_next[t] - V[t])``.
    """
    window = window_of(rewards, terminated, truncated, valid, gamma)
    r, v, successors = float64(rewards), float64(values), successors_of(window, values, last_value, next_values)
    log_rho = float64(target_log_probs) - float64(behaviour_log_probs)
    rho, pg_rho = _clipped_ratio(log_rho, rho_bar), _clipped_ratio(log_rho, pg_rho_bar)
    c = vtrace_lambda * _clipped_ratio(log_rho, c_bar)
    targets, pg_advantages = np.zeros_like(r), np.zeros_like(r)
    for env, rows in window.runs():
        gamma_env = window.gammas[env]
        corrections = rho[rows, env] * (r[rows, env] + gamma_env * successors[rows, env] - v[rows, env])
        factors = gamma_env * c[rows, env]
        vs = v[rows, env] + [_traced_sum(corrections[s:], factors[s:]) for s in range(len(corrections))]
        vs_next = np.append(vs[1:], successors[rows, env][-1])
        targets[rows, env] = vs
        pg_advantages[rows, env] = pg_rho[rows, env] * (r[rows, env] + gamma_env * vs_next - v[rows, env])
    return VTrace(torch.from_numpy(targets), torch.from_numpy(pg_advantages))


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
) -> Tensor:
    """Retrace as the sum of Munos et al. 2016, equation 3.

    ``Qret[s] = q[s] + sum_t gamma^(t - s) * (prod_(s < i <= t) c[i]) * (r[t] + gamma * EQ_next[t] - q[t])``.
    """
    window = window_of(rewards, terminated, truncated, valid, gamma)
    r, q = float64(rewards), float64(q_taken)
    successors = successors_of(window, expected_q, last_expected_q, next_expected_q)
    c = retrace_lambda * _clipped_ratio(float64(log_rhos), c_bar)
    targets = np.zeros_like(r)
    for env, rows in window.runs():
        gamma_env = window.gammas[env]
        delta = r[rows, env] + gamma_env * successors[rows, env] - q[rows, env]
        factors = gamma_env * c[rows, env]
        corrections = [_traced_sum(delta[s:], factors[s + 1 :]) for s in range(len(delta))]
        targets[rows, env] = q[rows, env] + corrections
    return torch.from_numpy(targets)


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
) -> Tensor:
    """`retrace` of a categorical policy: ``EQ = sum_a pi(a) * Q(a)`` over the actions with ``pi(a) > 0``."""
    q, log_probs = float64(q_values), float64(target_log_probs)
    probs = np.exp(log_probs)
    expected_q = (probs * np.where(probs > 0, q, 0.0)).sum(axis=-1)
    actions_taken = actions.cpu().numpy()
    is_index = (actions_taken >= 0) & (actions_taken < q.shape[-1])
    places = np.where(is_index, actions_taken, 0)[..., None]
    q_taken, target = (
        np.where(is_index, np.take_along_axis(x, places, axis=-1)[..., 0], np.nan) for x in (q, log_probs)
    )
    log_rhos = target - float64(behaviour_log_probs)
    return retrace(
        rewards,
        torch.from_numpy(q_taken),
        torch.from_numpy(expected_q),
        torch.from_numpy(log_rhos),
        last_expected_q,
        terminated,
        truncated,
        valid=valid,
        next_expected_q=next_expected_q,
        gamma=gamma,
        retrace_lambda=retrace_lambda,
        c_bar=c_bar,
    )


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
) -> Tensor:
    """The lambda-return as the mixture of n-step returns of Sutton and Barto 2018, equations 12.1 and 12.3.

    ``G[t] = (1 - lambda) * sum_(n < K) lambda^(n - 1) * G[t : t + n] + lambda^(K - 1) * G[t : t + K]``, where K rows of
    the run are left at t and ``G[t : t + n] = sum_(j < n) gamma^j * r[t + j] + gamma^n * V_next[t + n - 1]``.
    """
    window = window_of(rewards, terminated, truncated, valid, gamma)
    r, successors = float64(rewards), successors_of(window, values, last_value, next_values)
    returns = np.zeros_like(r)
    for env, rows in window.runs():
        run_r, run_successors = r[rows, env], successors[rows, env]
        discounts = window.gammas[env] ** np.arange(len(run_r) + 1)
        mixture = (1 - td_lambda) * td_lambda ** np.arange(len(run_r))
        for i in range(len(run_r)):
            left = len(run_r) - i
            n_step = np.cumsum(discounts[:left] * run_r[i:]) + discounts[1 : left + 1] * run_successors[i:]
            returns[rows.start + i, env] = mixture[: left - 1] @ n_step[:-1] + td_lambda ** (left - 1) * n_step[-1]
    return torch.from_numpy(returns)


def discounted_returns(
    rewards: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    gamma: float | Tensor = 0.99,
) -> Tensor:
    """Discounted returns as the sum of Sutton and Barto 2018, equation 3.8, cut off with a bootstrap.

    ``G[t] = sum_(j < K) gamma^j * r[t + j] + gamma^K * tail``, where K rows of the run are left at t; the tail is 0
    after termination, ``last_value`` at the window's end, else the run's last ``bootstrap_values``.
    """
    window = window_of(rewards, terminated, truncated, valid, gamma)
    r = float64(rewards)
    tails = np.zeros_like(r) if bootstrap_values is None else float64(bootstrap_values).copy()
    tails[-1:] = np.where(window.truncated[-1:], tails[-1:], float64(last_value))
    tails[window.terminated] = 0.0
    returns = np.zeros_like(r)
    for env, rows in window.runs():
        payments = np.append(r[rows, env], tails[rows, env][-1])
        discounts = window.gammas[env] ** np.arange(len(payments))
        returns[rows, env] = [discounts[: len(payments) - i] @ payments[i:] for i in range(len(payments) - 1)]
    return torch.from_numpy(returns)


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
) -> Scan:
    """Accumulating traces, Sutton and Barto 2018, equation 12.5 unrolled.

    ``e[t] = sum_k (gamma * lambda)^k * x[t - k]``, back to the start of the run and the carry before it.
    """
    window = window_of(inputs, terminated, truncated, valid, gamma)
    x = float64(inputs)
    entering = np.zeros(x.shape[1]) if carry is None else float64(carry).copy()
    if previous_done is not None:
        entering[flags_of(previous_done, entering.shape)] = 0.0
    traces, leaving = np.zeros_like(x), entering if len(x) == 0 else np.zeros_like(entering)
    for env, rows in window.runs():
        payments = np.append(entering[env] if rows.start == 0 else 0.0, x[rows, env])
        weights = (window.gammas[env] * trace_lambda) ** np.arange(len(payments))
        traces[rows, env] = [weights[: i + 1] @ payments[i::-1] for i in range(1, len(payments))]
        if rows.stop == len(x) and not (window.terminated[-1, env] or window.truncated[-1, env]):
            leaving[env] = traces[-1, env]
    return Scan(torch.from_numpy(traces), torch.from_numpy(leaving))


def episodic_prefix_sum(
    inputs: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    carry: Tensor | None = None,
    previous_done: Tensor | None = None,
) -> Scan:
    """Sums since the episode began: the traces with a decay of 1."""
    return eligibility_traces(
        inputs,
        terminated,
        truncated,
        valid=valid,
        carry=carry,
        previous_done=previous_done,
        gamma=1.0,
        trace_lambda=1.0,
    )
