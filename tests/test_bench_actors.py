"""`scripts/bench_actors.py`: what it refuses before it measures anything."""

from __future__ import annotations

import sys

import pytest

from scripts import bench_actors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["algo=ppo"], "algo=ppo has no actors"),
        (["impala.queue=3"], "impala.queue: there is no such key"),
        (["num_envs=16", "--against", "env.pools=2", "env.pools=5"], "num_envs=16 does not divide into env.pools=5"),
    ],
)
def test_settings_of_any_row_are_refused_before_anything_is_measured(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["bench_actors.py", "env=CartPole", *arguments])
    monkeypatch.setattr(bench_actors, "raw_rate", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as end:
        bench_actors.main()
    assert end.value.code == 2
    assert named in capsys.readouterr().err
