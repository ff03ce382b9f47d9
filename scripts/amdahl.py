"""What is a faster part worth? Amdahl's law, predicted and measured, in one report.

    python scripts/amdahl.py preset=h200              # the corners of the project on one GPU: about 9 minutes
    python scripts/amdahl.py preset=h200 resume=true  # without what the table has from the same commit and machine
    python scripts/amdahl.py preset=smoke device=cpu out=runs/amdahl  # the same report from a laptop, in under a minute
    python scripts/amdahl.py preset=h200 only=Ant     # cells whose name has this text; seconds=100 cuts the rest off
    python scripts/amdahl.py preset=h200 shard=1/2 device=cuda:0   # half of the cells; another command, the other half
    python scripts/amdahl.py report=docs/results/amdahl.csv        # the page anew from the newest rows of a table

A preset is a file under ``scripts/amdahl_presets``. The variants of a cell (credit backends, loss backends, CUDA graphs
on and off) train in one process in turns. Adds each cell to ``<out>/amdahl.csv`` once it is measured, so that any
command may be stopped and resumed, and writes ``<out>/amdahl.html``, which needs no network, with its summary and one
picture as ``amdahl.md`` and ``amdahl.svg``; Ctrl-C ends the measuring, not the report. Exit status: 0, or 1 where
something is refused or no cell was measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

from scripts.amdahl_cells import Cell, expand, read_preset, shard_of
from scripts.amdahl_html import markdown, page, picture
from scripts.amdahl_measure import EnvShelf, measure
from scripts.amdahl_stats import Row, not_measured, rows_of
from scripts.amdahl_store import Store, read_rows
from scripts.amdahl_tables import closing_lines, figures_text, title
from scripts.overrides import parse_options
from scripts.provenance import provenance
from scripts.refusals import told_in_one_line
from trainer.config import ConfigError
from trainer.files import write_atomically

PACKAGES = ("triton", "envpool", "mujoco-warp", "warp-lang", "gymnasium")


@dataclass
class Options:
    """What the command line may set."""

    preset: str = "smoke"
    device: str = "auto"
    seed: int = 1
    only: str = ""  #: measure only cells with this text in their name
    shard: str = "1/1"  #: ``i/k``: the i-th of k stretches of the cells, of about equal budgets
    resume: bool = False  #: keep cells that the table has from the same commit and machine
    seconds: float | None = None  #: another budget than the preset's
    out: str = "docs/results"
    report: str = ""  #: a table to draw the page of, instead of measuring


def _measure_all(seconds: float, cells: list[Cell]) -> Iterator[list[Row]]:
    """Each cell's rows, told as they come; a cell that fails or finds no time left is one row that says so."""
    start = time.monotonic()
    shelf, interrupted = EnvShelf(), False
    try:
        for cell in cells:
            spent = time.monotonic() - start
            if interrupted or spent + cell.seconds > seconds:
                rows = [
                    not_measured(cell, "interrupted" if interrupted else f"{spent:.0f} of {seconds:.0f} s were spent")
                ]
            else:
                try:
                    rows = _measured_rows(cell, shelf)
                except KeyboardInterrupt:  # Ctrl-C ends the measuring, not the report
                    rows, interrupted = [not_measured(cell, "interrupted")], True
            print(f"[{time.monotonic() - start:4.0f} s] {_told(rows)}", flush=True)
            yield rows
    finally:
        shelf.close()


def _measured_rows(cell: Cell, shelf: EnvShelf) -> list[Row]:
    try:
        return rows_of(measure(cell, shelf))
    except Exception as error:  # out of memory, a kernel that does not compile: the other cells go on
        return [not_measured(cell, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")]


def _told(rows: list[Row]) -> str:
    pairs = [f"{row.variant} {row.measured:.3f}x ({row.predicted:.3f}x predicted)" for row in rows if row.is_pair]
    return f"{title(rows[0])}: {', '.join(pairs) or f'not measured: {rows[0].note}'}"


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def _measure_into(table: Path, options: Options) -> None:
    preset = read_preset(options.preset)
    cells = shard_of(list(expand(preset, options.device, options.seed)), options.shard)
    cells = [cell for cell in cells if options.only in title(cell.labels)]
    if not cells:
        raise ConfigError(f"only={options.only} shard={options.shard}: preset={options.preset} has no such cell")
    seconds = preset.seconds if options.seconds is None else options.seconds
    if not seconds > 0:  # NaN neither
        raise ConfigError(f"seconds={seconds} must be greater than 0")
    store = Store(table, {name: str(value) for name, value in provenance(PACKAGES).items()})
    if options.resume:
        measured = store.measured()
        kept, cells = len(cells), [cell for cell in cells if cell.labels not in measured]
        print(f"resume=true: {kept - len(cells)} of {kept} cells were measured before")
    for found in _measure_all(seconds, cells):
        store.add(found)


def run(options: Options) -> int:
    """Measure, write the report of what the table has, print the summary; returns the exit status."""
    table = Path(options.report or Path(options.out) / "amdahl.csv")
    if not options.report:
        _measure_into(table, options)
    elif not table.is_file():
        raise ConfigError(f"report={table}: there is no such table; preset=... measures one")
    rows, origin = read_rows(table)
    for name, content in (("html", page), ("md", markdown), ("svg", picture)):
        _write(table.with_name(f"amdahl.{name}"), content(rows, origin))
    print(figures_text(rows), *closing_lines(rows), sep="\n")
    print(f"report: {table.with_name('amdahl.html')}")
    return 0 if any(row.is_pair for row in rows) else 1


def main() -> None:
    """Run, or refuse in one line."""
    with told_in_one_line(ValueError):
        sys.exit(run(parse_options(Options, sys.argv[1:])))


if __name__ == "__main__":
    main()
