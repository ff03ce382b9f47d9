"""The table of `scripts/amdahl.py`: cells are added as soon as they are measured, a report is what the table has."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from scripts.amdahl_cells import Labels
from scripts.amdahl_stats import Row
from scripts.provenance import append_rows

#: Columns in which rows of one report may differ; the others say by which code and on what it was measured.
_OF_A_COMMAND = ("date", "command")
_COLUMNS = {field.name: field.type for field in fields(Row)}
_PARSE: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}


class Store:
    """A table in a CSV file.

    Args:
        path: of the file, which need not be there yet.
        origin: where rows that are added come from (`scripts.provenance`).

    Raises:
        ValueError: the file is there, but has other columns than rows have.
    """

    def __init__(self, path: Path, origin: Mapping[str, str]):
        self._path, self._origin = path, dict(origin)
        if path.is_file():
            _lines(path)  # refused now, not once a cell is measured

    def add(self, rows: list[Row]) -> None:
        """Write rows to the end of the table at once."""
        append_rows(self._path, [{**self._origin, **asdict(row)} for row in rows])

    def measured(self) -> set[Labels]:
        """Cells that the table has as this code, on this machine, measured them."""
        if not self._path.is_file():
            return set()
        own = _source(self._origin)
        return {row.labels for row in map(_row, _lines(self._path, own)) if row.rounds}


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The newest rows of every cell, and where they come from, in the order of the cells' labels.

    They are those that were measured as the table's last row was: by the same code, on the same machine. A cell that
    one command left out and another one measured is measured.

    Raises:
        ValueError: the table is empty, or has other columns than rows have.
    """
    lines = _lines(path)
    origin = {name: text for name, text in lines[-1].items() if name not in _COLUMNS}
    same = _lines(path, _source(origin))
    newest = {(row.labels, row.variant): row for row in map(_row, same)}.values()
    measured = {row.labels for row in newest if row.rounds}
    rows = [row for row in newest if row.rounds or row.labels not in measured]
    commands = "; ".join(dict.fromkeys(line["command"] for line in same))
    return sorted(rows, key=lambda row: row.labels), {**origin, "command": commands}


def _source(origin: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in origin.items() if name not in (*_OF_A_COMMAND, *_COLUMNS)}


def _lines(path: Path, source: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """A table's lines, of one source where one is given."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    missing = [name for name in _COLUMNS if not lines or name not in lines[0]]
    if missing:
        problem = f"there is no column {missing[0]}, another version wrote it" if lines else "the table is empty"
        raise ValueError(f"{path}: {problem}; take another folder, out=...")
    return [line for line in lines if source is None or _source(line) == source]


def _row(line: Mapping[str, str]) -> Row:
    return Row(**{name: _PARSE[str(kind)](line[name]) for name, kind in _COLUMNS.items()})
