"""V-trace: the coefficients of a tile, and value targets and policy-gradient advantages of a solved row."""

# ruff: noqa: RUF005 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from kernels.triton_gae import load_values
from kernels.triton_rows import load_ends, load_floats


@triton.jit
def clipped(ratio, bar):
    """``min(ratio, bar)``; a NaN ratio stays NaN."""
    return tl.minimum(ratio, bar, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def vtrace_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs``: behaviour and target log-probs, then those of GAE; the state is ``vs - V``."""
    behaviour = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    target = load_floats(inputs[1], strides[1], tile, ACC, L, ENV_MAJOR)
    rewards = load_floats(inputs[2], strides[2], tile, ACC, L, ENV_MAJOR)
    values, later, following = load_values(inputs, strides, 3, tile, ACC, L, ENV_MAJOR)
    terminated, _, valid, closing = load_ends(inputs, strides, 5, tile, L, ENV_MAJOR)
    gamma, trace_lambda, rho_bar, c_bar, pg_rho_bar = coefficients
    alpha = ()
    beta = ()
    ratios = ()
    for step in tl.static_range(L):
        ratio = tl.exp(target[step] - behaviour[step])
        delta = rewards[step] + tl.where(terminated[step], 0, gamma * following[step]) - values[step]
        alpha = alpha + (tl.where(valid[step], clipped(ratio, rho_bar) * delta, 0),)
        beta = beta + (tl.where(closing[step], 0, gamma * trace_lambda * clipped(ratio, c_bar)),)
        ratios = ratios + (clipped(ratio, pg_rho_bar),)
    return alpha, beta, valid, (ratios, rewards, values, later, following, terminated, closing)


@triton.jit
def vtrace_results(x, entering, kept, coefficients, step: tl.constexpr):
    """Value targets and policy-gradient advantages of row ``step``, from ``vs - V`` there and one row later."""
    ratios, rewards, values, later, following, terminated, closing = kept
    target_later = tl.where(closing[step], following[step], later[step] + entering)
    delta = rewards[step] + tl.where(terminated[step], 0, coefficients[0] * target_later) - values[step]
    return values[step] + x, ratios[step] * delta
