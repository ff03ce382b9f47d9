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
import csv
import itertools
import multiprocessing
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor
import triton
from credit_report import draw, summarize
from credit_timing import (
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
from tune_credit import SHAPES, SHORT, compile_tile, rule, tune

from kernels import reference

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"
SECTIONS = ("gae", "operations", "variants", "torch")
MODES = {"torch-loop": "loop", "torch-scan": "scan", "torch-compiled": "compiled"}
#: float32 sums of a hundred terms of size 1, and half-precision outputs of that size.
TOLERANCE = {"float32": 2e-4, "bfloat16": 4e-2, "float16": 5e-3, "float64": 1e-9}

Row = dict[str, Any]


def environment() -> Row:
    """What a figure depends on besides the problem."""
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("ROLLSCAN_COMMIT", commit),
        "date": time.strftime("%Y-%m-%d"),
    }


def options_of(backend: str) -> dict[str, str]:
    """The keyword arguments that choose a backend of the table."""
    return {"backend": "triton"} if backend == "triton" else {"backend": "torch", "torch_mode": MODES[backend]}


def largest_error(problem: Problem, inputs: dict[str, torch.Tensor], results: tuple[torch.Tensor, ...]) -> float:
    """The largest difference to the float64 reference in the first, middle and last env, relative where above 1."""
    envs = sorted({0, problem.envs // 2, problem.envs - 1})
    named = {x.name: x for x in problem.spec.arguments}
    sample = {name: (x[:, envs] if named[name].axes[0] == "T" else x[envs]).cpu() for name, x in inputs.items()}
    expected = as_tuple(getattr(reference, problem.operation)(**sample))
    errors = [
        (got[..., envs].cpu().double() - want).abs() / want.abs().clamp(min=1)
        for got, want in zip(results, expected, strict=True)
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
    error = largest_error(problem, inputs, results)
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


def precompile(pairs: list[tuple[Problem, str]]) -> None:
    """Let all cores fill the caches on disk, Triton's own and that of `torch.compile`, for these problems."""
    major, minor = torch.cuda.get_device_capability()
    tiles = [(problem, rule(problem), 10 * major + minor) for problem, backend in pairs if backend == "triton"]
    graphs = [problem for problem, backend in pairs if backend == "torch-compiled"]
    work: list[tuple[Callable[[Any], object], list[Any]]] = [(compile_tile, tiles), (compile_torch, graphs)]
    for function, tasks in work:
        if tasks:
            with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
                pool.map(function, tasks, chunksize=1)


def compile_torch(problem: Problem) -> None:
    """One call of the compiled torch baseline."""
    inductor.compile_threads = 1  # this process is one of many
    problem.call(problem.inputs("cuda"), **options_of("torch-compiled"))()


class Section(NamedTuple):
    """A part of a run: what it measures, and the seconds that it may take."""

    name: str
    limit_s: float
    pairs: list[tuple[Problem, str]]
    cold: bool = False


def sections(operations: list[str]) -> list[Section]:
    """All parts of a full run, in order of weight."""
    layouts = ("time", "env")
    gae = [Problem("gae", *shape, layout) for shape, layout in itertools.product((*SHAPES, *SHORT), layouts)]
    others = [name for name in operations if name != "gae"]
    rest = [Problem(name, *shape, layout) for shape, layout, name in itertools.product(SHAPES, layouts, others)]
    wide = [
        Problem("retrace_categorical", *shape, layout, actions=actions)
        for shape, actions, layout in itertools.product(((256, 8192), (4096, 128)), (2, 16, 64), layouts)
    ]
    long = [Problem(name, 16, 131072, layout) for name, layout in itertools.product(operations, layouts)]
    precise = [
        Problem(name, *shape, layout, dtype)
        for name, shape, dtype, layout in itertools.product(
            ("gae", "vtrace"), ((4096, 128), (65536, 128)), ("bfloat16", "float64"), layouts
        )
    ]
    compared = itertools.product(((4096, 128), (65536, 128), (1024, 2048)), operations)
    baselines = [Problem("gae", 4096, 512), *(Problem(name, *shape) for shape, name in compared)]
    pairs = [(problem, backend) for problem in baselines for backend in ("triton", "torch-compiled")]
    pairs += [(Problem("gae", 4096, 128), mode) for mode in ("torch-scan", "torch-loop")]
    return [
        Section("gae", 60, [(problem, "triton") for problem in gae], cold=True),
        Section("operations", 150, [(problem, "triton") for problem in rest]),
        Section("variants", 60, [(problem, "triton") for problem in (*wide, *long, *precise)]),
        Section("torch", 180, pairs),
    ]


def run(parts: list[Section], cold: bool) -> list[Row]:
    """Measure the sections one after the other, each within its time."""
    rows: list[Row] = []
    where = environment()
    start = time.monotonic()
    precompile([pair for part in parts for pair in part.pairs])
    print(f"kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    for part in parts:
        start = time.monotonic()
        for index, (problem, backend) in enumerate(part.pairs):
            if time.monotonic() - start > part.limit_s:
                print(f"{part.name}: stopped after {index} of {len(part.pairs)}, {part.limit_s} s are over")
                break
            try:
                rows.append({**measure(problem, backend, cold and part.cold), **where})
            except ValueError as error:
                print(error, flush=True)
            torch.cuda.empty_cache()
        print(f"{part.name}: {time.monotonic() - start:.0f} s", flush=True)
    return rows


def append(rows: list[Row], path: pathlib.Path) -> None:
    """Add the rows to the table, which only ever grows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            columns = next(csv.reader(file))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerows(rows)


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
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tune:
        tune(args.operations, args.out / "credit_tune.csv", args.budget)
        return
    names = ["gae"] if args.preset == "quick" else args.sections
    rows = run([part for part in sections(args.operations) if part.name in names], not args.hot_only)
    append(rows, args.out / "credit.csv")
    draw(rows, args.out)
    print(summarize(rows))


if __name__ == "__main__":
    main()
