"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an `OSError` that names no file, such as a full disk's, the name of this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that at every moment the old content or the new one is there whole.

    A temporary file beside it is written, flushed to the disk, and renamed; if anything fails, it is removed and the
    old file stays as it was.

    Raises:
        OSError: the disk is full or the path a folder, say; it names the file.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
