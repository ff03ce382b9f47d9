"""How long an update must take at least: its operations and bytes against what this device multiplies and copies.

python scripts/update_roofline.py --problems ant --precisions tf32 bf16
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import torch

from scripts.provenance import format_table, need_cuda
from scripts.update_problems import PROBLEMS, Problem
from scripts.update_variants import PRECISIONS, set_precision

_ADAM_BYTES = 28  # parameter, gradient and two moments read, all but the gradient written, float32


def operations(problem: Problem) -> int:
    """Floating-point operations of an update's matrix products: forward, and twice that backward, but for the gradient
    of the observations, which nobody needs."""
    products = 0
    for outputs in (problem.actions, 1):
        for index, (x, y) in enumerate(problem.layers(outputs)):
            products += x * y * (3 if index else 2)
    return 2 * products * problem.rows * problem.update_epochs


def compulsory_bytes(problem: Problem) -> int:
    """What any update moves: the batch once per epoch, parameters and optimizer state once per step, if a step kept all
    its hidden layers on chip."""
    actions = 8 if problem.is_discrete else 4 * problem.actions
    row = 4 * problem.observations + actions + 4 * 4 + 1 + 8  # log-prob, advantage, target, value; flag; index
    return problem.update_epochs * problem.rows * row + problem.optimizer_steps * problem.parameters() * _ADAM_BYTES


def layer_bytes(problem: Problem, precision: str) -> int:
    """What an update moves whose launches are layers: beside the above each hidden layer is written, read by the next
    layer, by the slope and by a weight gradient; its gradient is written and read twice."""
    width = 2 if precision == "bf16" else 4
    return compulsory_bytes(problem) + problem.update_epochs * problem.rows * 2 * sum(problem.hidden_sizes) * 7 * width


def seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device."""
    call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copied_bytes_per_second() -> float:
    """Read and written together, by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2**31 / seconds(lambda: target.copy_(source))


def operations_per_second(precision: str) -> float:
    """Of a square product of 8192."""
    dtype = set_precision(precision) or torch.float32
    x = torch.randn(8192, 8192, dtype=dtype, device="cuda")
    return 2 * 8192**3 / seconds(lambda: x @ x)


def main() -> None:
    """Print the least milliseconds of every problem and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    arguments = parser.parse_args()
    need_cuda(parser)
    bandwidth = copied_bytes_per_second()
    rates = {precision: operations_per_second(precision) for precision in arguments.precisions}
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s; products",
        {name: f"{rate / 1e12:.0f} Tflop/s" for name, rate in rates.items()},
    )
    rows = []
    for name in arguments.problems:
        problem = PROBLEMS[name]
        for precision, rate in rates.items():
            rows.append({
                "problem": name, "precision": precision,
                "Gflop": f"{operations(problem) / 1e9:.0f}", "products_ms": f"{1e3 * operations(problem) / rate:.2f}",
                "MB": f"{compulsory_bytes(problem) / 1e6:.0f}",
                "bytes_ms": f"{1e3 * compulsory_bytes(problem) / bandwidth:.2f}",
                "layers_MB": f"{layer_bytes(problem, precision) / 1e6:.0f}",
                "layers_ms": f"{1e3 * layer_bytes(problem, precision) / bandwidth:.2f}",
            })  # fmt: skip
    print(format_table(rows, rows[0]))


if __name__ == "__main__":
    main()
