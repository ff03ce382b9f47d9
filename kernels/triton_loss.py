"""The kernels of the two policy losses: one pass that sums, a tiny one that joins the sums, one for the gradients.

A program owns a tile of ``BLOCK`` rows and all their columns (actions, padded to a power of two). Forward and backward
build a row's terms by the same functions; nothing but sums and gradients is written. Sums are joined in a fixed order,
so that equal inputs give equal bits. ``inputs`` are those of `kernels.loss_inputs.LossInputs`, in its order.
"""

# ruff: noqa: RUF005, SIM102 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportInvalidTypeForm=false
import triton
import triton.language as tl

from kernels.triton_moments import merge

#: Sums of a program: KL, clipped rows, policy, squared error, entropy, then five moments.
PARTS = tl.constexpr(10)
HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@triton.jit
def number(x):
    """A coefficient: a float, or what a scalar tensor holds now."""
    value = x
    if not isinstance(x, float):  # which it is in the interpreter only
        if x.dtype.is_ptr():
            value = tl.load(x).to(tl.float32)
    return value


@triton.jit
def load_rows(inputs, strides, B, BLOCK: tl.constexpr):
    """Rows of this program, the rollout's rows that they come from, and which of them count."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < B
    source = row
    if inputs.indices is not None:
        source = tl.load(inputs.indices + row * strides.indices[0], mask=inside, other=0).to(tl.int64)
    live = inside
    if inputs.valid is not None:
        live = inside & (tl.load(inputs.valid + source * strides.valid[0], mask=inside, other=0) != 0)
    return row, inside, source, live


@triton.jit
def load_field(x, stride, row, live):
    """One number for each row, 0 where it does not count."""
    return tl.load(x + row * stride[0], mask=live, other=0).to(tl.float32)


@triton.jit
def gaussian(outputs, actions, log_std, column, A: tl.constexpr):
    """Log-density, entropy, and the slopes of the log-density in mean and log-std."""
    inverse = tl.exp(-log_std)[None, :]
    standardized = (actions - outputs) * inverse
    terms = -0.5 * standardized * standardized - log_std[None, :] - HALF_LOG_2PI
    log_prob = tl.sum(tl.where(column[None, :] < A, terms, 0.0), 1)
    entropy = tl.sum(tl.where(column < A, log_std + (0.5 + HALF_LOG_2PI), 0.0), 0)
    return log_prob, entropy, standardized * inverse, standardized * standardized - 1.0


@triton.jit
def categorical(outputs, actions, column, A: tl.constexpr):
    """Log-probability, entropy, and the slopes of both in the logits; an action that does not exist gives NaN."""
    logits = tl.where(column[None, :] < A, outputs, -float("inf"))
    shifted = logits - tl.max(logits, 1)[:, None]
    log_probs = shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    probs = tl.exp(log_probs)
    bounded = tl.maximum(log_probs, -3.0e38)  # a probability of 0 meets a finite number: 0 * -inf would be NaN
    taken = column[None, :] == actions[:, None]
    log_prob = tl.sum(tl.where(taken, log_probs, 0.0), 1)
    log_prob = tl.where((actions >= 0) & (actions < A), log_prob, float("nan"))
    entropy = -tl.sum(probs * bounded, 1)
    return log_prob, entropy, tl.where(taken, 1.0, 0.0) - probs, -probs * (bounded + entropy[:, None])


@triton.jit
def distribution(
    inputs, strides, row, source, live, A: tl.constexpr, COLUMNS: tl.constexpr, OUTPUT_ROW: tl.constexpr,
    ACTION_ROW: tl.constexpr,
):  # fmt: skip
    """Log-probability and entropy of each row, and two matrices of slopes, see `gaussian` and `categorical`."""
    column = tl.arange(0, COLUMNS)
    place = column.to(tl.int64)  # as wide as the rows: columns may lie far apart
    cell = live[:, None] & (column < A)[None, :]
    at = inputs.policy_outputs + row[:, None] * OUTPUT_ROW + place[None, :] * strides.policy_outputs[1]
    outputs = tl.load(at, mask=cell, other=0).to(tl.float32)
    if inputs.log_std is not None:
        at = inputs.actions + source[:, None] * ACTION_ROW + place[None, :] * strides.actions[1]
        actions = tl.load(at, mask=cell, other=0).to(tl.float32)
        log_std = tl.load(inputs.log_std + place * strides.log_std[0], mask=column < A, other=0).to(tl.float32)
        scores = gaussian(outputs, actions, log_std, column, A)
    else:
        actions = tl.load(inputs.actions + source * ACTION_ROW, mask=live, other=0)
        scores = categorical(outputs, actions, column, A)
    return scores


@triton.jit
def load_advantages(inputs, strides, source, live):
    """Advantages, standardized where their moments are given."""
    advantages = load_field(inputs.advantages, strides.advantages, source, live)
    if inputs.advantage_moments is not None:
        count = tl.load(inputs.advantage_moments).to(tl.float32)
        mean = tl.load(inputs.advantage_moments + strides.advantage_moments[0]).to(tl.float32)
        squares = tl.load(inputs.advantage_moments + 2 * strides.advantage_moments[0]).to(tl.float32)
        std = tl.sqrt(squares / tl.maximum(count, 1.0))
        # a NaN is not constant: it goes on, to be seen
        standardized = tl.where(std <= 1e-6 * tl.abs(mean), 0.0, (advantages - mean) / (std + 1e-8))
        advantages = tl.where(live, standardized, 0.0)
    return advantages


@triton.jit
def exp_excess(x):
    """``exp(x) - 1 - x``, by its series where the difference would cancel."""
    series = 1.0 + x / 5.0 * (1.0 + x / 6.0 * (1.0 + x / 7.0))
    series = 0.5 * x * x * (1.0 + x / 3.0 * (1.0 + x / 4.0 * series))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1.0 - x)


@triton.jit
def policy_terms(inputs, strides, log_prob, advantages, source, live, clip_range):
    """Policy loss, its slope in the log-probability, KL estimate, and whether the ratio left the range."""
    if inputs.old_log_probs is None:
        loss = tl.where(live, -advantages * log_prob, 0.0)
        slope = -advantages
        kl = tl.zeros_like(loss)
        left = tl.zeros_like(loss)
    else:
        log_ratio = tl.where(
            live, log_prob - load_field(inputs.old_log_probs, strides.old_log_probs, source, live), 0.0
        )
        ratio = tl.exp(log_ratio)
        low = 1.0 - clip_range
        high = 1.0 + clip_range
        outside = (ratio < low) | (ratio > high)
        plain = ratio * advantages
        clipped = tl.minimum(tl.maximum(ratio, low), high) * advantages
        loss = -tl.where(plain > clipped, clipped, plain)
        # equal terms share the gradient, as torch.minimum does; the clipped one passes it within the range only
        share = tl.where((plain == clipped) & outside, 0.5, 1.0)
        slope = tl.where(plain > clipped, 0.0, -plain * share)
        kl = exp_excess(log_ratio)
        left = tl.where(tl.abs(ratio - 1.0) > clip_range, 1.0, 0.0)
    return loss, slope, kl, left


@triton.jit
def value_terms(inputs, strides, values, targets, source, live, clip_range):
    """The larger squared error and its halved slope in the value."""
    error = values - targets
    squared = error * error
    slope = error
    if inputs.old_values is not None:
        old = load_field(inputs.old_values, strides.old_values, source, live)
        step = values - old
        clipped = old + tl.minimum(tl.maximum(step, -clip_range), clip_range) - targets
        clipped_slope = tl.where(tl.abs(step) <= clip_range, clipped, 0.0)
        plain = squared
        squared = tl.maximum(plain, clipped * clipped, propagate_nan=tl.PropagateNan.ALL)
        tie = 0.5 * (error + clipped_slope)
        slope = tl.where(plain < clipped * clipped, clipped_slope, tl.where(plain == clipped * clipped, tie, error))
    return squared, slope


@triton.jit
def block_moments(x, live, count):
    """Mean and sum of squared deviations of the rows that count."""
    mean = tl.sum(tl.where(live, x, 0.0), 0) / tl.maximum(count, 1.0)
    deviation = tl.where(live, x - mean, 0.0)
    return mean, tl.sum(deviation * deviation, 0)


@triton.jit
def forward_kernel(
    inputs, strides, clip_range, value_clip_range, parts, B, A: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, OUTPUT_ROW: tl.constexpr, ACTION_ROW: tl.constexpr,
):  # fmt: skip
    """Column ``program`` of ``parts`` ``[PARTS, programs]``: this tile's sums and moments."""
    row, _, source, live = load_rows(inputs, strides, B, BLOCK)
    log_prob, entropy, _, _ = distribution(inputs, strides, row, source, live, A, COLUMNS, OUTPUT_ROW, ACTION_ROW)
    advantages = load_advantages(inputs, strides, source, live)
    policy, _, kl, left = policy_terms(inputs, strides, log_prob, advantages, source, live, number(clip_range))
    values = load_field(inputs.state_values, strides.state_values, row, live)
    targets = load_field(inputs.value_targets, strides.value_targets, source, live)
    squared, _ = value_terms(inputs, strides, values, targets, source, live, number(value_clip_range))

    count = tl.sum(tl.where(live, 1.0, 0.0), 0)
    sums = (
        tl.sum(kl, 0), tl.sum(left, 0), tl.sum(policy, 0), tl.sum(squared, 0), tl.sum(tl.where(live, entropy, 0.0), 0),
        count,
    )  # fmt: skip
    sums = sums + block_moments(targets, live, count) + block_moments(targets - values, live, count)
    for i in tl.static_range(PARTS):
        tl.store(parts + i * tl.num_programs(0) + tl.program_id(0), sums[i])


@triton.jit
def overall(count, mean, squares):
    """Mean and variance of many parts' rows together."""
    total = tl.maximum(tl.sum(count, 0), 1.0)
    joined = tl.sum(count * mean, 0) / total
    deviation = mean - joined
    return joined, tl.sum(squares + count * deviation * deviation, 0) / total


@triton.jit
def finish_kernel(parts, programs, given_count, value_coef, entropy_coef, total, report, BLOCK: tl.constexpr):
    """Join the parts of all programs; write the loss and the report."""
    zero = tl.zeros([BLOCK], tl.float32)
    sums = (zero, zero, zero, zero, zero)
    count = zero
    target = (zero, zero)
    residual = (zero, zero)
    for start in tl.range(0, programs, BLOCK):
        at = parts + start + tl.arange(0, BLOCK)
        mask = start + tl.arange(0, BLOCK) < programs
        part = ()
        for i in tl.static_range(PARTS):
            part = part + (tl.load(at + i * programs, mask=mask, other=0),)
        sums = (sums[0] + part[0], sums[1] + part[1], sums[2] + part[2], sums[3] + part[3], sums[4] + part[4])
        _, target_mean, target_squares = merge(count, target[0], target[1], part[5], part[6], part[7])
        count, residual_mean, residual_squares = merge(count, residual[0], residual[1], part[5], part[8], part[9])
        target = (target_mean, target_squares)
        residual = (residual_mean, residual_squares)

    divisor = tl.sum(count, 0)
    if given_count is not None:
        divisor = tl.load(given_count).to(tl.float32)
    scale = 1.0 / tl.maximum(divisor, 1.0)
    policy = tl.sum(sums[2], 0) * scale
    value = 0.5 * tl.sum(sums[3], 0) * scale
    entropy = tl.sum(sums[4], 0) * scale
    loss = policy + number(value_coef) * value - number(entropy_coef) * entropy
    mean, variance = overall(count, target[0], target[1])
    _, unexplained = overall(count, residual[0], residual[1])
    explained = tl.where(tl.sqrt(variance) <= 1e-6 * tl.abs(mean), 0.0, 1.0 - unexplained / variance)
    tl.store(total, loss)
    results = (
        tl.sum(sums[0], 0) * scale, tl.sum(sums[1], 0) * scale, loss, policy, value, entropy, explained, divisor,
    )  # fmt: skip
    for i in tl.static_range(8):
        tl.store(report + i, results[i])


@triton.jit
def backward_kernel(
    inputs, strides, clip_range, value_clip_range, value_coef, entropy_coef, gradient, count, output_gradients,
    value_gradients, log_std_parts, B, A: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    OUTPUT_ROW: tl.constexpr, ACTION_ROW: tl.constexpr,
):  # fmt: skip
    """Gradients of this tile's rows, contiguous; its share of the log-std's in a column of
    ``[A, programs]``."""
    row, inside, source, live = load_rows(inputs, strides, B, BLOCK)
    log_prob, _, slopes, other_slopes = distribution(
        inputs, strides, row, source, live, A, COLUMNS, OUTPUT_ROW, ACTION_ROW
    )  # fmt: skip
    advantages = load_advantages(inputs, strides, source, live)
    _, policy_slope, _, _ = policy_terms(inputs, strides, log_prob, advantages, source, live, number(clip_range))
    values = load_field(inputs.state_values, strides.state_values, row, live)
    targets = load_field(inputs.value_targets, strides.value_targets, source, live)
    _, value_slope = value_terms(inputs, strides, values, targets, source, live, number(value_clip_range))

    scale = tl.load(gradient).to(tl.float32) / tl.maximum(tl.load(count), 1.0)
    value_gradient = tl.where(live, scale * number(value_coef) * value_slope, 0.0)
    tl.store(value_gradients + row, value_gradient.to(value_gradients.dtype.element_ty), mask=inside)

    column = tl.arange(0, COLUMNS)
    log_prob_gradient = (scale * policy_slope)[:, None]
    entropy_gradient = -scale * number(entropy_coef)
    gradients = log_prob_gradient * slopes
    if inputs.log_std is None:
        gradients += entropy_gradient * other_slopes
    else:
        shares = tl.where(live[:, None], log_prob_gradient * other_slopes + entropy_gradient, 0.0)
        at = log_std_parts + column.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(at, tl.sum(shares, 0), mask=column < A)
    gradients = tl.where(live[:, None], gradients, 0.0).to(output_gradients.dtype.element_ty)
    at = output_gradients + row[:, None] * A + column[None, :]
    tl.store(at, gradients, mask=inside[:, None] & (column < A)[None, :])
