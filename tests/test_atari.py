"""EnvPool's Atari: which rows are filler when episodes end by a lost life, a finished game, or the time limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import envs
from envs import envpool_worker
from envs.base import VecEnv
from trainer.builder import make_env
from trainer.evaluate import evaluate
from trainer.schema import CONFIG_FOLDER, compose_config

N = 3


class Played:
    """A game under random actions, ``[T, N]``, with what EnvPool counted beside it."""

    def __init__(self, env: VecEnv, info: list[dict[str, np.ndarray]], steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        env.reset()
        info.clear()
        results = []
        for _ in range(steps):
            results.append(env.step(torch.randint(0, 4, (N,), generator=generator)))
        _, self.rewards, self.terminated, self.truncated, self.valid = map(torch.stack, zip(*results, strict=True))
        self.lives, self.game_over, self.elapsed = (
            torch.from_numpy(np.stack([step[name] for step in info]))
            for name in ("lives", "terminated", "elapsed_step")
        )

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    info: list[dict[str, np.ndarray]] = []
    in_env_order = envpool_worker._in_env_order

    def watched(name: str, n: int, *fields: Any) -> Any:
        info.append(fields[-1])
        return in_env_order(name, n, *fields)

    monkeypatch.setattr(envpool_worker, "_in_env_order", watched)
    made = []

    def run(steps: int, **options: Any) -> Played:
        made.append(envs.make("Breakout", "envpool", N, pools=1, num_threads=1, seed=5, **options))
        return Played(made[-1], info, steps)

    yield run
    for env in made:
        env.close()


def assert_filler_follows_every_end(played: Played) -> None:
    assert played.ended.any(0).all()
    assert torch.equal(~played.valid[1:], played.ended[:-1]) and played.valid[0].all()
    assert not played.ended[~played.valid].any() and not played.rewards[~played.valid].any()


def test_a_lost_life_ends_an_episode_with_a_filler_row_of_its_own(play: Any) -> None:
    played = play(300, episodic_life=True)
    assert_filler_follows_every_end(played)
    lost = played.lives[1:] < played.lives[:-1]
    assert torch.equal(lost, played.terminated[1:])
    assert (lost & (played.game_over[1:] == 0)).any() and (played.game_over[1:] == 1).any()
    # what the count alone says would be wrong: the game goes on after a life, and so does the count
    assert (played.elapsed[~played.valid] > 0).any()


def test_without_episodic_life_only_the_game_ends(play: Any) -> None:
    played = play(400)
    assert_filler_follows_every_end(played)
    assert torch.equal(played.terminated, played.game_over == 1)
    assert (played.lives[1:] < played.lives[:-1])[~played.terminated[1:]].any()


@pytest.mark.parametrize("episodic_life", [False, True])
def test_the_time_limit_truncates_and_counts_agent_steps(episodic_life: bool, play: Any) -> None:
    played = play(60, episodic_life=episodic_life, max_episode_steps=23)
    assert_filler_follows_every_end(played)
    assert not (played.truncated & played.terminated).any()
    assert (played.elapsed[played.truncated] == 23).all() and played.truncated.any(0).all()


def test_evaluation_plays_whole_games(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config(["env=Breakout", "env.training_options.episodic_life=true", "env.options.noop_max=7"])
    made: list[dict[str, Any]] = []

    class Stop(Exception):
        pass

    def note(id: str, engine: str, num_envs: int, **options: Any) -> None:
        made.append(options)
        raise Stop

    monkeypatch.setattr(envs, "make", note)
    with pytest.raises(Stop):
        make_env(config.env, 2, torch.device("cpu"), 0)
    with pytest.raises(Stop):
        evaluate(config, {}, 2, 0, True, torch.device("cpu"))
    training, playing = made
    assert training["episodic_life"] and training["noop_max"] == playing["noop_max"] == 7
    assert "episodic_life" not in playing


def test_every_game_has_the_settings_for_frames_under_both_algorithms():
    """Breakout alone takes smaller minibatches."""
    games = [path.stem for path in (CONFIG_FOLDER / "env").glob("*.yaml") if "- atari\n" in path.read_text()]
    assert {"Pong", "Qbert"} <= set(games)
    for algo in ("ppo", "impala"):
        ours, *others = (
            compose_config([f"algo={algo}", f"env={game}"]) for game in ["Pong", *games] if game != "Breakout"
        )
        for other in others:
            assert (other.env.pools, other.policy) == (ours.env.pools, ours.policy)
            assert (other.ppo, other.impala, other.normalize) == (ours.ppo, ours.impala, ours.normalize)
