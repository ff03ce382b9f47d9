"""A run's folder: where it is made, and what it holds."""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.checkpoint import list_checkpoints
from trainer.config import Config, ConfigError
from trainer.files import write_atomically
from trainer.schema import to_yaml


class RunFolder:
    """Paths inside one run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"

    def read_config(self) -> str:
        """The content of ``config.yaml``.

        Raises:
            ConfigError: it is no text, or empty.
        """
        try:
            text = self.config.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.config} cannot be read: {error}") from error
        if not text.strip():
            raise ConfigError(f"{self.config} is empty")
        return text

    @classmethod
    def create(cls, config: Config, base: Path) -> RunFolder:
        """Make a new run's folder; two runs that start in the same second get two folders.

        Args:
            config: names the folder, through ``out`` or the algorithm, env and seed.
            base: what relative paths are relative to.

        Raises:
            ConfigError: ``out`` already holds a run, or the folder cannot be made.
        """
        refuse_taken(config, base)
        try:
            if config.out is not None:
                path = base / config.out
                path.mkdir(parents=True, exist_ok=True)
                return cls(path)
            now = datetime.datetime.now()
            name = f"{now:%H-%M-%S}-{config.algo}-{config.env.id.replace('/', '-')}-{config.seed}"
            parent = base / "runs" / f"{now:%Y-%m-%d}"
            parent.mkdir(parents=True, exist_ok=True)
            return cls(_make_unique(parent, name))
        except OSError as error:
            raise ConfigError(
                f"out={config.out}: the run folder cannot be made: {error.filename}: {error.strerror}"
            ) from error

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """An earlier run's folder.

        Raises:
            ConfigError: there is no run in it.
        """
        folder = cls(path)
        if not folder.config.is_file():
            runs = sorted(inner.parent for inner in path.glob("*/config.yaml"))
            cure = f"; it is a folder of runs, such as resume={runs[0]}" if runs else ""
            raise ConfigError(f"resume={path}: there is no run (no config.yaml){cure}")
        return folder

    @contextmanager
    def held(self) -> Iterator[RunFolder]:
        """Keep other processes from training in the folder; what a killed one leaves behind keeps nobody out.

        Raises:
            ConfigError: another process trains in it; names that one.
        """
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(
                    f"resume={self.path}: {file.read() or 'another process'} trains in it; stop that one first"
                ) from None
            except OSError:  # a file system without locks keeps nobody out
                pass
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield self
            finally:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # also for children that inherited the file

    def write_config(self, config: Config) -> None:
        """Write ``config.yaml``, resolved."""
        write_atomically(self.config, lambda file: file.write(to_yaml(config).encode()))


def refuse_taken(config: Config, base: Path) -> None:
    """Refuse an ``out`` that already holds a run, or what one would overwrite.

    Raises:
        ConfigError: names it.
    """
    if config.out is None:
        return
    folder = RunFolder(base / config.out)
    if folder.config.exists():
        raise ConfigError(f"out={config.out} already holds a run; choose another, or continue it: resume={config.out}")
    for remains in (folder.metrics, *list_checkpoints(folder.checkpoints)):
        if remains.exists():
            name = remains.relative_to(folder.path)
            raise ConfigError(f"out={config.out} holds {name} of a run without config.yaml; choose another")


def _make_unique(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
