"""Put runs side by side: ``python scripts/compare_runs.py runs/a runs/b [...] [--html report.html]``.

The folder of a sweep stands for its runs, and one run alone is shown by itself. ``--group NAME`` takes the runs under
``runs/`` that were started with ``wandb.group=NAME`` instead, whether they were uploaded or not. Prints tables
(settings that differ, phases, what the credit backend is worth, results) and writes, if asked to, one HTML file with
the same tables and the curves, which needs no network.
Exit status: 0, or 1 where a file is missing or torn, with one line that names it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from scripts.compare_data import Comparison, RunError, compare, read_run, read_settings
from scripts.compare_html import page
from scripts.compare_tables import Table, tables
from scripts.refusals import told_in_one_line
from trainer.files import naming, write_atomically


def runs_of_group(folder: Path, group: str, project: str | None) -> list[Path]:
    """The runs below a folder that belong to a wandb group, in the order of their paths.

    Args:
        folder: searched to any depth.
        group: their ``wandb.group``.
        project: their ``wandb.project``; None takes any.

    Raises:
        RunError: there are fewer than two, or a ``config.yaml`` cannot be read.
    """
    found = []
    for path in sorted(folder.rglob("config.yaml")):
        if "wandb" in path.relative_to(folder).parts:  # its own copies
            continue
        settings = read_settings(path)
        if settings["wandb.group"] == group and project in (None, settings["wandb.project"]):
            found.append(path.parent)
    if len(found) < 2:
        where = f"{folder}" if project is None else f"{folder} in the project {project}"
        raise RunError(f"--group {group}: {len(found)} runs under {where} have wandb.group={group}, two are needed")
    return found


def chosen(arguments: argparse.Namespace) -> list[Path]:
    """The run folders that the command line means.

    Raises:
        RunError: neither folders nor a group, or both.
    """
    if arguments.group is not None and not arguments.runs:
        return runs_of_group(arguments.under, arguments.group, arguments.project)
    if arguments.group is not None or not arguments.runs:
        raise RunError(f"{len(arguments.runs)} run folders: give one or more, or --group NAME without any")
    return [run for folder in arguments.runs for run in runs_in(folder)]


def runs_in(folder: Path) -> list[Path]:
    """A run's own folder, or the runs in that of a sweep (``-m out=...``), in the order of their jobs."""
    if (folder / "config.yaml").is_file():
        return [folder]
    found = sorted((path.parent for path in folder.glob("*/config.yaml")), key=lambda run: (len(run.name), run.name))
    return found or [folder]


def names(paths: list[Path]) -> list[str]:
    """The folders' names, or where two are alike the paths as they were given.

    Raises:
        RunError: a folder was given twice.
    """
    resolved = [path.resolve() for path in paths]
    for path, folder in zip(paths, resolved, strict=True):
        if resolved.count(folder) > 1:
            raise RunError(f"{path}: this run was given twice")
    # the number of a sweep's job says nothing alone
    short = ["/".join(folder.parts[-2 if folder.name.isdigit() else -1 :]) for folder in resolved]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def show(table: Table, console: Console) -> None:
    """Print one table between its title and how its figures came about."""
    rich = RichTable(box=box.SIMPLE_HEAD)
    rich.add_column(no_wrap=True)
    for name in table.columns:
        rich.add_column(Text(name), justify="right", overflow="fold")
    for name, cells in table.rows:
        rich.add_row(Text(name), *(Text(cell) for cell in cells))
    console.print(Text(table.title, "bold"), rich, Text(table.note, "dim"), "", sep="\n")


def read(paths: list[Path], warmup: int) -> Comparison:
    """The runs in these folders, compared.

    Raises:
        RunError: one of them cannot be.
    """
    return compare([read_run(path, name) for path, name in zip(paths, names(paths), strict=True)], warmup)


def main() -> None:
    """Compare the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="run", help="folders of runs or sweeps")
    parser.add_argument("--group", help="instead: the runs of this wandb group")
    parser.add_argument("--project", help="only those of this wandb project (default: any)")
    parser.add_argument("--under", type=Path, default=Path("runs"), help="where --group looks (default runs)")
    parser.add_argument("--html", type=Path, help="also write a report into this file")
    parser.add_argument("--warmup", type=int, default=5, help="first updates that costs leave out (default 5)")
    arguments = parser.parse_args()
    with told_in_one_line(RunError), naming(Path("standard output")):
        comparison = read(chosen(arguments), arguments.warmup)
        console = Console(highlight=False)
        for table in tables(comparison):
            show(table, console)
        if arguments.html is not None:
            write_atomically(arguments.html, lambda file: file.write(page(comparison).encode()))
            console.print(f"report: {arguments.html}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
