"""One PPO update on a fixed batch: ours under each switch, plain torch at its best, rsl_rl where it can be imported.

Example:
    python scripts/bench_update.py                                  # everything; appends to the CSV
    python scripts/bench_update.py --problems ant --precisions tf32 --no-save

Before anything is timed, each variant does one update with a single minibatch, without gradient clipping and with an
Adam whose step is proportional to the gradient; its step must be that of eager float32 within `TOLERANCES`.
Milliseconds are of whole updates, from the call until the device is done; ``host`` is how long the call itself took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import torch
from torch import Tensor

from scripts.provenance import append_rows, format_table, provenance
from scripts.update_plain import plain_update
from scripts.update_problems import PROBLEMS, FixedBatch, Problem, fixed_batch
from scripts.update_rsl_rl import has_rsl_rl, rsl_rl_update
from scripts.update_variants import PRECISIONS, VARIANTS, Update, ours
from trainer.config import PPOConfig
from trainer.graphs import WARM_UP_CALLS

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "update.csv"
PLAIN = "torch.compile, one graph"
BASELINES = ("eager", PLAIN)
#: How far a tensor's step may be from eager float32's, as a share of its length: roundings of the products (to 24, 11
#: and 8 bits) add up over rows, and move a few ratios over the ends of the clip range.
TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2}
_TIMES = ("p20_ms", "p50_ms", "p80_ms", "host_ms")

Make = Callable[[PPOConfig], Update]


def makers(problem: Problem, batch: FixedBatch, precision: str, device: str) -> dict[str, Make]:
    """Every way to do this update here."""

    def ours_as(name: str) -> Make:
        return lambda config: ours(problem, batch, VARIANTS[name], precision, config)

    names = [name for name, variant in VARIANTS.items() if variant.runs(problem, device)]
    ways = {name: ours_as(name) for name in names}
    if device == "cuda":
        ways[PLAIN] = lambda config: plain_update(problem, batch, precision, config)
    if has_rsl_rl() and not problem.is_discrete:
        ways["rsl_rl"] = lambda config: rsl_rl_update(problem, batch, precision, config)
    return ways


def one_step(problem: Problem, make: Make) -> dict[str, Tensor]:
    """What one update with a single minibatch adds to the parameters."""
    # a step in proportion to the gradient, and large beside the rounding of the parameters
    adam = {"adam_eps": 1.0, "learning_rate": 1.0}
    config = replace(problem.ppo(), update_epochs=1, num_minibatches=1, max_grad_norm=1e9, **adam)
    update = make(config)
    before = {name: x.detach().clone() for name, x in update.parameters.items()}
    update.run()
    return {name: x.detach() - before[name] for name, x in update.parameters.items()}


def error_of(step: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance between two steps over all tensors, as a share of the expected step's length."""
    return max(float((step[name] - x).norm() / x.norm()) for name, x in expected.items())


def times_of(update: Update, repeats: int, device: str) -> tuple[list[float], list[float]]:
    """Milliseconds of whole updates and of their calls, sorted, after some that compile and capture."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(WARM_UP_CALLS + 2):
        update.run()
    wait()
    whole, calls = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        update.run()
        calls.append(1e3 * (time.perf_counter() - start))
        wait()
        whole.append(1e3 * (time.perf_counter() - start))
    return sorted(whole), sorted(calls)


def measure(
    problem: Problem, batch: FixedBatch, precision: str, repeats: int, device: str, wanted: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """One row for each way, or for those ``wanted``, as soon as it is measured; no times where its step is not that of
    eager float32."""
    expected = one_step(problem, lambda config: ours(problem, batch, VARIANTS["eager"], "fp32", config))
    for name, make in makers(problem, batch, precision, device).items():
        if wanted and name not in wanted:
            continue
        error = error_of(one_step(problem, make), expected)
        times: dict[str, float | None] = dict.fromkeys(_TIMES)
        if error <= TOLERANCES[precision]:
            whole, calls = times_of(make(problem.ppo()), repeats, device)
            found = (*(whole[round((repeats - 1) * q)] for q in (0.2, 0.5, 0.8)), calls[repeats // 2])
            times = {name: round(ms, 3) for name, ms in zip(_TIMES, found, strict=True)}
        yield {"variant": name, **times, "error": f"{error:.0e}"}
        torch.compiler.reset()


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that have times, with how many times faster each is than the baselines."""
    timed = [row for row in rows if row["p50_ms"]]
    medians = {row["variant"]: row["p50_ms"] for row in timed}
    known = [name for name in BASELINES if name in medians]
    return [row | {f"÷ {name}": f"{medians[name] / row['p50_ms']:.2f}" for name in known} for row in timed]


def main() -> None:
    """Check and measure, print a table for each problem and precision, append to the results.

    Raises:
        SystemExit: a variant's step was not that of eager float32.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument(
        "--variants", nargs="+", choices=(*VARIANTS, PLAIN, "rsl_rl"), help="all that can run, if not given"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--envs", type=int, help="instead of the problem's own number, for a quick look")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-save", action="store_true", help=f"print only; do not append to {RESULTS.name}")
    arguments = parser.parse_args()
    origin, refused = provenance(["triton", "rsl-rl-lib"]), list[str]()
    for name in arguments.problems:
        problem = PROBLEMS[name]._replace(**({"envs": arguments.envs} if arguments.envs else {}))
        batch = fixed_batch(problem, arguments.device)
        for precision in arguments.precisions:
            rows = []
            for row in measure(problem, batch, precision, arguments.repeats, arguments.device, arguments.variants):
                rows.append({"problem": name, "precision": precision, **row})
                if row["p50_ms"] is None:
                    limit = TOLERANCES[precision]
                    refused.append(f"{name}, {precision}, {row['variant']}: steps differ by {row['error']} > {limit}")
                elif not arguments.no_save:
                    append_rows(RESULTS, [{**rows[-1], "rows": problem.rows, **origin}])
            table = with_ratios(rows)
            print(format_table(table, table[0]) if table else "", flush=True)
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
