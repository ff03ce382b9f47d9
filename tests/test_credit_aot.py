"""Every credit kernel compiles ahead of time for the GPUs of three generations, without spilling a register."""

from __future__ import annotations

import csv
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).parents[1]
OPERATIONS = {
    "gae", "vtrace", "retrace", "retrace_categorical", "td_lambda", "discounted_returns", "eligibility_traces",
    "episodic_prefix_sum",
}  # fmt: skip


def compile_kernels(arch: int, *options: str) -> list[dict[str, str]]:
    """Run the script in a process of its own: this one may have chosen Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts" / "credit_registers.py"), str(arch), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(csv.DictReader(done.stdout.splitlines()))


def assert_registers_suffice(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert row["stack_bytes"] == "0", row
        assert int(row["registers"]) <= 255, row


@pytest.mark.parametrize(
    ("arch", "shape", "layout"),
    [
        (80, "4096x128", "env"),
        (90, "4096x128", "time"),
        (90, "256x2048", "env"),
        (90, "256x8192", "time"),
        (100, "65536x16", "time"),
    ],
)
def test_every_kernel_compiles_without_spills(arch: int, shape: str, layout: str) -> None:
    rows = compile_kernels(arch, "--shapes", shape, "--layouts", layout)
    assert {row["operation"] for row in rows} == OPERATIONS
    assert_registers_suffice(rows)


def test_kernels_with_64_bit_offsets_compile_without_spills() -> None:
    options = ("--shapes", "65536x65536", "--layouts", "time", "--operations", "gae", "retrace_categorical")
    assert_registers_suffice(compile_kernels(90, *options))
