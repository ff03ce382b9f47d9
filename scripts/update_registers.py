"""Compile the loss kernels ahead of time and print registers and spilled bytes as CSV; needs no GPU.

python scripts/update_registers.py 80 90 100
"""

from __future__ import annotations

import argparse
import csv
import sys
from typing import Any

import torch
import triton
from credit_registers import resources
from triton.runtime import driver
from tune_credit import Target

from kernels.loss_inputs import Coefficients, LossInputs
from kernels.triton_loss_launch import backward_launches, forward_launches

#: Distribution and actions: a robot, a game, and the widest tile.
CASES = (("gaussian", 8), ("gaussian", 21), ("categorical", 6), ("categorical", 1024))
ROWS = 32768


def problem(distribution: str, actions: int, is_gathered: bool, dtype: torch.dtype) -> LossInputs:
    """A loss with everything that can be given, on ``meta``."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    is_gaussian = distribution == "gaussian"
    return LossInputs(
        policy_outputs=empty(ROWS, actions, dtype=dtype),
        values=empty(ROWS, dtype=dtype),
        log_std=empty(actions) if is_gaussian else None,
        actions=empty(2 * ROWS, actions) if is_gaussian else empty(2 * ROWS, dtype=torch.int64),
        advantages=empty(2 * ROWS),
        value_targets=empty(2 * ROWS),
        old_log_probs=empty(2 * ROWS),
        old_values=empty(2 * ROWS),
        valid=empty(2 * ROWS, dtype=torch.bool),
        indices=empty(ROWS, dtype=torch.int64) if is_gathered else None,
        row_count=None,
        advantage_moments=empty(3),
    )


def main() -> None:
    """Compile for each architecture given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", type=int, nargs="+", help="compute capability, as in 90")
    args = parser.parse_args()
    active: Any = driver
    writer = csv.writer(sys.stdout)
    writer.writerow(["triton", "arch", "kernel", "distribution", "actions", "gathered", "registers", "stack_bytes"])
    number = torch.empty((), device="meta")
    for arch in args.arch:
        active.set_active(Target(arch))
        for distribution, actions in CASES:
            is_gathered = actions != 21
            inputs = problem(distribution, actions, is_gathered, torch.bfloat16 if actions == 6 else torch.float32)
            coefficients = Coefficients(number if is_gathered else 0.2, 0.2, 1.0, number)
            (total, report), launches = forward_launches(inputs, coefficients)
            for launch in [*launches, *backward_launches(total, report, inputs, coefficients)[1]]:
                place = (triton.__version__, arch, launch.kernel.fn.__name__, distribution, actions, is_gathered)
                writer.writerow([*place, *resources(launch.compile())])
                sys.stdout.flush()


if __name__ == "__main__":
    main()
