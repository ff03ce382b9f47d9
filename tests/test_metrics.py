"""Where the numbers go: metrics.jsonl, wandb and summary.json."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from small_runs import rows, run_until, small_config

from trainer import distributed, session
from trainer.config import WandbConfig
from trainer.metrics import MetricsFile, WandbLogger, finite, read_metrics, write_json
from trainer.run_folder import RunFolder
from trainer.schema import compose_for_resume
from trainer.session import train
from trainer.timing import PHASES

CONTRACT = {"update", "env_steps", "steps_per_second", "episode_return", "episode_length", "credit_backend"}


def wandb_records(run: Path) -> list[Any]:
    """The records of the one ``.wandb`` file in a folder, once it ends with the exit: wandb's service may be late."""
    (path,) = run.rglob("*.wandb")
    deadline = time.monotonic() + 20
    while not (records := records_in(path.read_bytes())) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{path} does not end with the exit"
        time.sleep(0.1)
    return records


def records_in(data: bytes) -> list[Any]:
    """The records of a ``.wandb`` file: a LevelDB log of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    position, parts, records = 7, b"", []
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            break
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def wandb_history(run: Path) -> list[dict[str, Any]]:
    histories = [record.history for record in wandb_records(run) if record.WhichOneof("record_type") == "history"]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for history in histories
    ]


def test_offline_wandb_holds_every_update_once_also_after_resuming_from_an_older_checkpoint(tmp_path: Path):
    config = small_config("out=run", "wandb.mode=offline", "checkpoint.interval_updates=2", "wandb.group=mine")
    assert run_until(4, config, tmp_path) == 143
    folder = tmp_path / "run"
    (folder / "checkpoints/update-00000004.pt").unlink()
    first = next((folder / "wandb").glob("offline-run-*"))
    run = RunFolder.existing(folder)
    resumed = compose_for_resume(run.config.read_text(), ["total_steps=350"])
    assert train(resumed, tmp_path, run) == 0

    (second,) = set((folder / "wandb").glob("offline-run-*")) - {first}
    local = rows(folder)
    assert [row["update"] for row in local] == list(range(1, len(local) + 1))
    assert len(local) > 4
    for wandb_run, expected in ((second, local), (first, local[:2])):
        history = wandb_history(wandb_run)[: len(expected)]
        assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in history] == [
            {key: value for key, value in row.items() if value is not None} for row in expected
        ]
    assert len(wandb_history(first)) == 4
    assert len(wandb_history(second)) == len(local)

    records = wandb_records(second)
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert {(m.name or m.glob_name, m.step_metric) for m in metrics} >= {("*", "env_steps")}
    (started,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert started.run_group == "mine"
    previous = {item.key: json.loads(item.value_json) for item in started.config.update}["previous_wandb_run"]
    assert first.name.endswith(previous)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["updates"] == len(local)


@pytest.mark.parametrize("settings", [["credit.probe=true", "credit.probe_interval=2"], ["algo=impala"]])
def test_an_offline_wandb_run_holds_every_metric_of_every_update_at_the_same_steps(tmp_path: Path, settings: list[str]):
    config = small_config("out=run", "wandb.mode=offline", "wandb.tags=[mine]", "total_steps=400", *settings)
    assert train(config, tmp_path) == 0
    local, history = rows(tmp_path / "run"), wandb_history(tmp_path / "run" / "wandb")
    assert len(history) == len(local) > 3
    seen: set[str] = set()
    for number, (row, logged) in enumerate(zip(local, history, strict=True)):
        assert logged["_step"] == number
        known = {key: value for key, value in row.items() if value is not None}
        assert {key: logged[key] for key in known} == known
        seen |= known.keys()
    assert seen >= CONTRACT | {
        f"{kind}/{phase}{unit}" for kind, unit in (("time", "_ms"), ("share", "")) for phase in PHASES
    }
    (started,) = [r.run for r in wandb_records(tmp_path / "run") if r.WhichOneof("record_type") == "run"][:1]
    assert set(started.tags) == {"mine", config.algo, "CartPole-v1", "envpool", "credit-torch"}


class FakeRun:
    """A wandb run that fails in the method named by ``broken``."""

    id = "abc"

    def __init__(self, broken: str):
        self.broken = broken
        self.logged: list[dict] = []
        self.summary = {}

    def _maybe_fail(self, name: str) -> None:
        if name == self.broken:
            raise RuntimeError(f"{name} failed\nwith a second line")

    def define_metric(self, *_: Any, **__: Any) -> None:
        self._maybe_fail("define_metric")

    def log(self, metrics: dict) -> None:
        self._maybe_fail("log")
        self.logged.append(metrics)

    def finish(self, exit_code: int) -> None:
        self._maybe_fail("finish")


@pytest.mark.parametrize("broken", ["import", "init", "define_metric", "log", "finish"])
def test_an_absent_or_failing_wandb_is_told_once_and_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, capsys: pytest.CaptureFixture[str]
):
    def init(**_: Any) -> FakeRun:
        if broken == "init":
            raise ConnectionError("no network")
        return FakeRun(broken)

    module = types.SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", None if broken == "import" else module)  # type: ignore[arg-type]
    assert train(small_config("out=run", "wandb.mode=online", "total_steps=130"), tmp_path) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert len(told) == 1
    assert "wandb is off for this run" in told[0]
    assert "second line" not in told[0]
    assert [row["update"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_only_rank_zero_writes_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for name in ("sum_", "broadcast_parameters_", "merge_moments"):
        monkeypatch.setattr(distributed, name, lambda tensor: tensor)
    monkeypatch.setattr(distributed, "any_rank", lambda flag, _: flag)
    monkeypatch.setattr(session, "WandbLogger", None)  # calling it would fail
    assert train(small_config("out=run", "wandb.mode=online", "total_steps=130"), tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_holds_what_the_contract_says(tmp_path: Path):
    assert train(small_config("out=run", "total_steps=130"), tmp_path) == 0
    folder = tmp_path / "run"
    assert {p.name for p in folder.glob("[!.]*")} == {"config.yaml", "metrics.jsonl", "checkpoints", "summary.json"}
    assert compose_for_resume((folder / "config.yaml").read_text(), []) == small_config("out=run", "total_steps=130")
    got = rows(folder)
    for row in got:
        assert set(row) >= CONTRACT | {f"time/{phase}_ms" for phase in PHASES} | {"time/total_ms"}
        assert any(key.startswith("loss/") for key in row)
        assert sum(row[f"time/{phase}_ms"] for phase in PHASES) == pytest.approx(row["time/total_ms"])
    assert got[0]["episode_return"] is None, "no episode has ended in the first 8 steps"
    assert got[-1]["episode_return"] == got[-1]["episode_length"], "CartPole pays 1 a step"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["env_id"] == "CartPole-v1"
    assert (summary["updates"], summary["env_steps"]) == (3, got[-1]["env_steps"])


def test_a_metrics_file_that_was_cut_short_loses_only_the_cut_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, keep_updates=0)
    for update in (1, 2, 3):
        file.write({"update": update, "loss/total": math.nan})
    file.close()
    path.write_text(path.read_text()[:-5])
    assert read_metrics(path) == [{"update": 1, "loss/total": None}, {"update": 2, "loss/total": None}]
    resumed = MetricsFile(path, keep_updates=1)
    assert [row["update"] for row in resumed.kept] == [1]
    resumed.write({"update": 2})
    resumed.close()
    assert [row["update"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("tail", [b"\xff\xfe\x80", b"[1]", b"rollscan: stopping", b'{"a": 1}', b'{"update": null}'])
def test_what_is_no_row_ends_a_metrics_file(tmp_path: Path, tail: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update": 1}\n' + tail + b"\n")
    assert read_metrics(path) == [{"update": 1}]


def test_a_full_disk_is_named_and_no_line_is_half_written(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, keep_updates=0)
    file.write({"update": 1})
    whole = path.read_bytes()

    class Full:
        """A file that takes ten bytes more."""

        def __init__(self, inner: Any):
            self.tell, self.truncate, self.close, self.inner = inner.tell, inner.truncate, inner.close, inner

        def write(self, line: bytes) -> int:
            return self.inner.write(line[:10])

    file._file = Full(file._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'") as full:
        file.write({"update": 2, "loss/total": 1.0})
    file.close()
    assert full.value.errno == errno.ENOSPC
    assert path.read_bytes() == whole


def test_a_disk_that_is_full_ends_a_run_with_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*run/config\.yaml'"):
        train(small_config("out=run"), tmp_path)
    assert list((tmp_path / "run").glob("[!.]*")) == []


def test_json_has_null_where_a_number_is_not_finite(tmp_path: Path):
    assert [finite(x) for x in (math.nan, math.inf, -math.inf, 1.5, 2, "a", None)] == [None] * 3 + [1.5, 2, "a", None]
    write_json(tmp_path / "summary.json", {"episode_return": math.nan, "updates": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"episode_return": None, "updates": 3}


def test_a_disabled_wandb_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    notices: list[str] = []
    logger = WandbLogger(WandbConfig(mode="disabled"), tmp_path, "name", [], {}, [{"update": 1}], notices.append)
    logger.log({"update": 2})
    logger.finish({}, 0)
    assert notices == []
    assert logger.id is None
