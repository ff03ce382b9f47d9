"""Agents learn: a short run in every test session, and the presets' own claims as ``-m slow``."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.schema import compose_config
from trainer.session import train

QUIET = ("device=cpu", "wandb.mode=disabled", "logging.console=none")


def final_summary(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    config = compose_config([*overrides, *QUIET, f"out={tmp_path / 'run'}"])
    assert train(config, tmp_path) == 0
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def test_cartpole_learns_within_80_thousand_steps(tmp_path: Path):
    """A policy that does not learn stays near 20; seeds of a correct PPO are far beyond 200 here."""
    summary = final_summary(tmp_path, "env=CartPole", "total_steps=80000", "seed=1")
    assert summary["episode_return"] >= 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("env", "least"), [("CartPole", 475), ("Pendulum", -300), ("HalfCheetah", 1400)])
def test_a_preset_reaches_what_it_claims(tmp_path: Path, env: str, least: float, seed: int):
    assert final_summary(tmp_path, f"env={env}", f"seed={seed}")["episode_return"] >= least
