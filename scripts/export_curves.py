"""Keep learning curves: ``python scripts/export_curves.py ant_envpool runs/.../ [more runs] --commit 78f5488``.

Writes ``docs/results/curves/<name>.csv`` with a row per update and run (commit, label, seed, env steps, seconds, mean
return of the last episodes, steps per second, every phase's share of the wall time) and, where matplotlib is installed,
a picture beside it. Runs of one setting are told apart by their seeds, others by ``--labels``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

from trainer.metrics import read_metrics
from trainer.run_folder import RunFolder
from trainer.schema import from_yaml
from trainer.timing import PHASES

CURVES = Path(__file__).resolve().parents[1] / "docs" / "results" / "curves"
COLUMNS = ("update", "env_steps", "seconds", "episode_return", "episode_length", "steps_per_second")


def curve(run: Path, most: int, commit: str, label: str | None) -> list[dict[str, Any]]:
    """At most ``most`` evenly spaced updates of a run, the last one included."""
    folder = RunFolder(run)
    seed = from_yaml(folder.config.read_text()).seed
    metrics = read_metrics(folder.metrics)
    stride = max(1, -(-len(metrics) // most))
    rows = []
    for row in metrics[::-1][::stride][::-1]:
        shares = {f"{name}_share": round(row[f"time/{name}_ms"] / row["time/total_ms"], 4) for name in PHASES}
        values = {name: row[name] for name in COLUMNS}
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
        rows.append({"commit": commit, "label": label or f"seed {seed}", "seed": seed, **rounded, **shares})
    return rows


def write_csv(path: Path, curves: list[list[dict[str, Any]]]) -> None:
    """One table of all runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(curves[0][0]), lineterminator="\n")
        writer.writeheader()
        for rows in curves:
            writer.writerows(rows)


def draw(path: Path, curves: list[list[dict[str, Any]]], title: str) -> None:
    """Return against env steps and against seconds, a line per seed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no picture: pip install -e '.[report]' brings matplotlib ({path.name})")
        return
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, x, label in zip(axes, ("env_steps", "seconds"), ("env steps (millions)", "seconds"), strict=True):
        for rows in curves:
            known = [row for row in rows if row["episode_return"] is not None]
            scale = 1e6 if x == "env_steps" else 1.0
            axis.plot(
                [row[x] / scale for row in known],
                [row["episode_return"] for row in known],
                linewidth=1.3,
                label=rows[0]["label"],
            )
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("mean return of the last episodes")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def main() -> None:
    """Export the runs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the curve's files")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of one setting")
    parser.add_argument("--commit", nargs="+", required=True, help="of all runs or of each; a resumed one has several")
    parser.add_argument("--labels", nargs="+", default=[None], help="of the runs that seeds do not tell apart")
    parser.add_argument("--title", help="over the picture; default the name")
    parser.add_argument("--most", type=int, default=160, help="rows kept per run")
    arguments = parser.parse_args()
    count = len(arguments.runs)
    commits, labels = (given * count if len(given) == 1 else given for given in (arguments.commit, arguments.labels))
    if not len(commits) == len(labels) == count:
        parser.error(f"{count} runs, but {len(commits)} of --commit and {len(labels)} of --labels; give one for each")
    curves = [curve(run, arguments.most, *about) for run, *about in zip(arguments.runs, commits, labels, strict=True)]
    write_csv(CURVES / f"{arguments.name}.csv", curves)
    draw(CURVES / f"{arguments.name}.svg", curves, arguments.title or arguments.name)
    for rows in curves:
        last = rows[-1]
        print(f"{last['label']}: {last['env_steps']} steps, {last['seconds']} s, return {last['episode_return']}")


if __name__ == "__main__":
    main()
