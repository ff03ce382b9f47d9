"""The scan under every Triton operation: tiles of runs, one composition, carries from tile to tile.

A program owns a tile of ``S`` runs of ``L`` steps for ``BN`` envs. A run lies in the registers of one thread, so that
most of the recurrence is plain fused multiply-adds and one map per run enters a scan across threads. Time-major and
env-major buffers differ in how a run is loaded and stored, and in nothing else. An operation supplies two functions:
``ROWS`` builds alpha and beta of a tile's rows from the raw inputs, ``RESULTS`` turns a solved row into the outputs.

Runs are handled in scan order (position 0 is solved first), which for the backward operations is reversed time. A tile
is the tuple (first step of each run ``[S, 1]``, envs ``[1, BN]``, T, N).
"""

# ruff: noqa: RUF005, SIM102, SIM108 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from kernels.triton_moments import add_run, store_moments
from kernels.triton_rows import store_run


@triton.jit
def compose(a1, b1, a2, b2):
    """The map ``x -> a2 + b2 * (a1 + b1 * x)``; a second map that cuts (b2 is 0) never reads the first one."""
    cuts = b2 == 0
    return tl.where(cuts, a2, a2 + b2 * a1), tl.where(cuts, b2, b2 * b1)


@triton.jit
def compose_both(a1, b1, c1, d1, a2, b2, c2, d2):
    """`compose` of the maps up to and including a run, and of the maps before it."""
    a, b = compose(a1, b1, a2, b2)
    c, d = compose(a1, b1, c2, d2)
    return a, b, c, d


@triton.jit
def compose_run(alpha, beta, REVERSE: tl.constexpr, L: tl.constexpr):
    """The map of every run, from its rows: ``[S, BN]`` twice."""
    FIRST: tl.constexpr = L - 1 if REVERSE else 0
    a = alpha[FIRST]
    b = beta[FIRST]
    for k in tl.static_range(1, L):
        a, b = compose(a, b, alpha[L - 1 - k if REVERSE else k], beta[L - 1 - k if REVERSE else k])
    return a, b


@triton.jit
def scan_runs(a, b):
    """The map of every run with all runs before it in the tile, and that of only those: ``[S, BN]`` four times."""
    c = tl.zeros_like(a)
    d = c + 1
    if a.shape[0] > 1:
        a, b, c, d = tl.associative_scan((a, b, c, d), 0, compose_both)
    return a, b, c, d


@triton.jit
def last_run(a):
    """The last row of ``[S, BN]``, as ``[1, BN]``; a select, so that no other row's NaN gets in."""
    S: tl.constexpr = a.shape[0]
    last = a
    if S > 1:
        last = tl.sum(tl.where(tl.arange(0, S)[:, None] == S - 1, a, 0), 0)[None, :]
    return last


@triton.jit
def initial_state(inputs, strides, n, N, ACC: tl.constexpr):
    """The carry that a forward operation was given, ``[1, BN]``, or 0."""
    if inputs[4] is None:
        state = tl.zeros(n.shape, ACC)
    else:
        state = tl.load(inputs[4] + n * strides[4][0], mask=n < N, other=0).to(ACC)
    return state


@triton.jit
def store_carry(out, stride, tile, rows, done, L: tl.constexpr):
    """What a forward operation hands to the next window: the final row's state, 0 where that row is done."""
    t0, n, T, N = tile
    for step in tl.static_range(L):
        carry = tl.where(done[step], 0, rows[step][0]).to(out.dtype.element_ty)
        tl.store(out + n * stride[0] + 0 * t0, carry, mask=(t0 + step == T - 1) & (n < N))


@triton.jit
def launch_number(words, tile_index, first_env, N):
    """One more than the number in the tile's words since the launch before; a scalar, so that it is read once."""
    word = tl.load(words + tile_index * N + first_env, volatile=True)
    return ((word >> 32) + 1) & 0xFFFFFFFF


@triton.jit
def to_words(x, launch):
    """The bits of ``x`` in the lower halves of one or two 64-bit words, the launch's number in the upper ones."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        halves = (bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF)
    else:
        halves = (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF,)
    words = ()
    for i in tl.static_range(len(halves)):
        words = words + (halves[i] | (launch << 32),)
    return words


@triton.jit
def from_words(words):
    """The inverse of `to_words`."""
    if len(words) == 2:
        x = ((words[1] << 32) | (words[0] & 0xFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        x = words[0].to(tl.int32).to(tl.float32, bitcast=True)
    return x


@triton.jit
def publish(words, a, b, launch, tile_index, n, N, tiles):
    """Write a tile's map where later tiles find it; every word says by itself whether it is of this launch."""
    map_words = to_words(a, launch) + to_words(b, launch)
    tl.debug_barrier()  # all threads have read the number that the words showed
    for i in tl.static_range(len(map_words)):
        tl.atomic_xchg(words + (i * tiles + tile_index) * N + n, map_words[i], mask=n < N, sem="relaxed")


@triton.jit
def published(words, launch, index, mask, n, N, tiles, ACC: tl.constexpr):
    """The maps that the tiles ``index`` publish, as soon as they are there; no change where not ``mask``.

    The GPU starts programs in the order of their index, and earlier tiles have lower ones, so the wait ends.
    """
    HALVES: tl.constexpr = ACC.primitive_bitwidth // 32
    a = tl.zeros(mask.shape, ACC)
    b = a + 1
    missing = tl.full((), 1, tl.int32)
    while missing > 0:
        map_words = ()
        late = mask & (mask == 0)
        for i in tl.static_range(2 * HALVES):
            word = tl.load(words + (i * tiles + index) * N + n, mask=mask, other=0, volatile=True)
            late = late | (mask & (((word >> 32) & 0xFFFFFFFF) != launch))
            map_words = map_words + (word,)
        a = tl.where(mask, from_words(map_words[:HALVES]), 0)
        b = tl.where(mask, from_words(map_words[HALVES:]), 1)
        missing = tl.sum(tl.sum(late.to(tl.int32), 1), 0)
    return a, b


@triton.jit
def state_before(words, launch, state, tile_index, n, N, tiles, ACC: tl.constexpr, GROUP: tl.constexpr):
    """What enters a tile, ``[1, BN]``: the maps of its group's earlier tiles, applied to what enters the group.

    That is the state which the last tile of the group before has published, as a map that cuts, or else ``state``.
    """
    first = tile_index // GROUP * GROUP
    member = first + tl.arange(0, GROUP)[:, None]
    a, b = published(words, launch, member, (member < tile_index) & (n < N), n, N, tiles, ACC)
    a, b = tl.associative_scan((a, b), 0, compose)
    closing = first - 1 + tl.zeros_like(n)
    entering, cut = published(words, launch, closing, (closing >= 0) & (n < N), n, N, tiles, ACC)
    state, _ = compose(state, 0, entering, cut)
    state, _ = compose(state, 0, last_run(a), last_run(b))
    return state


@triton.jit
def chunk_tile(run, i, n, T, N, REVERSE: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr):
    """The rows of every run that come ``i``-th in scan order, ``L`` at a time."""
    return ((run * CHUNKS + (CHUNKS - 1 - i if REVERSE else i)) * L, n, T, N)


@triton.jit
def finish(
    x, solved, outputs, output_strides, coefficients, moments, stats, RESULTS: tl.constexpr, REVERSE: tl.constexpr,
    L: tl.constexpr, ENV_MAJOR: tl.constexpr, ADVANTAGES: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Solve the rows of a tile for the state ``x`` that enters each run and write their results; returns the states."""
    tile, alpha, beta, valid, kept = solved
    rows = ()
    for k in tl.static_range(L):
        entering = x
        x, _ = compose(entering, 0, alpha[L - 1 - k if REVERSE else k], beta[L - 1 - k if REVERSE else k])
        row = RESULTS(x, entering, kept, coefficients, L - 1 - k if REVERSE else k)
        if REVERSE:
            rows = (row,) + rows
        else:
            rows = rows + (row,)
    if not REVERSE:
        store_carry(outputs[1], output_strides[1], tile, rows, kept, L)
    for o in tl.static_range(len(rows[0])):
        results = ()
        for step in tl.static_range(L):
            results = results + (tl.where(valid[step], rows[step][o], 0),)
        store_run(outputs[o], output_strides[o], tile, results, L, ENV_MAJOR, CACHE)
        if moments is not None and o == ADVANTAGES:
            stats = add_run(stats, results, valid, tile, L)
    return x, stats


@triton.jit
def scan_kernel(
    inputs, outputs, words, moments,
    gamma: tl.float64, c0: tl.float64, c1: tl.float64, c2: tl.float64, c3: tl.float64,
    strides, output_strides, T, N, blocks, tiles,
    ROWS: tl.constexpr, RESULTS: tl.constexpr, REVERSE: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr,
    ENV_MAJOR: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr, A: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
    ALIGN: tl.constexpr, ADVANTAGES: tl.constexpr,
):  # fmt: skip
    """Solve ``BN`` envs tile by tile, or, if time is ``SPLIT``, one tile of them; see the module.

    ``inputs`` are the operation's, then gamma ``[N]`` or None, for which ``gamma`` stands.
    ``words`` ``[2 or 4, tiles, N]`` carry the tiles' maps from program to program, ``GROUP`` tiles together;
    ``moments`` is None or (result ``[3]``, the programs' parts, a counter), of the output with index ``ADVANTAGES``.
    """
    block = tl.program_id(0) % blocks
    first_tile = tl.program_id(0) // blocks
    n = (block * BN + tl.arange(0, BN))[None, :]
    position = tl.arange(0, S)[:, None]
    if WIDE:
        n = n.to(tl.int64)
        position = position.to(tl.int64)
    if inputs[-1] is None:
        gammas = tl.full((1, 1), gamma, ACC)
    else:
        gammas = tl.load(inputs[-1] + n * strides[-1][0], mask=n < N, other=0).to(ACC)
    coefficients = (gammas, tl.full((), c0, ACC), tl.full((), c1, ACC), tl.full((), c2, ACC), tl.full((), c3, ACC))

    state = tl.zeros([1, BN], ACC) if REVERSE else initial_state(inputs, strides, n, N, ACC)
    if SPLIT:
        launch = launch_number(words, first_tile, block * BN, N)
    stats = (tl.full((), 0, ACC), tl.full((), 0, ACC), tl.full((), 0, ACC))
    for step in tl.range(0, 1 if SPLIT else tiles, num_stages=STAGES):
        index = first_tile + step
        run = index * S + position
        if REVERSE:
            run = tiles * S - 1 - run
        if CHUNKS == 1:
            tile = (run * L, n, T, N)
            alpha, beta, valid, kept = ROWS(inputs, strides, tile, coefficients, ACC, L, ENV_MAJOR, A, COUNT, ALIGN)
            a, b = compose_run(alpha, beta, REVERSE, L)
        else:
            a = tl.zeros([S, BN], ACC)
            b = a + 1
            for i in tl.range(CHUNKS):
                tile = chunk_tile(run, i, n, T, N, REVERSE, L, CHUNKS)
                alpha, beta, valid, kept = ROWS(inputs, strides, tile, coefficients, ACC, L, ENV_MAJOR, A, COUNT, ALIGN)
                later_a, later_b = compose_run(alpha, beta, REVERSE, L)
                a, b = compose(a, b, later_a, later_b)
        a, b, c, d = scan_runs(a, b)
        a = last_run(a)
        b = last_run(b)
        if SPLIT:
            closes_group = index % GROUP == GROUP - 1
            if not closes_group:
                publish(words, a, b, launch, index, n, N, tiles)
            state = state_before(words, launch, state, index, n, N, tiles, ACC, GROUP)
        x, _ = compose(state, 0, c, d)
        state, _ = compose(state, 0, a, b)
        if SPLIT:
            if closes_group:
                publish(words, state, tl.zeros_like(state), launch, index, n, N, tiles)
        if CHUNKS == 1:
            solved = (tile, alpha, beta, valid, kept)
            _, stats = finish(
                x, solved, outputs, output_strides, coefficients, moments, stats, RESULTS, REVERSE, L, ENV_MAJOR,
                ADVANTAGES, "",
            )  # fmt: skip
        else:
            for i in tl.range(CHUNKS):
                tile = chunk_tile(run, i, n, T, N, REVERSE, L, CHUNKS)
                alpha, beta, valid, kept = ROWS(inputs, strides, tile, coefficients, ACC, L, ENV_MAJOR, A, COUNT, ALIGN)
                solved = (tile, alpha, beta, valid, kept)
                x, stats = finish(
                    x, solved, outputs, output_strides, coefficients, moments, stats, RESULTS, REVERSE, L, ENV_MAJOR,
                    ADVANTAGES, ".cs",
                )  # fmt: skip
    if moments is not None:
        store_moments(moments, output_strides[-1][0], stats, 1024)
