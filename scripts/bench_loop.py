"""What one update of a run costs, phase by phase, for settings side by side.

Example:
    python scripts/bench_loop.py env=CartPole env.engine=torch num_envs=65536 rollout_length=32 ppo.update_epochs=1 \\
        --against cuda_graphs=true "cuda_graphs=false loss.backend=torch"

Every row is a run of its own in this process, after some updates that compile and capture. Milliseconds are means per
update; ``host`` is how long the host was busy issuing the update phase, which the device need not have waited for;
``gpu_mib`` is the most that torch reserved; ``start_seconds`` is what building the run and those first updates took.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

from scripts.overrides import composed
from scripts.provenance import append_rows, format_table, provenance
from scripts.refusals import told_in_one_line
from trainer.config import Config
from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.rollout import Rollout
from trainer.timing import PHASES, UPDATE_PARTS

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "phases.csv"
_QUIET = ("wandb.mode=disabled", "logging.console=none")
_COLUMNS = (*PHASES, *UPDATE_PARTS, "total")


def measure(settings: list[str], config: Config, skip: int, updates: int) -> dict[str, str | int | float]:
    """One row: the means of ``updates`` updates after the first ``skip``."""
    if torch.cuda.is_available():
        gc.collect()  # a run before this one may hold itself in a cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    trainer = Trainer(config, QuietConsole())
    host: list[float] = []
    _time_calls(trainer, host)
    trainer.clock.start()
    for _ in range(skip):
        trainer.train_one_update()
    start_seconds = time.perf_counter() - started
    rows = [trainer.train_one_update() for _ in range(updates)]
    trainer.close()

    def mean(name: str) -> float:
        return statistics.fmean(row.get(f"time/{name}_ms", 0.0) for row in rows)

    return {
        "settings": " ".join(settings),
        "steps_per_second": round(statistics.median(row["steps_per_second"] for row in rows)),
        **{name: round(mean(name), 3) for name in _COLUMNS},
        "host": round(1e3 * statistics.fmean(host[skip:]), 3),
        "gpu_mib": torch.cuda.max_memory_reserved() >> 20 if torch.cuda.is_available() else 0,
        "start_seconds": round(start_seconds, 1),
        "updates": updates,
    }


def _time_calls(trainer: Trainer, seconds: list[float]) -> None:
    """Note how long each call of the algorithm's update takes on the host."""
    update = trainer.algorithm.update

    def timed(rollout: Rollout, rewards: Tensor, progress: float) -> dict[str, Tensor]:
        started = time.perf_counter()
        result = update(rollout, rewards, progress)
        seconds.append(time.perf_counter() - started)
        return result

    trainer.algorithm.update = timed


def main() -> None:
    """Measure every variant, print the table and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="key=value, as for scripts/train.py")
    parser.add_argument("--against", nargs="+", default=[""], metavar="SETTINGS", help="further settings of each row")
    parser.add_argument("--updates", type=int, default=20, help="measured ones")
    parser.add_argument("--skip", type=int, default=6, help="updates before that: compilation, capture")
    parser.add_argument("--no-save", action="store_true", help=f"print only; do not append to {RESULTS.name}")
    arguments = parser.parse_args()
    with told_in_one_line():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Compose every variant before the first is measured, print each row and append it to the results."""
    variants = [[*arguments.settings, *variant.split()] for variant in arguments.against]
    configs = [composed([*settings, *_QUIET]) for settings in variants]
    source = provenance(("envpool", "mujoco-warp", "triton"))
    for settings, config in zip(variants, configs, strict=True):
        row = measure(settings, config, arguments.skip, arguments.updates)
        print(format_table([row], [name for name in row if name != "settings"]), row["settings"], "\n", flush=True)
        if not arguments.no_save:
            append_rows(RESULTS, [{**row, **source}])


if __name__ == "__main__":
    main()
