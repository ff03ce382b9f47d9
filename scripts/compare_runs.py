"""Put runs side by side: ``python scripts/compare_runs.py runs/a runs/b [...] [--html report.html]``.

Prints tables (settings that differ, phases, what the credit backend is worth, results) and writes, if asked to, one
HTML file with the same tables and the curves, which needs no network. Exit status: 0, or 1 where a file is missing
or torn, with one line that names it.
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

from scripts.compare_data import Comparison, RunError, compare, read_run
from scripts.compare_html import page
from scripts.compare_tables import Table, tables
from trainer.files import write_atomically


def names(paths: list[Path]) -> list[str]:
    """The folders' names, or where two are alike the paths as they were given.

    Raises:
        RunError: a folder was given twice.
    """
    resolved = [path.resolve() for path in paths]
    for path, folder in zip(paths, resolved, strict=True):
        if resolved.count(folder) > 1:
            raise RunError(f"{path}: this run was given twice")
    short = [folder.name for folder in resolved]
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
    parser.add_argument("first", type=Path, metavar="run", help="run folders, two or more")
    parser.add_argument("others", nargs="+", type=Path, metavar="run", help=argparse.SUPPRESS)
    parser.add_argument("--html", type=Path, help="also write a report into this file")
    parser.add_argument("--warmup", type=int, default=5, help="first updates that costs leave out (default 5)")
    arguments = parser.parse_args()
    try:
        comparison = read([arguments.first, *arguments.others], arguments.warmup)
        console = Console(highlight=False)
        for table in tables(comparison):
            show(table, console)
        if arguments.html is not None:
            write_atomically(arguments.html, lambda file: file.write(page(comparison).encode()))
            console.print(f"report: {arguments.html}", markup=False, soft_wrap=True)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
