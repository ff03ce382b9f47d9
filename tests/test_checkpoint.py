"""Checkpoint files: whole or not there, and nothing in them is executed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import CheckpointError
from trainer.files import write_atomically


def state(number: float = 1.0) -> dict:
    return {"modules": {"policy": {"weight": torch.full((3, 2), number)}}, "counters": {"env_steps": 7}, "env": None}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoint_and_the_one_before_are_kept(tmp_path: Path):
    for update in (1, 2, 9, 10):
        checkpoint.save(tmp_path, update, state(update))
    assert names(tmp_path) == ["update-00000009.pt", "update-00000010.pt"]
    loaded = checkpoint.load_newest(tmp_path, print)
    assert loaded["update"] == 10
    assert torch.equal(loaded["modules"]["policy"]["weight"], torch.full((3, 2), 10.0))


def test_a_run_that_went_back_leaves_no_later_checkpoint_behind(tmp_path: Path):
    for update in (300, 400):
        checkpoint.save(tmp_path, update, state(update))
    (tmp_path / "update-00000500.pt").write_bytes(b"torn")
    checkpoint.save(tmp_path, 450, state(450))
    assert names(tmp_path) == ["update-00000400.pt", "update-00000450.pt"]


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_malicious_checkpoint_is_refused_and_runs_nothing(tmp_path: Path):
    marker = tmp_path / "marker"
    path = tmp_path / "update-00000001.pt"
    torch.save({"format": checkpoint.FORMAT, "update": 1, **state(), "extra": Malicious(marker)}, path)
    with pytest.raises(CheckpointError, match=r"update-00000001\.pt: not a readable checkpoint") as refusal:
        checkpoint.load(path)
    assert "\n" not in str(refusal.value)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the same file does harm to a careless reader"


@pytest.mark.parametrize("kept", [0, 1, 300, 0.5, 0.99])
def test_a_torn_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path, kept: float):
    checkpoint.save(tmp_path, 1, state(1.0))
    torn = checkpoint.save(tmp_path, 2, state(2.0))
    content = torn.read_bytes()
    torn.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    notices: list[str] = []
    assert checkpoint.load_newest(tmp_path, notices.append)["update"] == 1
    assert len(notices) == 1
    assert "update-00000002.pt" in notices[0]
    (tmp_path / "update-00000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"update-00000002\.pt"):
        checkpoint.load_newest(tmp_path, notices.append)
    assert len(notices) == 2, "there is none before the last"


def test_a_folder_without_checkpoints_and_a_missing_file_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: holds no checkpoint"):
        checkpoint.load_newest(tmp_path, print)
    with pytest.raises(CheckpointError, match=r"gone\.pt: no such checkpoint"):
        checkpoint.load(tmp_path / "gone.pt")


@pytest.mark.parametrize("content", [[1, 2], {"format": checkpoint.FORMAT + 1}, {"weight": torch.ones(1)}])
def test_another_format_is_refused(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other\.pt: checkpoint format"):
        checkpoint.load(tmp_path / "other.pt")


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint.save(tmp_path, 1, state())
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.save(tmp_path, 2, state())
    assert str(refusal.value) == f"{tmp_path}/update-00000002.pt: could not be written: No space left on device"
    assert names(tmp_path) == ["update-00000001.pt"]
    assert checkpoint.load_newest(tmp_path, print)["update"] == 1


def test_a_disk_that_fills_up_inside_a_checkpoint_is_named_and_leaves_the_previous_one(tmp_path: Path):
    checkpoint.save(tmp_path, 1, state())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"update-00000002\.pt: could not be written: File too large$"):
            checkpoint.save(tmp_path, 2, {**state(), "large": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert names(tmp_path) == ["update-00000001.pt"]


def test_an_atomic_write_that_fails_keeps_the_old_content_and_names_the_file(tmp_path: Path):
    path = tmp_path / "config.yaml"
    write_atomically(path, lambda file: file.write(b"old"))
    with pytest.raises(OSError, match=r"No space left on device: '.*config\.yaml'"):
        write_atomically(path, full_disk)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["config.yaml"]


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError, match=f"'{folder}'"):
            write_atomically(folder, lambda file: file.write(b"x"))


def test_files_are_as_readable_as_the_umask_allows(tmp_path: Path):
    former = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    finally:
        os.umask(former)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def _save_for_ever(folder: Path, ready) -> None:
    for update in range(1, 10**6):
        checkpoint.save(folder, update, {"weight": torch.full((200, 200), float(update))})
        ready.set()


def test_after_a_kill_at_any_moment_the_newest_checkpoint_is_whole(tmp_path: Path):
    context = multiprocessing.get_context("forkserver")  # forks a process that has torch and no threads
    context.set_forkserver_preload(["trainer.checkpoint"])
    for trial in range(8):
        ready = context.Event()
        process = context.Process(target=_save_for_ever, args=(tmp_path, ready))
        process.start()
        assert ready.wait(30)
        time.sleep(random.Random(trial).uniform(0.0, 0.05))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        loaded = checkpoint.load(checkpoint.list_checkpoints(tmp_path)[0])
        assert torch.equal(loaded["weight"], torch.full((200, 200), float(loaded["update"])))
    checkpoint.save(tmp_path, 10**6, state())
    assert not list(tmp_path.glob(".*")), "what the killed processes left is cleared"


def test_weights_that_do_not_fit_are_named(tmp_path: Path):
    module = torch.nn.Linear(2, 3)
    saved = module.state_dict()
    checkpoint.load_module(module, saved, "here")
    for broken, message in (
        ({**saved, "weight": torch.ones(3, 5)}, r"here: tensor weight has shape \(3, 5\) .* \(3, 2\)"),
        ({"weight": saved["weight"]}, "here: the checkpoint has no tensor bias"),
        ({**saved, "gain": torch.ones(1)}, "here: this configuration has no tensor gain"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_module(module, broken, "here")


def test_random_numbers_go_on_where_they_were():
    saved = checkpoint.rng_state(torch.device("cpu"))
    expected = torch.rand(5)
    torch.manual_seed(0)
    checkpoint.restore_rng_state(saved, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)
