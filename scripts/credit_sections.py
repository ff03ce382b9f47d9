"""What the credit benchmark measures, part by part."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from scripts.credit_timing import Problem
from scripts.tune_credit import SHAPES, SHORT

SECTIONS = ("gae", "operations", "variants", "torch")


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
    rest = [Problem(name, *shape, layout) for shape, name, layout in itertools.product(SHAPES, others, layouts)]
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
    pairs = [(Problem("gae", 4096, 128), mode) for mode in ("torch-scan", "torch-loop")]
    return [
        Section("gae", 60, [(problem, "triton") for problem in gae], cold=True),
        Section("operations", 150, [(problem, "triton") for problem in rest]),
        Section("variants", 60, [(problem, "triton") for problem in (*wide, *long, *precise)]),
        Section("torch", 60, [*((problem, "torch-compiled") for problem in baselines), *pairs]),
    ]
