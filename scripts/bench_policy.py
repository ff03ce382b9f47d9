"""Time of the policy on stacks of frames: acting, and evaluating with the gradient of all parameters.

Example:
    python scripts/bench_policy.py --torso nature_cnn impala_resnet --batch 64 1024 4096 --device cuda

Every case is warmed up, captured as a CUDA graph on CUDA, and called in samples of ten; a row holds the median over the
samples of the milliseconds of one call, with the 20th and 80th percentile. With ``--core lstm gru`` the batch that is
evaluated is cut into windows of ``--window`` rows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from scripts.provenance import append_rows, format_table, provenance
from trainer.config import PolicyConfig
from trainer.networks import PIXEL_TORSOS, PixelTorso
from trainer.policy import ActorCritic
from trainer.recurrent import CORES

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "policy.csv"
FRAMES = Box(0, 255, (4, 84, 84), np.uint8)
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
CALLS, SAMPLES = 10, 15


class Case(NamedTuple):
    """One policy and batch; also the first columns of its rows."""

    torso: str
    core: str
    batch: int  #: rows evaluated at once, and rows acted on at once where there is no core
    window: int  #: rows of an env that are evaluated in sequence, 1 without a core
    dtype: str
    layout: str


def make_calls(case: Case, device: torch.device) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    config = PolicyConfig(hidden_sizes=[], torso=case.torso, core=case.core)
    policy = ActorCritic(FRAMES, Discrete(6), config, DTYPES[case.dtype]).to(device)
    if isinstance(policy.torso, PixelTorso):
        policy.torso.set_layout(LAYOUTS[case.layout])
    shape = (case.window, case.batch // case.window)
    frames = torch.randint(256, (*shape, *FRAMES.shape), dtype=torch.uint8, device=device)
    valid = torch.ones(shape, dtype=torch.bool, device=device)
    state = policy.initial_state(shape[1])

    @torch.no_grad()
    def act() -> None:
        policy.act(frames[0], state)

    def evaluate() -> None:
        policy.zero_grad(set_to_none=True)
        outputs = policy.outputs(frames, state, valid)
        (outputs.policy_outputs.sum() + outputs.values.sum()).backward()

    return {"act": act, "evaluate": evaluate}


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The warmed-up call; on CUDA as one graph, so that the device's time is measured and not the host's."""
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    if stream is None:
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], None], device: torch.device) -> list[float]:
    """The time of one call, in each sample."""
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - started) / CALLS * 1e3)
    return samples


def measure(case: Case, device: torch.device) -> list[dict[str, str | int | float]]:
    """A row for each call."""
    rows = []
    for name, call in make_calls(case, device).items():
        p20, p50, p80 = np.quantile(milliseconds(captured(call, device), device), (0.2, 0.5, 0.8)).round(4)
        rows.append({**case._asdict(), "call": name, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80})
    return rows


def main() -> None:
    """Measure the product of what the command line lists, print a table, and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torso", nargs="+", default=["nature_cnn"], choices=PIXEL_TORSOS)
    parser.add_argument("--core", nargs="+", default=["none"], choices=["none", *CORES])
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--window", type=int, default=16, help="rows of an env in sequence, for cores")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--layout", nargs="+", default=["channels_last"], choices=LAYOUTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")  # as a run has it
    rows = []
    for torso, core, batch, dtype, layout in itertools.product(
        options.torso, options.core, options.batch, options.dtype, options.layout
    ):
        window = options.window if core != "none" else 1
        measured = measure(Case(torso, core, batch, window, dtype, layout), device)
        append_rows(options.out, [{**row, "device": device.type, **provenance()} for row in measured])
        rows += measured
    print(format_table(rows, rows[0]))


if __name__ == "__main__":
    main()
