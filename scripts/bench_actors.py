"""Training throughput of asynchronous actors beside the raw engine: who waits for whom.

Example:
    python scripts/bench_actors.py env=Ant num_envs=4096 --raw-pools 2 4 --against env.pools=2 env.pools=4

``raw`` is the engine with random actions and no policy, its results left on the host, pools taking turns, the best of
``--raw-pools``. Every row is ``algo=impala`` in this process: valid env steps of the measured updates by their wall
time, its ratio to raw, the shares of time that learner and actors waited, and the policy lag of the rollouts in
updates.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

from scripts.bench_env import Case
from scripts.bench_env import measure as measure_env
from scripts.overrides import composed
from scripts.provenance import append_rows, format_table, provenance
from trainer.actor_pool import ActorPool
from trainer.config import Config, ConfigError
from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.metrics import Metrics

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "actors.csv"
_QUIET = ("algo=impala", "wandb.mode=disabled", "logging.console=none")
Row = dict[str, str | int | float]


def raw_rate(config: Config, pools: list[int], seconds: float) -> float:
    """Valid steps per second of the engine alone, the best over ``pools``; each in a process of its own."""
    env, options = config.env, {"num_threads": config.env.num_threads, **config.env.options}
    cases = [
        Case(env.id, env.engine, config.num_envs, "cpu", "no", seconds, 2, 0.0, {"pools": n, **options}) for n in pools
    ]
    context = multiprocessing.get_context("fork")  # nothing is imported again, and this process holds no env or GPU yet
    rates = []
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            rates.append(float(executor.submit(measure_env, case).result()["steps_per_second"]))
    return max(rates)


def train(config: Config, seconds: float) -> list[Metrics]:
    """The updates of a run from the fourth that threads collected for, for at least so many seconds."""
    trainer = Trainer(config, QuietConsole())
    trainer.clock.start()
    try:
        for _ in range(3 + (trainer.source.preludes if isinstance(trainer.source, ActorPool) else 0)):
            trainer.train_one_update()
        started, rows = time.perf_counter(), []
        while time.perf_counter() - started < seconds:
            rows.append(trainer.train_one_update())
        return rows
    finally:
        trainer.close()


def summarize(settings: str, updates: list[Metrics], raw: float) -> Row:
    """One row of the table."""
    wall = sum(m["time/total_ms"] for m in updates)
    steps = sum(m["steps_per_second"] * m["time/total_ms"] / 1e3 for m in updates)

    def share(phase: str) -> float:
        return round(sum(m[f"time/{phase}_ms"] for m in updates) / wall, 4)

    rate = steps / (wall / 1e3)
    return {
        "settings": settings,
        "steps_per_second": round(rate),
        "raw": round(raw),
        "ratio": round(rate / raw, 3),
        "learner_idle": round(sum(m["learner/idle"] * m["time/total_ms"] for m in updates) / wall, 3),
        "actor_idle": round(statistics.fmean(m["actor/idle"] for m in updates), 3),
        "lag_mean": round(statistics.fmean(m["lag/mean"] for m in updates), 2),
        "lag_max": max(m["lag/max"] for m in updates),
        **{phase: share(phase) for phase in ("env_step", "transfer", "inference", "credit", "update", "other")},
        "updates": len(updates),
    }


def main() -> None:
    """Measure the engine and every variant, print the table and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="key=value, as for scripts/train.py")
    parser.add_argument("--against", nargs="+", default=[""], metavar="SETTINGS", help="further settings of each row")
    parser.add_argument("--raw-pools", nargs="+", type=int, default=[2], help="pools of the raw engine, each measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training per row, and of each raw window")
    parser.add_argument("--no-save", action="store_true", help=f"print only; do not append to {RESULTS.name}")
    arguments = parser.parse_args()
    variants = [[*arguments.settings, *variant.split()] for variant in arguments.against]
    try:  # all of them before anything is measured
        base, *configs = (composed([*_QUIET, *settings]) for settings in (arguments.settings, *variants))
    except ConfigError as error:
        parser.error(str(error))
    if any(config.algo != "impala" for config in configs):
        parser.error("algo=ppo has no actors: scripts/bench_loop.py times it")
    raw = raw_rate(base, arguments.raw_pools, arguments.seconds / 3)
    source = provenance(("envpool", "triton"))
    for settings, config in zip(variants, configs, strict=True):
        row = summarize(" ".join(settings), train(config, arguments.seconds), raw)
        print(format_table([row], [name for name in row if name != "settings"]), row["settings"], "\n", flush=True)
        if not arguments.no_save:
            append_rows(RESULTS, [{**row, **source}])


if __name__ == "__main__":
    main()
