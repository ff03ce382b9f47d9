"""Count, mean and sum of squared deviations of the advantages, merged pairwise (Chan, Golub and LeVeque 1979)."""

# ruff: noqa: RUF005 (kernel bodies are Triton, not Python)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
import triton
import triton.language as tl


@triton.jit
def merge(count1, mean1, m1, count2, mean2, m2):
    """The moments of two sets together."""
    count = count1 + count2
    share = count2 / tl.maximum(count, 1)
    shift = mean2 - mean1
    return count, mean1 + shift * share, m1 + m2 + shift * shift * share * count1


@triton.jit
def add_run(stats, run, valid, tile, L: tl.constexpr):
    """``stats`` with the valid rows of a tile added; the tile's own mean is subtracted before squaring."""
    t0, n, T, N = tile
    live = ()
    count = tl.zeros_like(run[0])
    total = tl.zeros_like(run[0])
    for step in tl.static_range(L):
        live = live + (valid[step] & (t0 + step < T) & (n < N),)
        count += tl.where(live[step], 1.0, 0.0)
        total += tl.where(live[step], run[step], 0)
    tile_count = tl.sum(tl.sum(count, 1), 0)
    mean = tl.sum(tl.sum(total, 1), 0) / tl.maximum(tile_count, 1)
    squares = tl.zeros_like(run[0])
    for step in tl.static_range(L):
        deviation = tl.where(live[step], run[step] - mean, 0)
        squares += deviation * deviation
    return merge(stats[0], stats[1], stats[2], tile_count, mean, tl.sum(tl.sum(squares, 1), 0))


@triton.jit
def store_moments(moments, stride, stats, BLOCK: tl.constexpr):
    """Write this program's part; the program that comes last merges them all and resets the counter."""
    result, parts, counter = moments
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    for i in tl.static_range(3):
        tl.store(parts + i * programs + program, stats[i])
    tl.debug_barrier()  # the part is written before it is counted
    if tl.atomic_add(counter, 1) == programs - 1:
        count = tl.zeros([BLOCK], parts.dtype.element_ty)
        mean = count
        squares = count
        for start in tl.range(0, programs, BLOCK):
            index = start + tl.arange(0, BLOCK)
            mask = index < programs
            # Volatile, as another program wrote them while this one ran.
            part_count = tl.load(parts + index, mask=mask, other=0, volatile=True)
            part_mean = tl.load(parts + programs + index, mask=mask, other=0, volatile=True)
            part_squares = tl.load(parts + 2 * programs + index, mask=mask, other=0, volatile=True)
            count, mean, squares = merge(count, mean, squares, part_count, part_mean, part_squares)
        total = tl.sum(count, 0)
        overall = tl.sum(count * mean, 0) / tl.maximum(total, 1)
        deviation = mean - overall
        tl.store(result, total)
        tl.store(result + stride, overall)
        tl.store(result + 2 * stride, tl.sum(squares + count * deviation * deviation, 0))
        tl.store(counter, 0)
