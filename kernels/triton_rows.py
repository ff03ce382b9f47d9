"""Rows of a tile: how the runs of a rollout are loaded and stored in either layout, and its flags.

A tile is the tuple (first step of each run ``[S, 1]``, envs ``[1, BN]``, T, N); a run of it is a tuple of ``L`` steps,
each ``[S, BN]``.
"""

# ruff: noqa: RUF005, RUF059, B007 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl


@triton.jit
def unzip(x, L: tl.constexpr):
    """Split ``[S, BN, L]`` into the ``L`` steps of a run, each ``[S, BN]``."""
    run = ()
    if L == 1:
        run = (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], L // 2, 2]))
        evens = unzip(even, L // 2)
        odds = unzip(odd, L // 2)
        for i in tl.static_range(L // 2):
            run = run + (evens[i], odds[i])
    return run


@triton.jit
def join_run(run, L: tl.constexpr):
    """Join the ``L`` steps of a run to ``[S, BN, L]``, the inverse of `unzip`."""
    if L == 1:
        x = run[0][:, :, None]
    else:
        pairs = tl.join(join_run(run[::2], L // 2), join_run(run[1::2], L // 2))
        x = tl.reshape(pairs, [run[0].shape[0], run[0].shape[1], L])
    return x


@triton.jit
def load_row(x, stride, tile, step: tl.constexpr, other):
    """Row ``step`` of every run, ``other`` outside of the rollout; -1 and L are rows of the neighbouring runs."""
    t0, n, T, N = tile
    t = t0 + step
    return tl.load(x + t * stride[0] + n * stride[1], mask=(t >= 0) & (t < T) & (n < N), other=other)


@triton.jit
def load_run(x, stride, tile, L: tl.constexpr, ENV_MAJOR: tl.constexpr):
    """The ``L`` rows of every run; 0 outside of the rollout."""
    t0, n, T, N = tile
    run = ()
    if ENV_MAJOR:
        t = t0[:, :, None] + tl.arange(0, L)[None, None, :]
        wide = tl.load(x + t * stride[0] + n[:, :, None] * stride[1], mask=(t < T) & (n < N)[:, :, None], other=0)
        run = unzip(wide, L)
    else:
        for step in tl.static_range(L):
            t = t0 + step
            run = run + (tl.load(x + t * stride[0] + n * stride[1], mask=(t < T) & (n < N), other=0),)
    return run


@triton.jit
def store_run(x, stride, tile, run, L: tl.constexpr, ENV_MAJOR: tl.constexpr, CACHE: tl.constexpr):
    """Write the ``L`` rows of every run, in the dtype of ``x``; ``CACHE`` ".cs" keeps what was read in the caches."""
    t0, n, T, N = tile
    if ENV_MAJOR:
        t = t0[:, :, None] + tl.arange(0, L)[None, None, :]
        wide = join_run(run, L).to(x.dtype.element_ty)
        tl.store(
            x + t * stride[0] + n[:, :, None] * stride[1], wide, (t < T) & (n < N)[:, :, None], cache_modifier=CACHE
        )
    else:
        for step in tl.static_range(L):
            t = t0 + step
            row = run[step].to(x.dtype.element_ty)
            tl.store(x + t * stride[0] + n * stride[1], row, (t < T) & (n < N), cache_modifier=CACHE)


@triton.jit
def load_floats(x, stride, tile, ACC: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr):
    """`load_run` in the dtype of the sums."""
    raw = load_run(x, stride, tile, L, ENV_MAJOR)
    run = ()
    for step in tl.static_range(L):
        run = run + (raw[step].to(ACC),)
    return run


@triton.jit
def load_flags(x, stride, tile, default: tl.constexpr, L: tl.constexpr, ENV_MAJOR: tl.constexpr):
    """`load_run` of flags, any nonzero is true; ``default`` everywhere if there are none."""
    run = ()
    if x is None:
        t0, n, T, N = tile
        for step in tl.static_range(L):
            run = run + ((t0 + n) * 0 == (0 if default else 1),)
    else:
        raw = load_run(x, stride, tile, L, ENV_MAJOR)
        for step in tl.static_range(L):
            run = run + (raw[step] != 0,)
    return run


@triton.jit
def successors(run, x, stride, last, last_stride, tile, ACC: tl.constexpr, L: tl.constexpr):
    """The value one row later for every row of ``run``, ``last`` ``[N]`` after the final row."""
    t0, n, T, N = tile
    final = tl.load(last + n * last_stride[0], mask=n < N, other=0).to(ACC)
    shifted = ()
    for step in tl.static_range(L - 1):
        shifted = shifted + (tl.where(t0 + step == T - 1, final, run[step + 1]),)
    return shifted + (tl.where(t0 + (L - 1) == T - 1, final, load_row(x, stride, tile, L, 0).to(ACC)),)


@triton.jit
def load_ends(inputs, strides, FIRST: tl.constexpr, tile, L: tl.constexpr, ENV_MAJOR: tl.constexpr):
    """Flags of the backward operations: terminated, truncated, valid, and ``closing``, where the trace ends.

    ``FIRST`` is the index of ``terminated``; ``truncated`` and ``valid`` follow it.
    """
    t0, n, T, N = tile
    terminated = load_flags(inputs[FIRST], strides[FIRST], tile, False, L, ENV_MAJOR)
    truncated = load_flags(inputs[FIRST + 1], strides[FIRST + 1], tile, False, L, ENV_MAJOR)
    valid = load_flags(inputs[FIRST + 2], strides[FIRST + 2], tile, True, L, ENV_MAJOR)
    following = valid[1:]
    if inputs[FIRST + 2] is None:
        following = following + (valid[0],)
    else:
        following = following + (load_row(inputs[FIRST + 2], strides[FIRST + 2], tile, L, 0) != 0,)
    closing = ()
    for step in tl.static_range(L):
        ends = terminated[step] | truncated[step] | (t0 + step >= T - 1)
        closing = closing + (ends | (valid[step] == 0) | (following[step] == 0),)
    return terminated, truncated, valid, closing
