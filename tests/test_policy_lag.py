"""Policy lag: who acted with which parameters, how old they may be, and what the learner makes of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from impala_runs import updates
from small_runs import without_times

from trainer.impala import Impala
from trainer.loop import Trainer


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_forced_lag_acts_with_the_parameters_of_so_many_updates_ago(monkeypatch: pytest.MonkeyPatch, lag: int):
    history: list[dict[str, torch.Tensor]] = []
    errors: list[float] = []
    original = Impala.update

    def update(self: Impala, rollout: Any, rewards: torch.Tensor, progress: float) -> Any:
        present = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        history.append(present)
        self.policy.load_state_dict(history[max(0, len(history) - 1 - lag)])
        log_probs = self.policy.distribution(rollout.observations[:-1]).log_prob(rollout.actions)
        errors.append(float((log_probs - rollout.log_probs)[rollout.valid].detach().abs().max()))
        self.policy.load_state_dict(present)
        return original(self, rollout, rewards, progress)

    monkeypatch.setattr(Impala, "update", update)
    metrics = updates(8, f"impala.force_lag={lag}", "impala.learning_rate=0.01")
    assert max(errors) < 1e-5, "two batch sizes of the same float32 network"
    assert [m["lag/max"] for m in metrics] == [m["lag/min"] for m in metrics] == [min(u, lag) for u in range(8)]
    assert metrics[-1]["lag/histogram"][-1] == 2 * (8 - lag)
    assert not any(thread.name.startswith("actor") for thread in threading.enumerate())


BATCHED = ("env.pools=4", "impala.batch_inference=true")
FRAMES = ("env.id=Pong", "policy=nature_cnn", "num_envs=128", "env.pools=4", "env.num_threads=4", "rollout_length=16")


@pytest.mark.parametrize(
    ("settings", "count", "tolerance"),
    [
        pytest.param(("device=cpu", "impala.learning_rate=0.01"), 12, 1e-5, id="cpu"),
        pytest.param(("device=cpu", "impala.learning_rate=0.01", *BATCHED), 12, 1e-5, id="cpu batched"),
        pytest.param(("device=cuda", "impala.learning_rate=0.01"), 12, 1e-5, id="cuda", marks=pytest.mark.gpu),
        # convolutions in tf32
        pytest.param(("device=cuda", *FRAMES), 40, 2e-2, id="cuda frames", marks=pytest.mark.gpu),
        pytest.param(("device=cuda", *FRAMES, *BATCHED), 40, 2e-2, id="cuda frames batched", marks=pytest.mark.gpu),
    ],
)
def test_every_window_was_collected_by_the_version_that_it_names(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], count: int, tolerance: float
):
    """Half-written weights, and on CUDA a rollout that is read before it is complete or actors that disturb each
    other's products, would show in the log-probs."""
    made: list[Trainer] = []
    history: list[dict[str, torch.Tensor]] = []
    errors: list[float] = []
    original = Impala.update

    def update(self: Impala, rollout: Any, rewards: torch.Tensor, progress: float) -> Any:
        history.append({name: tensor.clone() for name, tensor in self.policy.state_dict().items()})
        source: Any = made[0].source
        width = rollout.valid.shape[1] // len(source._actors)
        for note in source._notes.values():
            columns = slice(width * note.actor, width * (note.actor + 1))
            self.policy.load_state_dict(history[note.version])
            with torch.no_grad():  # an autograd graph that lives on could not be left by the learner's capture
                distribution = self.policy.distribution(rollout.observations[:-1, columns])
            difference = distribution.log_prob(rollout.actions[:, columns]) - rollout.log_probs[:, columns]
            errors.append(float(difference[rollout.valid[:, columns]].abs().max()))
        self.policy.load_state_dict(history[-1])
        return original(self, rollout, rewards, progress)

    monkeypatch.setattr(Impala, "update", update)
    metrics = updates(count, "matmul_precision=highest", *settings, made=made)
    assert max(errors) < tolerance, "two batch sizes of the same network"
    assert max(m["lag/max"] for m in metrics) >= 1


def test_a_forced_lag_repeats_bit_for_bit():
    def numbers() -> list[dict[str, Any]]:
        metrics = updates(4, "impala.force_lag=2", "normalize.observations=true")
        return [
            {k: v for k, v in without_times(m).items() if not k.startswith(("share", "learner", "actor"))}
            for m in metrics
        ]

    assert numbers() == numbers()


def test_at_lag_zero_the_policies_are_one_though_statistics_move():
    overrides = ("impala.force_lag=0", "normalize.observations=true", "impala.num_minibatches=1")
    for metrics in updates(4, *overrides, "impala.learning_rate=0.01"):
        assert metrics["loss/approx_kl"] == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("how", ["impala.force_lag=3", "impala.rollouts_per_update=1"])
def test_a_policy_that_does_not_learn_is_the_same_policy_after_any_lag_and_though_statistics_move(how: str):
    """The learner scales a window as its actor did, whatever the statistics are by now."""
    metrics = updates(8, how, "normalize.observations=true", "impala.learning_rate=0")
    assert max(m["lag/max"] for m in metrics) >= 1
    for m in metrics:
        assert m["loss/approx_kl"] == pytest.approx(0, abs=1e-10)


def slow_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Impala.update

    def update(self: Impala, *args: Any) -> Any:
        time.sleep(0.05)
        return original(self, *args)

    monkeypatch.setattr(Impala, "update", update)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_block_keeps_every_rollout_within_the_lag_that_is_allowed(monkeypatch: pytest.MonkeyPatch, max_lag: int):
    slow_learner(monkeypatch)
    limits = (f"impala.max_lag={max_lag}", "impala.max_lag_action=block", "impala.queue_size=8")
    metrics = updates(10, *limits)
    assert max(m["lag/max"] for m in metrics) == max_lag, "a learner this slow lets actors run ahead as far as they may"
    assert metrics[-1]["lag/dropped_rollouts"] == 0


def test_drop_learns_from_no_rollout_that_is_too_old_and_loses_no_episode(monkeypatch: pytest.MonkeyPatch):
    slow_learner(monkeypatch)
    made: list[Trainer] = []
    metrics = updates(8, "impala.max_lag=2", "impala.max_lag_action=drop", "impala.queue_size=8", made=made)
    assert max(m["lag/max"] for m in metrics) <= 2
    dropped = metrics[-1]["lag/dropped_rollouts"]
    assert dropped > 0
    assert dropped % 2 == 0, "the batches of both actors"
    # CartPole pays 1 a step: an episode's return is its length, which a gap would break
    episodes = made[0].episodes
    assert metrics[-1]["episodes"] > 0
    assert list(episodes.returns) == list(episodes.lengths)
    assert all(length >= 8 for length in episodes.lengths)


def test_groups_of_actors_take_turns_and_rollouts_name_their_envs(monkeypatch: pytest.MonkeyPatch):
    columns = []
    original = Impala.update

    def update(self: Impala, rollout: Any, *args: Any) -> Any:
        columns.append((rollout.columns.start, rollout.columns.stop, rollout.valid.shape[1]))
        return original(self, rollout, *args)

    monkeypatch.setattr(Impala, "update", update)
    made: list[Trainer] = []
    metrics = updates(6, "env.pools=4", "impala.rollouts_per_update=2", made=made)
    assert columns == [(0, 4, 4), (4, 8, 4)] * 3
    assert all(m["lag/max"] <= 3 for m in metrics)
    assert all(length >= 8 for length in made[0].episodes.lengths)
