"""PPO: credit that is assigned anew by the present critic, schedules, and which loss backend is taken."""

from typing import Any

import gymnasium
import pytest
import torch
from fake_env import PPOCase, Script, random_script
from small_runs import small_config
from torch import Tensor

from trainer import loop, losses
from trainer.builder import make_policy, resolve_loss_backend
from trainer.config import ConfigError
from trainer.console import QuietConsole
from trainer.distributions import action_head
from trainer.estimator import Estimate
from trainer.loop import Trainer
from trainer.normalize import moments
from trainer.rollout import Rollout

EPOCHS, MINIBATCHES = 2, 3


def make_case(recompute: str, script: Script | None = None, **options: Any) -> PPOCase:
    settings = {"recompute_advantages": recompute, "update_epochs": EPOCHS, "num_minibatches": MINIBATCHES, **options}
    return PPOCase(script or random_script(9, 4), **settings)


class Credit:
    """Stands for the estimator: notes the values that it is given and what the critic says at that moment."""

    def __init__(self, case: PPOCase) -> None:
        self.case, self.observations = case, case.rollout.observations.clone()
        self.given: list[Tensor] = []
        self.said: list[Tensor] = []
        self.minibatches_before: list[int] = []
        case.assign_credit = self

    @torch.no_grad()
    def __call__(self, rollout: Rollout, rewards: Tensor) -> Estimate:
        normalizer = self.case.value_normalizer
        values = self.case.policy.value(self.observations.flatten(0, 1)).view_as(rollout.values)
        self.said.append(values if normalizer is None else normalizer.denormalize(values))
        self.given.append(rollout.values.clone())
        self.minibatches_before.append(len(self.case.batches))
        advantages = torch.full_like(rewards, float(len(self.given)))
        return Estimate(advantages, 10.0 * advantages, moments(advantages.flatten(), rollout.valid.flatten()))


@pytest.mark.parametrize(
    ("recompute", "before"), [("rollout", [0]), ("epoch", [0, 3]), ("minibatch", [0, 1, 2, 3, 4, 5])]
)
@pytest.mark.parametrize("value_normalizer", [False, True])
def test_credit_is_assigned_from_the_present_critics_values(
    recompute: str, before: list[int], value_normalizer: bool
) -> None:
    """Those of filler rows too, which are V(final observation) of the rows before."""
    case = make_case(recompute, value_normalizer=value_normalizer)
    assert not case.rollout.valid.all()
    credit = Credit(case)
    case.update()
    assert credit.minibatches_before == before
    for given, said in zip(credit.given, credit.said, strict=True):
        torch.testing.assert_close(given, said)
    if len(before) > 1:
        assert not torch.allclose(credit.given[0], credit.given[1])


def test_the_loss_takes_the_newest_credit_and_clips_around_the_collecting_critic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case("epoch", num_minibatches=1, normalize_advantages=False, value_clip_range=0.2)
    collected = case.rollout.values[:-1].clone()
    Credit(case)
    advantages, old_values, targets = [], [], []
    surrogate, value_loss = losses.clipped_surrogate, losses.value_loss

    def note_surrogate(*arguments: Any) -> losses.SurrogateLoss:
        advantages.append(arguments[2])
        return surrogate(*arguments)

    def note_value(*arguments: Any) -> Tensor:
        old_values.append(arguments[1].sort().values)
        targets.append(arguments[2])
        return value_loss(*arguments)

    monkeypatch.setattr(losses, "clipped_surrogate", note_surrogate)
    monkeypatch.setattr(losses, "value_loss", note_value)
    case.update()
    for epoch in range(EPOCHS):
        assert (advantages[epoch] == epoch + 1).all()
        assert (targets[epoch] == 10 * (epoch + 1)).all()
        assert torch.equal(old_values[epoch], collected.flatten().sort().values)


def test_credit_anew_from_unchanged_parameters_changes_nothing() -> None:
    once, anew = make_case("rollout", learning_rate=0.0), make_case("minibatch", learning_rate=0.0)
    assert once.update() == pytest.approx(anew.update(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1e-2), (0.25, 7.5e-3), (1.0, 0.0)])
def test_the_linear_rate_follows_the_runs_progress(progress: float, expected: float) -> None:
    case = PPOCase(random_script(6, 2, end_rate=0.0), lr_schedule="linear")
    before = case.state()["actor.0.weight"]
    assert case.update(progress=progress)["learning_rate"] == pytest.approx(expected, rel=1e-6)
    assert torch.equal(case.state()["actor.0.weight"], before) == (expected == 0.0)


def test_the_adaptive_rate_moves_once_per_minibatch_and_is_the_optimizers() -> None:
    case = PPOCase(
        random_script(6, 2, end_rate=0.0),
        lr_schedule="adaptive",
        learning_rate=1e-4,
        num_minibatches=2,
        update_epochs=2,
    )
    metrics = case.update()  # so small a rate moves the KL by less than half of what is desired
    assert metrics["learning_rate"] == pytest.approx(1e-4 * 1.5**4)
    assert float(case.ppo.optimizer.learning_rate) == pytest.approx(1e-4 * 1.5**4)


@pytest.mark.parametrize(("schedule", "share"), [("constant", 1.0), ("linear", 0.75)])
def test_clip_range_and_entropy_coefficient_follow_their_schedules(schedule: str, share: float) -> None:
    case = PPOCase(random_script(9, 4), clip_schedule=schedule, entropy_schedule=schedule, entropy_coef=0.04)
    case.update(progress=0.25)
    assert float(case.ppo.objective.clip_range) == pytest.approx(0.2 * share)
    assert float(case.ppo.objective.entropy_coef) == pytest.approx(0.04 * share)


HEADS = {
    "Box": action_head(gymnasium.spaces.Box(-1, 1, (2,))),
    "Discrete": action_head(gymnasium.spaces.Discrete(3)),
    "MultiDiscrete": action_head(gymnasium.spaces.MultiDiscrete([2, 3])),
    "MultiDiscrete of one": action_head(gymnasium.spaces.MultiDiscrete([3])),
    "Discrete of 4097": action_head(gymnasium.spaces.Discrete(4097)),
}


@pytest.mark.parametrize(
    ("asked", "device", "space", "expected"),
    [
        ("auto", "cpu", "Box", "torch"),
        ("auto", "cuda", "Box", "triton"),
        ("auto", "cuda", "Discrete", "triton"),
        ("auto", "cuda", "MultiDiscrete", "torch"),
        ("auto", "cuda", "MultiDiscrete of one", "torch"),
        ("auto", "cuda", "Discrete of 4097", "torch"),
        ("torch", "cuda", "Box", "torch"),
        ("triton", "cuda", "Discrete", "triton"),
    ],
)
def test_the_loss_is_fused_where_device_and_actions_allow_it(asked: str, device: str, space: str, expected: str):
    config = small_config(f"loss.backend={asked}")
    assert resolve_loss_backend(config, torch.device(device), HEADS[space]) == expected


@pytest.mark.parametrize(
    ("device", "space", "reason"),
    [
        ("cpu", "Discrete", "needs device=cuda, but this run is on cpu"),
        ("cuda", "MultiDiscrete", "those of CartPole-v1 are MultiDiscrete"),
        ("cuda", "MultiDiscrete of one", "those of CartPole-v1 are MultiDiscrete"),
        ("cuda", "Discrete of 4097", "takes up to 4096 actions, but CartPole-v1 has 4097"),
    ],
)
def test_a_fused_loss_that_cannot_be_is_refused_with_the_cure(device: str, space: str, reason: str) -> None:
    config = small_config("loss.backend=triton", "env.id=CartPole-v1")
    with pytest.raises(ConfigError, match=f"^loss.backend=triton .*{reason}; use loss.backend=auto$"):
        resolve_loss_backend(config, torch.device(device), HEADS[space])


def test_a_fused_loss_on_a_cpu_is_refused_before_an_env_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "make_training_env", None)
    with pytest.raises(ConfigError, match=r"^loss\.backend=triton needs device=cuda"):
        Trainer(small_config("loss.backend=triton"), QuietConsole())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [((), "needs device=cuda"), (("algo=impala", "credit.estimator=retrace"), "has no Q head")],
)
def test_fused_networks_that_cannot_be_are_refused_with_the_cure(settings: tuple[str, ...], reason: str) -> None:
    config = small_config("policy.backend=triton", *settings)
    spaces = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    with pytest.raises(ConfigError, match=rf"^policy\.backend=triton {reason}.*; use policy\.backend=auto$"):
        make_policy(config, *spaces, torch.device("cpu"))


@pytest.mark.parametrize(
    "override",
    ["ppo.recompute_advantages=always", "ppo.clip_schedule=cosine", "loss.backend=cuda", "timing.detail=low"],
)
def test_other_values_are_refused_by_their_key(override: str) -> None:
    with pytest.raises(ConfigError, match=f"^{override} is not one of"):
        small_config(override)
