"""TD(lambda) and discounted returns: the coefficients of a tile; the solved state is the result."""

# ruff: noqa: RUF005 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from kernels.triton_gae import load_values
from kernels.triton_rows import load_ends, load_floats


@triton.jit
def td_lambda_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs`` are those of GAE; where the trace ends, the whole weight is on V of the successor."""
    rewards = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    _, _, following = load_values(inputs, strides, 1, tile, ACC, L, ENV_MAJOR)
    terminated, _, valid, closing = load_ends(inputs, strides, 3, tile, L, ENV_MAJOR)
    gamma = coefficients[0]
    trace_lambda = coefficients[1]
    alpha = ()
    beta = ()
    for step in tl.static_range(L):
        weight = tl.where(closing[step], 1, 1 - trace_lambda)
        target = rewards[step] + tl.where(terminated[step], 0, gamma * (weight * following[step]))
        alpha = alpha + (tl.where(valid[step], target, 0),)
        beta = beta + (tl.where(closing[step], 0, gamma * trace_lambda),)
    return alpha, beta, valid, alpha


@triton.jit
def discounted_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs``: rewards, last_value, terminated, truncated, valid, bootstrap_values."""
    t0, n, T, N = tile
    rewards = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    final = tl.load(inputs[1] + n * strides[1][0], mask=n < N, other=0).to(ACC)
    terminated, truncated, valid, closing = load_ends(inputs, strides, 2, tile, L, ENV_MAJOR)
    bootstraps = rewards
    if inputs[5] is not None:
        bootstraps = load_floats(inputs[5], strides[5], tile, ACC, L, ENV_MAJOR)
    gamma = coefficients[0]
    alpha = ()
    beta = ()
    for step in tl.static_range(L):
        tail = tl.zeros_like(rewards[step]) if inputs[5] is None else bootstraps[step]
        tail = tl.where((t0 + step == T - 1) & (truncated[step] == 0), final, tail)
        target = rewards[step] + tl.where(closing[step] & (terminated[step] == 0), gamma * tail, 0)
        alpha = alpha + (tl.where(valid[step], target, 0),)
        beta = beta + (tl.where(closing[step], 0, gamma),)
    return alpha, beta, valid, alpha


@triton.jit
def state_results(x, entering, kept, coefficients, step: tl.constexpr):
    """The state itself."""
    return (x,)
