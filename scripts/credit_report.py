"""The credit benchmark's summary, aims beside figures, and its pictures."""

from __future__ import annotations

import csv
import importlib.util
import pathlib
import statistics
from typing import Any

Row = dict[str, Any]

#: (operation, envs, steps): device time to reach in microseconds, on one H200, float32 with truncation.
AIMS = {
    ("gae", 4096, 128): 4.5,
    ("gae", 16384, 128): 9.0,
    ("gae", 4096, 512): 11.0,
    ("gae", 1024, 2048): 12.0,
    ("gae", 256, 8192): 14.0,
    ("retrace_categorical", 256, 8192): 60.0,
}
SHORT_AIMS = {("gae", 32768, 8): 2.6, ("gae", 65536, 16): 4.6}  # time-major only
#: Another library's figures on the same kind of card, env-major with truncation, as published beside docs/results.
PUBLISHED = pathlib.Path(__file__).parents[1] / "docs" / "results" / "credit_published.csv"
BIG_BYTES, COPY_AIM, HOST_AIM, HOST_OUT_AIM, TORCH_AIM = 64e6, 1.15, 16.0, 12.0, 1.5


def verdict(value: float, aim: float, at_least: bool = False) -> str:
    """A figure beside its aim."""
    met = value >= aim if at_least else value <= aim
    return f"{value:8.2f}  aim {'>=' if at_least else '<='} {aim:<6g} {'met' if met else 'MISSED'}"


def summarize(rows: list[Row]) -> str:
    """The aims of docs/credit/kernel.md beside what was measured, as text."""
    triton = [row for row in rows if row["backend"] == "triton" and row["dtype"] == "float32"]
    lines = []
    for row in triton:
        key = (row["operation"], row["envs"], row["steps"])
        aim = AIMS.get(key) or (SHORT_AIMS.get(key) if row["layout"] == "time" else None)
        if aim and row["actions"] == 4:
            name = f"{key[0]} {key[1]}x{key[2]} {row['layout']}"
            lines.append(f"{name:40}{verdict(row['hot_p50'], aim)}  copy {row['copy_hot']:.2f} us")
    big = [row for row in triton if row["bytes"] >= BIG_BYTES and row["actions"] == 4]
    if big:
        worst = max(big, key=lambda row: row["ratio_hot"])
        name = f"{worst['operation']} {worst['envs']}x{worst['steps']} {worst['layout']}"
        missed = [row for row in big if row["ratio_hot"] > COPY_AIM]
        lines.append(f"{'device / copy, worst of >= 64 MB':40}{verdict(worst['ratio_hot'], COPY_AIM)}  {name}")
        lines.append(f"{'device / copy above the aim':40}{len(missed)} of {len(big)}")
        lines += [
            f"    {row['operation']} {row['envs']}x{row['steps']} {row['layout']}: {row['hot_p50']:.1f} us, "
            f"{row['ratio_hot']:.2f} x copy"
            for row in missed
        ]
    for column, aim in (("host", HOST_AIM), ("host_out", HOST_OUT_AIM)) if triton else ():
        worst = max(triton, key=lambda row: row[column])
        median = statistics.median(row[column] for row in triton)
        lines.append(f"{column + ' us, worst':40}{verdict(worst[column], aim)}  median {median:.2f}")
    for row in rows:
        if row["backend"].startswith("torch"):
            same = [x for x in triton if all(x[key] == row[key] for key in ("operation", "envs", "steps", "layout"))]
            name = f"{row['backend']} / triton, {row['operation']} {row['envs']}x{row['steps']}"
            for ours in same[:1]:
                device, call = row["hot_p50"] / ours["hot_p50"], row["synchronized"] / ours["synchronized"]
                lines.append(f"{name:52}device {verdict(device, TORCH_AIM, at_least=True)}, full call {call:.2f}")
    return "\n".join([*lines, *against_published(triton)])


def against_published(rows: list[Row]) -> list[str]:
    """The published figures over ours, device time and full call, as a geometric mean and the worst problem."""
    ours = {f"{x['operation']} {x['envs']}x{x['steps']}": x for x in rows if x["layout"] == "env" and x["actions"] == 4}
    with PUBLISHED.open(newline="") as file:
        theirs = {f"{x['operation']} {x['envs']}x{x['steps']}": x for x in csv.DictReader(file)}
    common = [name for name in theirs if name in ours]
    lines = []
    for column, published in (("hot_p50", "device"), ("synchronized", "synchronized")) if common else ():
        ratios = [(float(theirs[name][published]) / ours[name][column], name) for name in common]
        mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
        label = f"published / triton, {published}, {len(ratios)} problems"
        lines.append(f"{label:52}mean {mean:.2f}, worst {min(ratios)[0]:.2f} ({min(ratios)[1]})")
    return lines


def draw(rows: list[Row], folder: pathlib.Path) -> None:
    """Device time over bytes, beside the copy, for each layout; nothing without kernels' rows or matplotlib."""
    triton = [row for row in rows if row["backend"] == "triton" and row["dtype"] == "float32"]
    if not triton or importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for panel, layout in zip(panels, ("time", "env"), strict=True):
        chosen = [row for row in triton if row["layout"] == layout]
        for operation in dict.fromkeys(row["operation"] for row in chosen):
            points = sorted((row["bytes"] / 1e6, row["hot_p50"]) for row in chosen if row["operation"] == operation)
            panel.plot(*zip(*points, strict=True), "o", markersize=4, label=operation)
        copies = sorted((row["bytes"] / 1e6, row["copy_hot"]) for row in chosen)
        panel.plot(*zip(*copies, strict=True), "k-", linewidth=1, label="copy of the same bytes")
        panel.set(xscale="log", yscale="log", xlabel="MB read and written", title=f"{layout}-major")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("device time, us")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "credit.svg")
