"""Episode statistics: sums over windows, truncations, filler, and what is kept."""

import pytest
import torch
from fake_env import CPU, Script, random_script
from torch import Tensor

from trainer.episodes import EpisodeTracker
from trainer.rollout import Rollout


def rollout_of(script: Script) -> Rollout:
    rows = script.rewards
    return Rollout(script.observations, rows, rows, rows, *script[1:], core_state=rows.new_zeros(1, rows.shape[1], 0))


def windows(script: Script, sizes: list[int]) -> list[Rollout]:
    parts = zip(*(tensor.split(sizes) for tensor in script[1:]), strict=True)
    return [rollout_of(Script(script.observations, *part)) for part in parts]


def track(rollouts: list[Rollout], window: int = 100) -> EpisodeTracker:
    tracker = EpisodeTracker(rollouts[0].rewards.shape[1], window, "torch", CPU)
    for rollout in rollouts:
        tracker.record(tracker.follow(rollout))
    return tracker


def naive_episodes(script: Script) -> list[tuple[float, float]]:
    """(return, length) of the ended episodes, by the row in which they ended."""
    num_envs = script.rewards.shape[1]
    total, length, ended = [0.0] * num_envs, [0] * num_envs, []
    for t in range(len(script.rewards)):
        for env in range(num_envs):
            if not script.valid[t, env]:
                continue
            total[env] += float(script.rewards[t, env])
            length[env] += 1
            if script.terminated[t, env] or script.truncated[t, env]:
                ended.append((total[env], float(length[env])))
                total[env], length[env] = 0.0, 0
    return ended


def time_limit_script(limit: int, episodes: int) -> Script:
    """One env, reward 1 a step, truncated after ``limit`` steps."""
    truncated = torch.tensor(([False] * (limit - 1) + [True, False]) * episodes)[:, None]
    valid = torch.tensor(([True] * limit + [False]) * episodes)[:, None]
    return Script(torch.zeros(len(valid) + 1, 1, 1), valid.float(), torch.zeros_like(valid), truncated, valid)


@pytest.mark.parametrize("sizes", [[8], [4, 4], [3, 5], [1] * 8])
def test_a_truncation_ends_the_episode_and_its_filler_row_counts_nowhere(sizes: list[int]) -> None:
    tracker = track(windows(time_limit_script(3, episodes=2), sizes))
    assert list(tracker.returns) == [3.0, 3.0]
    assert list(tracker.lengths) == [3.0, 3.0]
    assert tracker.statistics() == (2, 3.0, 3.0)


@pytest.mark.parametrize("sizes", [[31], [1] * 31, [2, 13, 7, 9]])
def test_episodes_equal_a_loop_over_each_env_whatever_the_windows(sizes: list[int]) -> None:
    script = random_script(31, 5, seed=1)
    tracker = track(windows(script, sizes))
    expected = naive_episodes(script)
    assert tracker.statistics().episodes == len(expected) > 10
    assert list(tracker.lengths) == [length for _, length in expected]
    assert list(tracker.returns) == pytest.approx([total for total, _ in expected], abs=1e-5)


def test_no_mean_before_the_first_episode_ended() -> None:
    tracker = track(windows(random_script(5, 3, end_rate=0.0), [5]))
    assert tracker.statistics() == (0, None, None)


def test_only_a_bounded_window_of_episodes_is_kept_the_newest_last() -> None:
    script = random_script(200, 4, seed=2, end_rate=0.5)
    tracker = track(windows(script, [50] * 4), window=7)
    expected = naive_episodes(script)
    assert tracker.statistics().episodes == len(expected) > 100
    assert list(tracker.lengths) == [length for _, length in expected[-7:]]


def test_what_filler_rows_hold_reaches_no_episode() -> None:
    script = random_script(31, 5, seed=1)
    poisoned = script._replace(rewards=script.rewards.masked_fill(~script.valid, torch.nan))
    assert list(track(windows(poisoned, [7] * 4 + [3])).returns) == list(track(windows(script, [7] * 4 + [3])).returns)


def test_a_nan_reward_stays_in_its_own_episode() -> None:
    script = time_limit_script(3, episodes=3)
    rewards: Tensor = script.rewards.clone()
    rewards[4] = torch.nan  # the first row of the second episode
    returns = list(track(windows(script._replace(rewards=rewards), [12])).returns)
    assert returns == pytest.approx([3.0, torch.nan, 3.0], nan_ok=True)


def test_restarting_forgets_the_episode_under_way() -> None:
    script = time_limit_script(3, episodes=1)
    start, rest = windows(script, [2, 2])
    tracker = track([start])
    tracker.restart()
    tracker.record(tracker.follow(rest))
    assert list(tracker.lengths) == [1.0]


def test_a_loaded_tracker_continues_exactly_and_keeps_nothing_of_its_own() -> None:
    script = random_script(31, 5, seed=1)
    first, second = windows(script, [13, 18])
    other = track(windows(random_script(20, 5, seed=9), [20]))
    saved = track([first])
    saved.statistics()
    other.load_state_dict(saved.state_dict())
    other.record(other.follow(second))
    assert other.state_dict()["returns"] == list(track([first, second]).returns)
    assert other.statistics().episodes == len(naive_episodes(script))
