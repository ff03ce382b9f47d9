"""Measure candidate tiles for the Triton scan on this GPU: ``python scripts/bench_credit.py --tune``.

Kernels are compiled by all cores first; then each candidate solves each problem inside a CUDA graph. The winners belong
in ``kernels/triton_tiles.py``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from envs.cores import usable_cores
from kernels.outputs import output_specs
from kernels.triton_launch import ScanPlan
from kernels.triton_tiles import Tile, choose
from scripts.credit_timing import CALLS_PER_GRAPH, Problem, device_times, quantiles
from scripts.provenance import append_rows, provenance


class Target(NamedTuple):
    """Stands in for Triton's driver in a process that only compiles."""

    arch: int

    def get_current_target(self) -> Any:
        """The GPU that is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """No device is asked for."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """No stream is asked for."""
        return 0


def make_plan(problem: Problem, tile: Tile, device: str) -> tuple[ScanPlan, tuple[torch.Tensor | None, ...]]:
    """The launches of a problem with one tile, and the inputs in the order that they take."""
    named = problem.inputs(device)
    inputs = (*(named.get(argument.name) for argument in problem.spec.arguments), None)
    return ScanPlan(problem.spec, inputs, output_specs(problem.spec, inputs[:-1], None, False), False, tile), inputs


def rule(problem: Problem) -> Tile:
    """The tile that the public operation uses for this problem."""
    actions = problem.actions if problem.operation == "retrace_categorical" else 0
    size = getattr(torch, problem.dtype).itemsize
    return choose(problem.operation, problem.steps, problem.envs, problem.layout == "env", size, actions)


#: (runs, envs, length, warps) to try; loads are 16 bytes wide where envs (time-major) or steps are 4 to a thread.
TIME_MAJOR = (
    *((1, 64, 16, 2), (1, 64, 8, 2), (1, 32, 8, 1), (1, 128, 8, 4)),
    *((2, 64, 4, 4), (2, 32, 4, 2), (2, 128, 4, 2), (2, 128, 8, 4)),
    *((4, 32, 8, 1), (4, 64, 8, 4), (4, 64, 4, 4), (4, 32, 2, 4), (4, 32, 2, 1), (4, 128, 4, 4)),
    *((8, 32, 8, 4), (8, 64, 4, 4), (8, 32, 4, 4), (8, 64, 8, 8)),
    *(
        (16, 32, 8, 8),
        (16, 16, 8, 4),
        (16, 16, 16, 4),
        (16, 32, 4, 8),
        (16, 64, 8, 16),
        (16, 64, 4, 8),
        (16, 32, 8, 16),
    ),
    *(
        (32, 32, 4, 8),
        (32, 32, 4, 16),
        (32, 16, 4, 4),
        (32, 16, 8, 8),
        (32, 32, 8, 16),
        (32, 64, 4, 16),
        (64, 16, 4, 8),
    ),
)
ENV_MAJOR = (
    *(
        (2, 64, 4, 4),
        (2, 128, 4, 4),
        (4, 32, 4, 4),
        (4, 64, 4, 4),
        (8, 16, 4, 4),
        (16, 8, 4, 4),
        (32, 4, 4, 4),
        (32, 2, 4, 2),
        (32, 1, 4, 1),
        (32, 8, 4, 4),
    ),
    *((64, 1, 4, 1), (64, 2, 4, 2), (64, 4, 4, 4), (64, 2, 4, 4), (128, 1, 4, 1), (128, 1, 4, 2), (128, 1, 4, 4)),
    *((128, 2, 4, 4), (128, 4, 4, 4), (256, 1, 4, 2), (256, 1, 4, 4), (256, 1, 4, 8), (512, 1, 4, 4), (512, 1, 4, 8)),
    *((512, 1, 4, 16), (1024, 1, 4, 16), (32, 4, 8, 4), (128, 1, 8, 4)),
)
SHAPES = ((4096, 32), (4096, 128), (4096, 512), (16384, 128), (65536, 128), (1024, 2048), (4096, 2048), (256, 8192))
SHORT = ((65536, 16), (32768, 8))
FEW_PROGRAMS, MAX_BLOCKS = 132, 1024  #: multiprocessors of an H100 or H200; blocks of envs beyond which no split pays


def candidates(problem: Problem) -> list[Tile]:
    """Tiles that are no more than twice as long as the problem, with every useful split of time."""
    base = TIME_MAJOR if problem.layout == "time" else ENV_MAJOR
    width = rule(problem).actions
    found = []
    for runs, envs, length, warps in base:
        rows = runs * length
        if rows >= 2 * problem.steps or envs >= 2 * problem.envs or runs * envs * width > 2048:
            continue
        tiles = -(-problem.steps // rows)
        blocks = max(problem.envs // envs, 1)
        if tiles == 1 or blocks > FEW_PROGRAMS // 4:
            stages = (1, 2) if tiles > 1 else (1,)
            found += [Tile(runs, envs, length, warps, stages=stage, actions=width) for stage in stages]
        if tiles > 1 and rows >= 64 and blocks <= MAX_BLOCKS:
            found.append(Tile(runs, envs, length, warps, split=True, actions=width))
    return found


def kernel_key(problem: Problem, tile: Tile) -> tuple[Any, ...]:
    """What candidates that share one compiled kernel have in common."""
    plan, _ = make_plan(problem, tile, "meta")
    sizes = [(size == 1, size % 16 == 0) for size in (*plan.sizes, *itertools.chain(*plan.strides))]
    return (problem.operation, plan.constants[4:], plan.warps, *sizes)


def compile_tile(task: tuple[Problem, Tile, int]) -> float:
    """Fill Triton's cache on disk; returns the seconds that it took."""
    problem, tile, arch = task
    from triton.runtime import driver

    active: Any = driver
    active.set_active(Target(arch))
    start = time.perf_counter()
    plan, inputs = make_plan(problem, tile, "meta")
    plan.compile(inputs)
    return time.perf_counter() - start


def compile_tiles(tiles: Iterable[tuple[Problem, Tile]]) -> None:
    """Let all cores fill Triton's cache with these kernels, for this machine's GPU."""
    major, minor = torch.cuda.get_device_capability()
    tasks = [(problem, tile, 10 * major + minor) for problem, tile in tiles]
    with multiprocessing.get_context("spawn").Pool(usable_cores()) as pool:
        pool.map(compile_tile, tasks, chunksize=1)


def measure(problem: Problem, tile: Tile) -> dict[str, Any]:
    """Device time of one candidate, hot, with the registers and spills of its last kernel."""
    plan, inputs = make_plan(problem, tile, "cuda")
    addresses = [*(x.data_ptr() for x in inputs if x is not None), 0]
    coefficients = tuple(0.95 for _ in problem.spec.coefficients)

    def call() -> None:
        plan(inputs, addresses, 0.99, coefficients, None)

    p20, p50, p80 = quantiles(device_times([call] * CALLS_PER_GRAPH, replays=7))
    kernel = plan.compiled
    name = f"{problem.operation} {problem.envs}x{problem.steps} {problem.layout}"
    return {
        "problem": name,
        **tile._asdict(),
        "p20": round(p20, 2),
        "p50": round(p50, 2),
        "p80": round(p80, 2),
        "registers": kernel.n_regs,
        "spills": kernel.n_spills,
    }


def tune(
    operations: Sequence[str],
    out: pathlib.Path,
    budget_s: float,
    shapes: Sequence[tuple[int, int]] = (*SHAPES, *SHORT),
    layouts: Sequence[str] = ("time", "env"),
) -> None:
    """Measure candidates within the budget, append every figure to ``out``, print the best three of each problem."""
    start = time.monotonic()
    problems = [
        Problem(operation, envs, steps, layout)
        for operation, (envs, steps), layout in itertools.product(operations, shapes, layouts)
    ]
    tasks = [(problem, tile) for problem in problems for tile in candidates(problem)]
    kernels = {kernel_key(*task): task for task in tasks}.values()
    compile_tiles(kernels)
    print(f"{len(tasks)} candidates, {len(kernels)} kernels in {time.monotonic() - start:.0f} s", flush=True)
    rows, where = [], provenance(["triton"])
    for problem, tile in tasks:
        if time.monotonic() - start > budget_s:
            print(f"stopped at {len(rows)} of {len(tasks)}: the time is spent")
            break
        try:
            row = measure(problem, tile)
        except Exception as error:  # a tile that this GPU cannot hold is a result too
            print(f"{problem} {tile}: {type(error).__name__} {str(error).splitlines()[0][:100]}")
            continue
        append_rows(out, [{**row, **where}])  # at once: a run that is stopped keeps what it has measured
        rows.append(row)
    if not rows:
        raise SystemExit("no candidate ran")
    for _, group in itertools.groupby(rows, key=lambda row: row["problem"]):
        for row in sorted(group, key=lambda row: row["p50"])[:3]:
            print(*row.values())
