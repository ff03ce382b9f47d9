"""What an update reads of a rollout: the rest is cleared, and the first number that is not finite is named."""

import copy

import gymnasium
import pytest
import torch
from fake_env import Script, ScriptedEnv, make_collector, make_policy, random_script

from trainer.rollout import Rollout, first_non_finite_row


@pytest.fixture
def script() -> Script:
    return random_script(13, 5)


def collected(script: Script, action_space: gymnasium.Space) -> Rollout:
    env = ScriptedEnv(script, action_space)
    return make_collector(env, make_policy(env), len(script.valid)).collect()


def test_clearing_unread_rows_keeps_final_observations_that_are_bootstrapped_from_and_all_valid_rows(
    script: Script,
) -> None:
    rollout = collected(script, gymnasium.spaces.Box(-0.3, 0.3, (2,)))
    before = copy.deepcopy(rollout)
    kept = {
        "observations": script.valid | script.bootstrapped_from_final,
        "actions": script.valid,
        "log_probs": script.valid,
    }
    for name, rows in kept.items():
        getattr(rollout, name)[: rollout.length][~rows] = torch.nan
    rollout.clear_unread_()
    for name, rows in kept.items():
        tensor = getattr(rollout, name)[: rollout.length]
        assert torch.equal(tensor[rows], getattr(before, name)[: rollout.length][rows]), name
        assert not tensor[~rows].any(), name
    for name in ("values", "rewards", "terminated", "truncated", "valid"):
        assert torch.equal(getattr(rollout, name), getattr(before, name)), name


def test_the_first_row_that_is_not_finite_is_named_and_filler_is_none(script: Script) -> None:
    rollout = collected(script, gymnasium.spaces.Discrete(3))
    rollout.log_probs[~script.valid] = torch.nan
    assert first_non_finite_row(rollout) is None
    row, column = script.valid.nonzero()[7].tolist()
    rollout.rewards[row, column] = -torch.inf
    assert first_non_finite_row(rollout) == f"rewards of env {column} is -inf at row {row} of the rollout"


def test_a_final_observations_value_that_is_not_finite_is_named_only_where_it_bootstraps(script: Script) -> None:
    rollout = collected(script, gymnasium.spaces.Discrete(3))
    bootstrapped = script.bootstrapped_from_final
    rollout.values[:-1][~script.valid & ~bootstrapped] = torch.nan  # after a termination nobody reads it
    assert first_non_finite_row(rollout) is None
    row, column = bootstrapped.nonzero()[0].tolist()
    rollout.values[row, column] = torch.nan
    assert first_non_finite_row(rollout) == f"values of env {column} is nan at row {row} of the rollout"
