"""Compile the kernels of an update ahead of time and print registers and spilled bytes as CSV; needs no GPU.

python scripts/update_registers.py 80 90 100
"""

from __future__ import annotations

import argparse
import csv
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

# so that a checkout runs without being installed
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from kernels import (
    triton_adam,
    triton_gather,
    triton_loss_launch,
    triton_shuffle,
    triton_step_guard,
    triton_twin_launch,
)
from kernels.adam import Moments
from kernels.loss_inputs import Coefficients, LossInputs
from kernels.shuffle import ROUNDS
from kernels.step_guard import COUNTS, GuardSettings
from kernels.triton_call import Launch
from scripts.credit_registers import resources
from scripts.tune_credit import Target

#: Distribution, actions and whether rows are gathered: a robot, an odd one, a game, the widest tile.
LOSSES = (("gaussian", 8, True), ("gaussian", 21, False), ("categorical", 6, True), ("categorical", 1024, True))
ROWS = 32768


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that takes no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def loss_launches(distribution: str, actions: int, is_gathered: bool) -> list[Launch]:
    """A loss with everything that can be given, a game's in bfloat16."""
    is_gaussian = distribution == "gaussian"
    dtype = torch.float32 if is_gaussian else torch.bfloat16
    rows = 2 * ROWS if is_gathered else ROWS
    inputs = LossInputs(
        policy_outputs=empty(ROWS, actions, dtype=dtype),
        state_values=empty(ROWS, dtype=dtype),
        log_std=empty(actions) if is_gaussian else None,
        actions=empty(rows, actions) if is_gaussian else empty(rows, dtype=torch.int64),
        advantages=empty(rows),
        value_targets=empty(rows),
        old_log_probs=empty(rows),
        old_values=empty(rows),
        valid=empty(rows, dtype=torch.bool),
        indices=empty(ROWS, dtype=torch.int64) if is_gathered else None,
        row_count=None,
        advantage_moments=empty(3),
    )
    coefficients = Coefficients(empty() if is_gathered else 0.2, 0.2, 1.0, empty())
    (total, report), launches = triton_loss_launch.forward_launches(inputs, coefficients)
    return launches + triton_loss_launch.backward_launches(total, report, inputs, coefficients)[1]


def twin_launches(hidden_sizes: list[int], precision: str) -> list[Launch]:
    """Two networks over 60 observations, for 8 actions and a value."""
    networks = [list(itertools.pairwise([60, *hidden_sizes, outputs])) for outputs in (8, 1)]
    shapes = [shape for pair in zip(*networks, strict=True) for shape in pair]
    parameters = [x for inputs, outputs in shapes for x in (empty(outputs, inputs), empty(outputs))]
    format = triton_twin_launch.FORMATS[precision]
    packed, packing = triton_twin_launch.pack(parameters, format)
    layers = triton_twin_launch.layers_of(parameters, packed)
    inputs = empty(ROWS, 60)
    (first, second, memory), launches = triton_twin_launch.forward_launches(inputs, layers, "elu", format)
    down = triton_twin_launch.backward_launches((first, second), inputs, layers, memory, "elu", format)[1]
    return [packing, *launches, *down]


def gather_launches() -> list[Launch]:
    """A minibatch's observations: numbers, and frames."""
    indices, valid = empty(ROWS, dtype=torch.int64), empty(2 * ROWS, dtype=torch.bool)
    sources = (empty(2 * ROWS, 60), empty(2 * ROWS, 4, 84, 84, dtype=torch.uint8))
    return [triton_gather.launch(source, indices, valid)[1] for source in sources]


def step_launches() -> list[Launch]:
    """The optimizer's step over 100000 parameters, with every branch of its guard."""
    report, scalar, state, vector = empty(6), empty(), empty(COUNTS + 7), empty(100_000)
    settings = GuardSettings(target_kl=0.02, desired_kl=0.008)
    squares, first = triton_adam.squares_launch(vector)
    decision, second = triton_step_guard.launch(report, squares, scalar, state, scalar, scalar, settings)
    moments = Moments(vector, vector, scalar)
    return [first, second, triton_adam.adam_launch(vector, vector, moments, decision, 1e-5)]


def cases(hidden_sizes: list[int]) -> Iterator[tuple[str, list[Launch]]]:
    """Every case with its launches."""
    for distribution, actions, is_gathered in LOSSES:
        name = f"{distribution} {actions}{' gathered' if is_gathered else ''}"
        yield name, loss_launches(distribution, actions, is_gathered)
    yield "gather", gather_launches()
    orders = empty(4, 2 * ROWS, dtype=torch.int64)
    yield "shuffle", [triton_shuffle.launch(orders, empty(4, ROUNDS, dtype=torch.int64))]
    yield "optimizer step", step_launches()
    for precision in triton_twin_launch.FORMATS:
        yield f"twin {'-'.join(map(str, hidden_sizes))} {precision}", twin_launches(hidden_sizes, precision)


def main() -> None:
    """Compile for each architecture given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", type=int, nargs="+", help="compute capability, as in 90")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[256, 128, 64])
    args = parser.parse_args()
    active: Any = driver
    writer = csv.writer(sys.stdout)
    writer.writerow(["triton", "arch", "case", "kernel", "registers", "stack_bytes", "shared_bytes"])
    for arch in args.arch:
        active.set_active(Target(arch))
        for case, launches in cases(args.hidden_sizes):
            for launch in launches:
                launch.kernel.device_caches.clear()  # they do not tell one target from another
                kernel = launch.compile()
                place = (triton.__version__, arch, case, launch.kernel.fn.__name__)
                writer.writerow([*place, *resources(kernel), kernel.metadata.shared])
                sys.stdout.flush()


if __name__ == "__main__":
    main()
