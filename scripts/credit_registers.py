"""Compile every credit kernel ahead of time and print registers and spilled bytes as CSV; needs no GPU.

python scripts/credit_registers.py 80 90 100 > docs/results/credit_registers.csv
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

# so that a checkout runs without being installed
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import triton
from triton.runtime import driver

from kernels.triton_scan import scan_kernel
from scripts.credit_timing import BY_NAME, Problem
from scripts.tune_credit import Target, make_plan, rule

#: One problem for each kind of tile that the rule chooses.
SHAPES = ((4096, 128), (65536, 16), (1024, 2048))


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of a thread's stack, which is where spills go."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK"))
    return registers, stack


def main() -> None:
    """Compile for each architecture given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", type=int, nargs="+", help="compute capability, as in 90")
    parser.add_argument("--operations", nargs="+", choices=sorted(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--shapes", nargs="+", default=[f"{envs}x{steps}" for envs, steps in SHAPES])
    parser.add_argument("--layouts", nargs="+", choices=("time", "env"), default=("time", "env"))
    args = parser.parse_args()
    active: Any = driver
    writer = csv.writer(sys.stdout)
    writer.writerow(["triton", "arch", "operation", "envs", "steps", "layout", "registers", "stack_bytes"])
    for arch in args.arch:
        active.set_active(Target(arch))
        scan_kernel.device_caches.clear()  # they do not tell one target from another
        for operation in args.operations:
            for shape in args.shapes:
                for layout in args.layouts:
                    envs, steps = map(int, shape.split("x"))
                    problem = Problem(operation, envs, steps, layout)
                    plan, inputs = make_plan(problem, rule(problem), "meta")
                    place = (triton.__version__, arch, operation, envs, steps, layout)
                    writer.writerow([*place, *resources(plan.compile(inputs))])
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
