"""Where a measured row comes from: machine, versions, commit and command, as columns of a results table."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from envs.cores import usable_cores


def provenance(packages: Iterable[str] = ()) -> dict[str, str | int]:
    """Columns that say on what and with what a row was measured; ``packages`` add their versions."""
    versions = {name: _version(name) for name in ("torch", *packages)}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "versions": " ".join([f"python={platform.python_version()}", *(f"{k}={v}" for k, v in versions.items() if v)]),
        "command": " ".join(["python", *sys.argv]),
    }


def need_cuda(parser: argparse.ArgumentParser) -> None:
    """End a script that measures a GPU where there is none: one line, exit status 1."""
    if not torch.cuda.is_available():
        parser.exit(1, f"error: {parser.prog} measures a CUDA device, and torch {torch.__version__} sees none\n")


def append_rows(path: Path, rows: list[dict[str, str | int | float]]) -> None:
    """Add ``rows`` to the CSV at ``path``; the first rows ever written decide its columns.

    Raises:
        ValueError: the file's columns are not those of the rows.
    """
    columns = list(rows[0])
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != columns:
            raise ValueError(f"{path} has the columns {found}, the rows have {columns}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def format_table(rows: Sequence[Mapping[str, object]], columns: Iterable[str]) -> str:
    """The ``columns`` of ``rows`` as aligned text."""
    cells = [list(columns), *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Short hash of the checkout, with ``+`` where tracked files differ from it; what ``ROLLSCAN_COMMIT`` says instead
    is for copies without a history. Empty where neither is there."""
    if "ROLLSCAN_COMMIT" in os.environ:
        return os.environ["ROLLSCAN_COMMIT"]
    root = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
