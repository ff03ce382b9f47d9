"""Time the credit operations on this GPU and append every figure to docs/results/credit.csv.

    python scripts/bench_credit.py --preset full      # all operations, both layouts, baselines: 8 minutes
    python scripts/bench_credit.py --sections torch   # the torch baselines beside the kernels
    python scripts/bench_credit.py --preset quick     # GAE only
    python scripts/bench_credit.py --tune --operations gae vtrace

A figure is reported only where the outputs agree with the float64 reference. Device time is one call's share of a CUDA
graph of 20 calls on the same tensors (``hot``: what fits stays in L2), or of a graph that goes through more tensors
than L2 holds (``cold``). ``copy`` is a device-to-device copy of the same bytes, timed the same way in the same run.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config as inductor

# so that a checkout runs without being installed
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from kernels import reference
from scripts.credit_report import draw, summarize
from scripts.credit_sections import SECTIONS, Section, sections
from scripts.credit_timing import (
    BY_NAME,
    Problem,
    as_tuple,
    cold_times,
    copy_call,
    host_time,
    hot_times,
    moved_bytes,
    quantiles,
    synchronized_time,
)
from scripts.provenance import append_rows, need_cuda, provenance
from scripts.tune_credit import compile_tiles, rule, tune

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"
COMPILE_LIMIT_S = 240
MODES = {"torch-loop": "loop", "torch-scan": "scan", "torch-compiled": "compiled"}
#: float32 sums of a hundred terms of size 1, and half-precision outputs of that size.
TOLERANCE = {"float32": 2e-4, "bfloat16": 4e-2, "float16": 5e-3, "float64": 1e-9}
COLUMNS: tuple[str, ...] = (
    "operation", "envs", "steps", "layout", "dtype", "actions", "truncation", "backend", "bytes", "error", "hot_p20",
    "hot_p50", "hot_p80", "copy_hot", "ratio_hot", "gb_per_s", "synchronized", "host", "host_out", "cold_p50",
    "copy_cold", "ratio_cold", "tile", "gpu", "torch", "triton", "python", "commit", "date",
)  # fmt: skip

Row = dict[str, Any]


def options_of(backend: str) -> dict[str, str]:
    """The keyword arguments that choose a backend of the table."""
    return {"backend": "triton"} if backend == "triton" else {"backend": "torch", "torch_mode": MODES[backend]}


def sampled_envs(problem: Problem) -> list[int]:
    """The first, middle and last env."""
    return sorted({0, problem.envs // 2, problem.envs - 1})


@functools.lru_cache(maxsize=1)  # the layouts of a problem follow each other, and hold the same numbers
def expected_results(problem: Problem) -> tuple[torch.Tensor, ...]:
    """What the float64 reference gives for the sampled envs."""
    envs = sampled_envs(problem)
    axes = {x.name: x.axes for x in problem.spec.arguments}
    inputs = problem.inputs("cuda")
    sample = {name: (x[:, envs] if axes[name][0] == "T" else x[envs]).cpu() for name, x in inputs.items()}
    return as_tuple(getattr(reference, problem.operation)(**sample))


def largest_error(problem: Problem, results: tuple[torch.Tensor, ...]) -> float:
    """The largest difference to the float64 reference in the sampled envs, relative where above 1."""
    errors = [
        (got[..., sampled_envs(problem)].cpu().double() - want).abs() / want.abs().clamp(min=1)
        for got, want in zip(results, expected_results(problem._replace(layout="time")), strict=True)
    ]
    return max(float(error.nan_to_num(float("inf")).max()) for error in errors)


def measure(problem: Problem, backend: str, cold: bool) -> Row:
    """All figures of one problem on one backend.

    Raises:
        ValueError: the outputs disagree with the reference.
    """
    inputs = problem.inputs("cuda")
    options = options_of(backend)
    call = problem.call(inputs, **options)
    results = tuple(x.clone() for x in as_tuple(call()))
    error = largest_error(problem, results)
    if not error <= TOLERANCE[problem.dtype]:
        raise ValueError(f"{problem} on {backend}: the outputs are off by {error:.1e}, no figure is reported")
    size = moved_bytes(inputs, results)
    p20, p50, p80 = quantiles(hot_times(call))
    copy = quantiles(hot_times(copy_call(size, "cuda")))[1]
    row: Row = {
        **problem._asdict(),
        "backend": backend,
        "bytes": size,
        "error": f"{error:.1e}",
        "hot_p20": p20,
        "hot_p50": p50,
        "hot_p80": p80,
        "copy_hot": copy,
        "ratio_hot": p50 / copy,
        "gb_per_s": size / p50 / 1e3,
        "synchronized": synchronized_time(call),
        "host": host_time(call),
    }
    if backend == "triton":
        row["tile"] = " ".join(map(str, rule(problem)))
        row["host_out"] = host_time(problem.call(inputs, out=results))
    if cold:
        sets = [problem.inputs("cuda", seed) for seed in range(64)] if size < 2**20 else None

        def make_call(seed: int) -> Any:
            return problem.call(sets[seed] if sets else problem.inputs("cuda", seed), **options)

        row["cold_p50"] = quantiles(cold_times(make_call, size))[1]
        row["copy_cold"] = quantiles(cold_times(lambda _: copy_call(size, "cuda"), size))[1]
        row["ratio_cold"] = row["cold_p50"] / row["copy_cold"]
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


_turns: list[Any] = []  # of the processes that compile at the same time: a barrier and a lock


def take_part(*turns: Any) -> None:
    """Start one of those processes."""
    _turns.extend(turns)


def compile_and_measure(problem: Problem) -> Row | None:
    """Compile the torch baseline; when all have done so, measure it while no other does."""
    barrier, lock = _turns
    try:
        inductor.compile_threads = 1  # this process is one of many
        problem.call(problem.inputs("cuda"), **options_of("torch-compiled"))()
    finally:
        barrier.wait(COMPILE_LIMIT_S)
    with lock:
        return try_to_measure(problem, "torch-compiled", cold=False)


def measure_compiled(problems: list[Problem]) -> list[Row | None]:
    """The compiled torch baseline, a process for each problem, since compiling takes longest."""
    context = multiprocessing.get_context("spawn")
    turns = context.Barrier(len(problems)), context.Lock()
    with context.Pool(len(problems), initializer=take_part, initargs=turns) as pool:
        return pool.map(compile_and_measure, problems, chunksize=1)


def try_to_measure(problem: Problem, backend: str, cold: bool) -> Row | None:
    """`measure`, or None and a message where the outputs disagree with the reference."""
    try:
        return measure(problem, backend, cold)
    except ValueError as error:
        print(error, flush=True)
        return None
    finally:
        torch.cuda.empty_cache()


def run(parts: list[Section], cold: bool) -> Iterator[list[Row]]:
    """Measure the sections one after the other, each within its time, and give each one's rows when it is done."""
    where = provenance(["triton"])
    start = time.monotonic()
    pairs = [pair for part in parts for pair in part.pairs]
    compile_tiles((problem, rule(problem)) for problem, backend in pairs if backend == "triton")
    print(f"kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    for part in parts:
        start = time.monotonic()
        compiled = [problem for problem, backend in part.pairs if backend == "torch-compiled"]
        rows = measure_compiled(compiled) if compiled else []
        others = [pair for pair in part.pairs if pair[1] != "torch-compiled"]
        for index, (problem, backend) in enumerate(others):
            if time.monotonic() - start > part.limit_s:
                print(f"{part.name}: stopped after {index} of {len(others)}, {part.limit_s} s are over")
                break
            rows.append(try_to_measure(problem, backend, cold and part.cold))
        print(f"{part.name}: {time.monotonic() - start:.0f} s", flush=True)
        yield [table_row(row, where) for row in rows if row is not None]


def table_row(row: Row, where: Row) -> Row:
    """The columns of the table; what was not measured stays empty."""
    versions = dict(pair.split("=") for pair in where["versions"].split())
    return {name: {**row, **versions, **where}.get(name, "") for name in COLUMNS}


def main() -> None:
    """Parse the command line, measure, write, print the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("quick", "full"), default="full", help="quick: the section gae alone")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="parts of the run")
    parser.add_argument("--operations", nargs="+", choices=sorted(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--hot-only", action="store_true", help="leave out the cold figures")
    parser.add_argument("--tune", action="store_true", help="search for tiles instead")
    parser.add_argument("--budget", type=float, default=220, help="seconds that --tune may take")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the table and the pictures")
    args = parser.parse_args()
    need_cuda(parser)
    if args.tune:
        tune(args.operations, args.out / "credit_tiles.csv", args.budget)
        return
    names = ["gae"] if args.preset == "quick" else args.sections
    rows: list[Row] = []
    parts = {part.name: part for part in sections(args.operations)}
    for measured in run([parts[name] for name in names], not args.hot_only):
        if measured:  # written at once: a run that is stopped keeps what it has measured
            append_rows(args.out / "credit.csv", measured)
        rows += measured
    draw(rows, args.out)
    print(summarize(rows))


if __name__ == "__main__":
    main()
