"""Where a run's numbers go: ``metrics.jsonl``, wandb and ``summary.json``. The local files are complete without
wandb."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import WandbConfig
from trainer.files import naming, write_atomically

Metrics = dict[str, Any]


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a number becomes null, also inside of lists and dictionaries."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[Metrics]:
    """The objects of a ``metrics.jsonl``, up to the first line that is no update's: a kill cuts the last one short."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            break
        if not isinstance(row, dict) or type(row.get("update")) is not int:
            break
        rows.append(row)
    return rows


class MetricsFile:
    """One JSON object per line and update, written as it comes."""

    def __init__(self, path: Path, keep_updates: int):
        """Open for appending, keeping only updates up to ``keep_updates``: a resumed run holds each update once."""
        self.kept = [row for row in read_metrics(path) if row["update"] <= keep_updates]
        text = "".join(json.dumps(row) + "\n" for row in self.kept)
        write_atomically(path, lambda file: file.write(text.encode()))
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: Metrics) -> None:
        """Append one update.

        Raises:
            OSError: the disk is full, say; it names the file, which ends with the update before.
        """
        line = (json.dumps(finite(metrics), allow_nan=False) + "\n").encode()
        end = self._file.tell()
        with naming(self._path):
            if self._file.write(line) < len(line):  # a disk that fills up takes a part
                self._file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbLogger:
    """Weights & Biases beside the local files; whatever goes wrong in it is told once and never stops the run.

    The one axis is ``env_steps``. Every update is logged once: a resumed run starts a new wandb run in the same group
    and first replays the history up to its checkpoint, so that nothing is dropped because an earlier process had gone
    further.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        name: str,
        tags: list[str],
        settings: dict[str, Any],
        replay: list[Metrics],
        notice: Callable[[str], None],
    ):
        self.id: str | None = None
        self._run: Any = None
        self._notice = notice
        if config.mode == "disabled":
            return
        try:
            import wandb

            self._run = wandb.init(
                project=config.project,
                group=config.group,
                name=config.name or name,
                tags=[*config.tags, *tags],
                mode=config.mode,  # pyright: ignore[reportArgumentType]
                dir=str(folder),
                config=settings,
                reinit="finish_previous",
                settings=wandb.Settings(silent=True, console="off"),
            )
            self._run.define_metric("env_steps")
            self._run.define_metric("*", step_metric="env_steps")
            self.id = self._run.id
        except Exception as error:
            self._give_up(error)
        for metrics in replay:
            self.log(metrics)

    def _give_up(self, error: Exception) -> None:
        text = next(iter(str(error).splitlines()), "")
        self._notice(f"wandb is off for this run ({type(error).__name__}: {text[:150]}); metrics.jsonl is complete")
        self._run = None

    def log(self, metrics: Metrics) -> None:
        """One commit per update."""
        if self._run is None:
            return
        try:
            self._run.log({key: value for key, value in metrics.items() if value is not None})
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Metrics, exit_status: int) -> None:
        """End the wandb run with its summary; a run that failed is marked so."""
        if self._run is None:
            return
        try:
            self._run.summary.update(summary)
            self._run.finish(exit_code=exit_status)
        except Exception as error:
            self._give_up(error)


def write_json(path: Path, content: Metrics) -> None:
    """Write a JSON file whole or not at all."""
    text = json.dumps(finite(content), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
