"""Retrace(lambda), from given expectations and ratios or from the Q values and log-probabilities of every action."""

# ruff: noqa: RUF005 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from kernels.triton_rows import load_ends, load_floats, load_row, load_run, successors
from kernels.triton_vtrace import clipped


@triton.jit
def retrace_coefficients(rewards, q_taken, following, log_rhos, ends, coefficients, L: tl.constexpr):
    """alpha and beta of the state ``Qret - q``; ``log_rhos`` holds L + 1 rows, the last one of the run after."""
    terminated, _, valid, closing = ends
    gamma, trace_lambda, c_bar, _, _ = coefficients
    alpha = ()
    beta = ()
    for step in tl.static_range(L):
        delta = rewards[step] + tl.where(terminated[step], 0, gamma * following[step]) - q_taken[step]
        alpha = alpha + (tl.where(valid[step], delta, 0),)
        beta = beta + (tl.where(closing[step], 0, gamma * trace_lambda * clipped(tl.exp(log_rhos[step + 1]), c_bar)),)
    return alpha, beta, valid, q_taken


@triton.jit
def retrace_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs``: rewards, q_taken, expected_q, log_rhos, last_expected_q, flags, next_expected_q."""
    rewards = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    q_taken = load_floats(inputs[1], strides[1], tile, ACC, L, ENV_MAJOR)
    log_rhos = load_floats(inputs[3], strides[3], tile, ACC, L, ENV_MAJOR)
    log_rhos = log_rhos + (load_row(inputs[3], strides[3], tile, L, 0).to(ACC),)
    if inputs[8] is None:
        expected = load_floats(inputs[2], strides[2], tile, ACC, L, ENV_MAJOR)
        following = successors(expected, inputs[2], strides[2], inputs[4], strides[4], tile, ACC, L)
    else:
        following = load_floats(inputs[8], strides[8], tile, ACC, L, ENV_MAJOR)
    ends = load_ends(inputs, strides, 5, tile, L, ENV_MAJOR)
    return retrace_coefficients(rewards, q_taken, following, log_rhos, ends, coefficients, L)


@triton.jit
def row_of_actions(
    q, policy, strides, tile, action, step: tl.constexpr, ACC: tl.constexpr, A: tl.constexpr, COUNT: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """``sum_a exp(policy[a]) * q[a]``, and Q and log-probability of ``action``, in row ``step`` of every run.

    Actions are read ``A`` at a time, as they lie, and the one taken is picked on chip. Probability 0 counts nothing
    whatever its Q; an ``action`` below 0 has NaN. ``ALIGN`` divides the offset of a row and the number of actions,
    ``COUNT``.
    """
    t0, n, T, N = tile
    S: tl.constexpr = t0.shape[0]
    BN: tl.constexpr = n.shape[1]
    t = t0 + step
    column = tl.arange(0, BN * A)[None, :]  # actions beside envs: Triton then reads along the row, not along time
    env = tl.min(n, 1)[:, None] + column // A
    q_row = tl.multiple_of(t * strides[1][0] + env * strides[1][1], [1, ALIGN])
    policy_row = tl.multiple_of(t * strides[2][0] + env * strides[2][1], [1, ALIGN])
    expected = tl.zeros([S, BN], ACC)
    q_taken = tl.where(action < 0, float("nan"), expected)
    log_prob = q_taken
    for start in tl.range(0, COUNT, A):
        mask = (t < T) & (env < N)
        if COUNT % A != 0:
            mask = mask & (start + column % A < COUNT)
        place = (start + column % A).to(t.dtype)  # as wide as the offsets along time and envs
        log_probs = tl.load(policy + policy_row + place * strides[2][2], mask, float("-inf"))
        log_probs = tl.reshape(log_probs.to(ACC), [S, BN, A])
        values = tl.reshape(tl.load(q + q_row + place * strides[1][2], mask, 0).to(ACC), [S, BN, A])
        probability = tl.exp(log_probs)
        taken = start + tl.arange(0, A)[None, None, :] == action[:, :, None]
        expected += tl.sum(tl.where(probability == 0, 0, probability * values), 2)
        q_taken += tl.sum(tl.where(taken, values, 0), 2)
        log_prob += tl.sum(tl.where(taken, log_probs, 0), 2)
    return expected, q_taken, log_prob


@triton.jit
def retrace_categorical_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs``: rewards, q_values, policy, behaviour, actions, last_expected_q, flags, next_expected_q."""
    t0, n, T, N = tile
    rewards = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    behaviour = load_floats(inputs[3], strides[3], tile, ACC, L, ENV_MAJOR)
    behaviour = behaviour + (load_row(inputs[3], strides[3], tile, L, 0).to(ACC),)
    actions = load_run(inputs[4], strides[4], tile, L, ENV_MAJOR)
    actions = actions + (load_row(inputs[4], strides[4], tile, L, 0),)
    expected = ()
    q_taken = ()
    log_rhos = ()
    for step in tl.static_range(L + 1):
        allowed = (actions[step] >= 0) & (actions[step] < COUNT)
        action = tl.where(allowed, actions[step], -1).to(tl.int32)
        row = row_of_actions(inputs[1], inputs[2], strides, tile, action, step, ACC, A, COUNT, ALIGN)
        expected = expected + (row[0],)
        q_taken = q_taken + (row[1],)
        log_rhos = log_rhos + (row[2] - behaviour[step],)
    if inputs[9] is None:
        final = tl.load(inputs[5] + n * strides[5][0], mask=n < N, other=0).to(ACC)
        following = ()
        for step in tl.static_range(1, L + 1):
            following = following + (tl.where(t0 + step == T, final, expected[step]),)
    else:
        following = load_floats(inputs[9], strides[9], tile, ACC, L, ENV_MAJOR)
    ends = load_ends(inputs, strides, 6, tile, L, ENV_MAJOR)
    return retrace_coefficients(rewards, q_taken, following, log_rhos, ends, coefficients, L)


@triton.jit
def retrace_results(x, entering, q_taken, coefficients, step: tl.constexpr):
    """The Q targets of row ``step``."""
    return (q_taken[step] + x,)
