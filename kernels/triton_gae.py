"""Generalized advantage estimation: the coefficients of a tile, and advantages and value targets of a solved row."""

# ruff: noqa: RUF005 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from kernels.triton_rows import load_ends, load_floats, successors


@triton.jit
def load_values(inputs, strides, V: tl.constexpr, tile, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr):
    """V, V one row later, and V of the true successor; ``V`` is the index of ``values``, ``V + 1`` that of the last."""
    values = load_floats(inputs[V], strides[V], tile, ACC, L, ENV_MAJOR)
    later = successors(values, inputs[V], strides[V], inputs[V + 1], strides[V + 1], tile, ACC, L)
    following = later
    if inputs[V + 5] is not None:
        following = load_floats(inputs[V + 5], strides[V + 5], tile, ACC, L, ENV_MAJOR)
    return values, later, following


@triton.jit
def gae_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs``: rewards, values, last_value, terminated, truncated, valid, next_values."""
    rewards = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    values, _, following = load_values(inputs, strides, 1, tile, ACC, L, ENV_MAJOR)
    terminated, _, valid, closing = load_ends(inputs, strides, 3, tile, L, ENV_MAJOR)
    gamma = coefficients[0]
    decay = gamma * coefficients[1]
    alpha = ()
    beta = ()
    for step in tl.static_range(L):
        delta = rewards[step] + tl.where(terminated[step], 0, gamma * following[step]) - values[step]
        alpha = alpha + (tl.where(valid[step], delta, 0),)
        beta = beta + (tl.where(closing[step], 0, decay),)
    return alpha, beta, valid, values


@triton.jit
def gae_results(advantage, entering, values, coefficients, step: tl.constexpr):
    """Advantages and value targets of row ``step``."""
    return advantage, advantage + values[step]
