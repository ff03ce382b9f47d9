"""The PPO loss alone, forward and backward, on one minibatch: device time in a CUDA graph, fused against torch.

python scripts/bench_loss.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import torch
from torch import Tensor

from kernels import ppo_loss
from scripts.credit_timing import hot_times, quantiles
from scripts.provenance import append_rows, format_table, need_cuda, provenance

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "loss.csv"
WAYS = ("fused, gathering", "fused", "torch.compile", "torch")


def arguments_of(rows: int, actions: int, is_gathered: bool) -> dict[str, Any]:
    """A minibatch of ``rows`` for a Gaussian policy; its fields are taken from twice as many if gathered."""
    generator = torch.Generator("cuda").manual_seed(0)
    stored = 2 * rows if is_gathered else rows

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    names = ("old_log_probs", "advantages", "value_targets", "old_values")
    return {
        "policy_outputs": noise(rows, actions).requires_grad_(),
        "values": noise(rows).requires_grad_(),
        "log_std": torch.zeros(actions, device="cuda", requires_grad=True),
        "actions": noise(stored, actions),
        **{name: noise(stored) for name in names},
        "valid": torch.ones(stored, dtype=torch.bool, device="cuda"),
        "indices": torch.randperm(stored, device="cuda")[:rows] if is_gathered else None,
        "clip_range": 0.2, "value_clip_range": 0.2, "value_coef": 2.0, "entropy_coef": 0.01,
    }  # fmt: skip


def measure(way: str, rows: int, actions: int) -> tuple[float, float, float]:
    """p20, p50 and p80 of the microseconds of loss and gradients."""
    arguments = arguments_of(rows, actions, way == "fused, gathering")
    backend = "triton" if way.startswith("fused") else "torch"

    def total() -> Tensor:
        return ppo_loss(**arguments, backend=backend).total

    solve = torch.compile(total, dynamic=False) if way == "torch.compile" else total
    leaves = [arguments[name] for name in ("policy_outputs", "values", "log_std")]
    return quantiles(hot_times(lambda: torch.autograd.grad(solve(), leaves)))


def main() -> None:
    """Measure every way, print the table and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--actions", type=int, default=8)
    parser.add_argument("--no-save", action="store_true", help=f"print only; do not append to {RESULTS.name}")
    arguments = parser.parse_args()
    need_cuda(parser)
    rows = []
    for way in WAYS:
        figures = zip(("p20_us", "p50_us", "p80_us"), measure(way, arguments.rows, arguments.actions), strict=True)
        figures = {name: round(value, 1) for name, value in figures}
        rows.append({"rows": arguments.rows, "actions": arguments.actions, "way": way, **figures})
    print(format_table(rows, rows[0]))
    if not arguments.no_save:
        append_rows(RESULTS, [row | provenance(["triton"]) for row in rows])


if __name__ == "__main__":
    main()
