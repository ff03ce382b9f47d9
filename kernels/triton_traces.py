"""The forward scans, eligibility traces and episodic prefix sums: the coefficients of a tile."""

# ruff: noqa: RUF005, RUF059 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from kernels.triton_rows import load_flags, load_floats, load_row


@triton.jit
def trace_rows(
    inputs, strides, tile, coefficients, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr, A: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``inputs``: inputs, flags, carry, previous_done; a row is cut by the done of the row before it."""
    t0, n, T, N = tile
    x = load_floats(inputs[0], strides[0], tile, ACC, L, ENV_MAJOR)
    valid = load_flags(inputs[3], strides[3], tile, True, L, ENV_MAJOR)
    terminated = load_flags(inputs[1], strides[1], tile, False, L, ENV_MAJOR)
    truncated = load_flags(inputs[2], strides[2], tile, False, L, ENV_MAJOR)
    before = load_row(inputs[1], strides[1], tile, -1, 0) != 0
    if inputs[2] is not None:
        before = before | (load_row(inputs[2], strides[2], tile, -1, 0) != 0)
    if inputs[5] is not None:
        before = before | ((t0 == 0) & (tl.load(inputs[5] + n * strides[5][0], mask=n < N, other=0) != 0))
    decay = coefficients[0] * coefficients[1]
    alpha = ()
    beta = ()
    done = ()
    for step in tl.static_range(L):
        starting = (before if step == 0 else terminated[step - 1] | truncated[step - 1]) | (valid[step] == 0)
        alpha = alpha + (tl.where(valid[step], x[step], 0),)
        beta = beta + (tl.where(starting, 0, decay),)
        done = done + (terminated[step] | truncated[step],)
    return alpha, beta, valid, done
