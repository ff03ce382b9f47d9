"""Layers of two MLPs side by side: each launch does the same step for both, with bias and activation fused.

The last grid axis is the network, called ``g`` here; what belongs to a network comes in pairs. A layer has K inputs and
N outputs, its weight is ``[N, K]`` as in `torch.nn.Linear`. Products take operands of ``DOT`` (bfloat16 or float32) and
add in float32. Tensor cores cut float32 operands off to tf32, so what is written for a product in that precision is
rounded; what comes from outside is cut off. Sums over rows are split over programs and joined in a fixed order.
"""

# ruff: noqa: SIM102 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportInvalidTypeForm=false
import triton
import triton.language as tl


@triton.jit
def pick(pair, g):
    """What belongs to network ``g``."""
    return tl.where(g == 1, pair[1], pair[0])


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of ``z``."""
    if ACTIVATION == "elu":
        z = tl.where(z > 0, z, tl.exp(z) - 1.0)
    elif ACTIVATION == "tanh":
        z = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
    elif ACTIVATION == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return z


@triton.jit
def slope(h, ACTIVATION: tl.constexpr):
    """The derivative of the activation where its value is ``h``."""
    if ACTIVATION == "elu":
        h = tl.where(h > 0, 1.0, h + 1.0)
    elif ACTIVATION == "tanh":
        h = 1.0 - h * h
    elif ACTIVATION == "relu":
        h = tl.where(h > 0, 1.0, 0.0)
    return h


@triton.jit
def to_tf32(x):
    """The nearest number with 10 bits behind the point, ties away from 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def load_tile(x, stride, row, rows, column, columns, DOT: tl.constexpr):
    """``x[row, column]``, rows ``stride`` apart, 0 outside of ``[rows, columns]``."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=inside, other=0).to(DOT)


@triton.jit
def next_part(x, DOT: tl.constexpr):
    """The nearest bfloat16, as products take it, and what is left."""
    part = x.to(tl.bfloat16)
    return part.to(DOT), x - part.to(tl.float32)


@triton.jit
def add_product(z, left, weight, part_size, n, N, k, K, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """``z + left @ weight[n, k].T``. In ``parts`` a factor is three bfloat16 that sum to it; those of ``weight`` lie
    ``part_size`` apart, since what is taken apart here goes through shared memory once more."""
    if PRECISION == "parts":
        high, rest = next_part(left, DOT)
        middle, rest = next_part(rest, DOT)
        low, rest = next_part(rest, DOT)
        weight_high = tl.trans(load_tile(weight, K, n, N, k, K, DOT))
        weight_middle = tl.trans(load_tile(weight + part_size, K, n, N, k, K, DOT))
        weight_low = tl.trans(load_tile(weight + 2 * part_size, K, n, N, k, K, DOT))
        z = tl.dot(low, weight_high, z)  # the smallest first
        z = tl.dot(middle, weight_middle, z)
        z = tl.dot(high, weight_low, z)
        z = tl.dot(middle, weight_high, z)
        z = tl.dot(high, weight_middle, z)
        z = tl.dot(high, weight_high, z)
    else:
        right = load_tile(weight, K, n, N, k, K, DOT)
        z = tl.dot(left, tl.trans(right), z, input_precision=PRECISION)
    return z


@triton.jit
def layer_kernel(
    inputs, weights, part_size, biases, outputs, output_strides, B, widths, INPUT_STRIDE: tl.constexpr, K: tl.constexpr,
    ACTIVATION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """``outputs = activation(inputs @ weights.T + biases)``."""
    g = tl.program_id(2)
    x, weight, bias, y, N = pick(inputs, g), pick(weights, g), pick(biases, g), pick(outputs, g), pick(widths, g)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        left = load_tile(x, INPUT_STRIDE, row, B, k, K, tl.float32 if PRECISION == "parts" else DOT)
        z = add_product(z, left, weight, part_size, n, N, k, K, DOT, PRECISION)
    z += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[None, :]
    h = activate(z, ACTIVATION)
    if PRECISION == "tf32" and ACTIVATION != "none":
        h = to_tf32(h)
    at = y + row.to(tl.int64)[:, None] * pick(output_strides, g) + n[None, :]
    tl.store(at, h.to(y.dtype.element_ty), mask=(row < B)[:, None] & (n < N)[None, :])


@triton.jit
def input_gradient_kernel(
    gradients, gradient_strides, turned, part_size, values, results, bias_parts, bias_size, bias_starts, B, widths,
    K: tl.constexpr, ACTIVATION: tl.constexpr, MAX_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``results = gradients @ turned.T * slope(values)``: from a layer's sums to those of the layer below, and this
    tile's share of the gradient of that layer's biases, in its row of ``bias_parts``."""
    g = tl.program_id(2)
    dz, weight, h, below = pick(gradients, g), pick(turned, g), pick(values, g), pick(results, g)
    N, stride = pick(widths, g), pick(gradient_strides, g)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gradient = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, MAX_N, STEP):
        n = start + tl.arange(0, STEP)
        left = load_tile(dz, stride, row, B, n, N, tl.float32 if PRECISION == "parts" else DOT)
        gradient = add_product(gradient, left, weight, part_size, k, K, n, N, DOT, PRECISION)
    gradient *= slope(load_tile(h, K, row, B, k, K, tl.float32), ACTIVATION)
    share = bias_parts + tl.program_id(0).to(tl.int64) * bias_size + pick(bias_starts, g)
    tl.store(share + k, tl.sum(gradient, 0), mask=k < K)
    if PRECISION == "tf32":
        gradient = to_tf32(gradient)
    at = below + row.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, gradient.to(below.dtype.element_ty), mask=(row < B)[:, None] & (k < K)[None, :])


@triton.jit
def weight_gradient_kernel(
    gradients, gradient_strides, inputs, parts, part_size, weight_starts, bias_starts, B, widths, rows_of_part,
    INPUT_STRIDE: tl.constexpr, K: tl.constexpr, WITH_BIAS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One part's share of ``gradients.T @ inputs`` and, ``WITH_BIAS``, of the sums of ``gradients``, in its row of
    ``parts``."""
    part = tl.program_id(1)
    g = tl.program_id(2)
    dz, x, N, stride = pick(gradients, g), pick(inputs, g), pick(widths, g), pick(gradient_strides, g)
    tiles = tl.cdiv(K, COLUMNS)
    n = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = part * rows_of_part
    last = tl.minimum(first + rows_of_part, B)
    weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias = tl.zeros([ROWS], tl.float32)
    for start in tl.range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        left = load_tile(dz, stride, row, last, n, N, DOT)
        right = load_tile(x, INPUT_STRIDE, row, last, k, K, DOT)
        weight = tl.dot(tl.trans(left), right, weight, input_precision=PRECISION)
        if WITH_BIAS:
            bias += tl.sum(left.to(tl.float32), 0)
    share = parts + part.to(tl.int64) * part_size
    at = share + pick(weight_starts, g) + n[:, None] * K + k[None, :]
    tl.store(at, weight, mask=(n < N)[:, None] & (k < K)[None, :])
    if WITH_BIAS:
        if tl.program_id(0) % tiles == 0:
            tl.store(share + pick(bias_starts, g) + n, bias, mask=n < N)


@triton.jit
def pack_kernel(
    weights, packed, turned, part_size, starts, widths, depths, COUNT: tl.constexpr, PARTS: tl.constexpr,
    ROUND: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A tile of one weight ``[N, K]`` as products take it, and once more as ``[K, N]``; in ``PARTS`` that sum to it."""
    for i in tl.static_range(COUNT):
        if tl.program_id(1) == i:
            N, K = widths[i], depths[i]
            tiles = tl.cdiv(K, SIDE)
            n = tl.program_id(0) // tiles * SIDE + tl.arange(0, SIDE)
            k = tl.program_id(0) % tiles * SIDE + tl.arange(0, SIDE)
            inside = (n < N)[:, None] & (k < K)[None, :]
            tile = tl.load(weights[i] + n[:, None] * K + k[None, :], mask=inside, other=0)
            if ROUND:
                tile = to_tf32(tile)
            for part in tl.static_range(PARTS):
                kept = tile.to(packed.dtype.element_ty)
                at = part * part_size + starts[i]
                tl.store(packed + at + n[:, None] * K + k[None, :], kept, mask=inside)
                tl.store(turned + at + k[:, None] * N + n[None, :], tl.trans(kept), mask=tl.trans(inside))
                if part + 1 < PARTS:
                    tile -= kept.to(tl.float32)
