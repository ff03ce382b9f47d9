"""The benchmark of the engines measures what it says, and one case after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import envs
from scripts import bench_env

SCRIPT = Path(bench_env.__file__)
BRIEF = ["--engine", "torch", "--seconds", "0.02", "--windows", "2", "--no-save"]


def test_lists_multiply_and_an_option_given_twice_is_swept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--option", "max_episode_steps=3", "dtype=float64", "max_episode_steps=5"]
    lists = ["--env", "CartPole", "Pendulum", "--num-envs", "1", "7", "--captured", "no", "random"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *BRIEF, *lists, *options])
    found = [
        (case.env, case.options["max_episode_steps"], case.num_envs, case.captured)
        for case in bench_env.cases(bench_env.parse_arguments())
        if case.options["dtype"] == "float64"
    ]
    expected = [(env, limit, n, c) for env in lists[1:3] for limit in (3, 5) for n in (1, 7) for c in ("no", "random")]
    assert found == expected


def test_a_row_holds_rates_memory_and_the_steps_of_every_env() -> None:
    row = bench_env.measure(bench_env.Case("CartPole", "torch", 7, "cpu", "no", 0.02, 3, 0.0, {}))
    assert 0 < float(row["p20"]) <= float(row["steps_per_second"]) <= float(row["p80"])
    assert row["env"] == "CartPole-v1"
    assert float(row["rss_mib"]) > 0
    assert float(row["env_steps"]) > 0


def test_filler_rows_are_not_counted_as_steps() -> None:
    env = envs.make("Pendulum", "torch", 5, device="cpu", max_episode_steps=3)
    env.reset()
    advance = bench_env.take_turns(env, bench_env.random_actions(env.single_action_space, 5, env.device), policy_ms=0.0)
    total = advance(None)
    for _ in range(11):
        total = advance(total)
    assert int(total) == 5 * 9


def test_rows_are_printed_as_they_come_and_a_refused_case_is_one_line() -> None:
    command = [sys.executable, str(SCRIPT), *BRIEF, "--env", "Pendulum", "--captured", "no", "random"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Pendulum-v1" in result.stdout.splitlines()[1]
    assert result.stderr.splitlines()[-1] == "--captured random: torch on cpu cannot be captured in a CUDA graph"
    assert result.returncode == 1
