"""IMPALA's update: gradients from the paper's formula, what filler rows may not do, passes, normalizers, schedules."""

from __future__ import annotations

import io
import math
from typing import Any

import gymnasium
import pytest
import torch
from fake_env import Script, random_script
from impala_cases import BOX, DISCRETE, KeptGradients, LearnerCase, gradient_of, independent_policy
from small_runs import differences
from torch import Tensor

from kernels import reference
from trainer.config import CreditConfig
from trainer.impala import standardized
from trainer.normalize import ObservationNormalizer, ValueNormalizer

triton_launch: Any = pytest.importorskip("kernels.triton_loss_launch", reason="needs Triton")
SPACES = {"discrete": DISCRETE, "continuous": BOX}


@pytest.fixture
def script() -> Script:
    return random_script(9, 5, seed=4)


def expected_gradient(case: LearnerCase) -> dict[str, Tensor]:
    """Of ``-mean(A log pi) + c/2 mean((vs - V)^2) - e H`` with the float64 V-trace of the double sum."""
    rollout, config = case.rollout, case.learner.config
    policy = independent_policy(case)
    log_probs = policy.log_prob(rollout.actions)
    values = case.policy.critic(rollout.observations.flatten(2)).squeeze(-1)
    trace = reference.vtrace(
        rollout.log_probs, log_probs, rollout.rewards, values[:-1], values[-1], rollout.terminated, rollout.truncated,
        valid=rollout.valid, gamma=case.credit.gamma,
    )  # fmt: skip
    losses = (
        -trace.pg_advantages.float() * log_probs
        + config.value_coef * 0.5 * (trace.value_targets.float() - values[:-1]).square()
        - config.entropy_coef * policy.entropy()
    )
    return gradient_of(case, losses[rollout.valid].mean())


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_one_pass_descends_the_papers_gradient(script: Script, space: gymnasium.Space):
    case = LearnerCase(script, space)
    expected = expected_gradient(case)
    kept = case.learner.optimizer = KeptGradients(case.policy, lr=0.0)
    statistics = case.update()
    assert statistics["loss/approx_kl"] > 1e-3, "the rollout is of another policy"
    for name, gradient in kept.kept[0].items():
        # float32 sums of 40 rows
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def kept_arguments(case: LearnerCase, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the objective of every minibatch is asked."""
    asked, original = [], case.learner._objective
    monkeypatch.setattr(case.learner, "_objective", lambda *given: asked.append(given) or original(*given))
    return asked


@pytest.mark.parametrize("core", ["none", "gru"])
def test_every_row_is_in_one_minibatch_and_with_a_core_whole_windows_are(
    script: Script, core: str, monkeypatch: pytest.MonkeyPatch
):
    """With a step size of 0 the minibatches' gradients, weighted by their rows, are that of the whole batch."""
    whole, parts = LearnerCase(script, core=core), LearnerCase(script, core=core, num_minibatches=3)
    gradients = []
    for case in (whole, parts):
        case.learner.optimizer = KeptGradients(case.policy, lr=0.0)
        gradients.append(case.learner.optimizer.kept)
    seen = kept_arguments(parts, monkeypatch)
    for case in (whole, parts):
        case.update()
    rows = torch.tensor([float(window.valid.sum()) for window, *_ in seen])
    shapes = sorted(tuple(window.valid.shape) for window, *_ in seen)
    assert shapes == ([(1, 15)] * 3 if core == "none" else [(9, 1), (9, 2), (9, 2)])
    assert rows.sum() == script.valid.sum()
    for name, gradient in gradients[0][0].items():
        shares = torch.stack([kept[name] * n for kept, n in zip(gradients[1], rows, strict=True)])
        torch.testing.assert_close(shares.sum(0) / rows.sum(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", ["vtrace", "retrace"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_unread_rows_hold_reaches_no_parameter(script: Script, poison: float, estimator: str):
    clean, poisoned = (LearnerCase(script, credit=CreditConfig(estimator=estimator, gamma=0.9)) for _ in range(2))
    rollout = poisoned.rollout
    unread = ~rollout.read_rows()
    assert unread[:-1].any()
    rollout.observations[unread] = poison
    rollout.rewards[~rollout.valid] = poison
    rollout.log_probs[~rollout.valid] = poison
    rollout.values.fill_(poison)  # the actor's values are not used
    for case in (clean, poisoned):
        case.update()
    assert differences(clean.parameters(), poisoned.parameters()) == []


def test_a_truncated_row_bootstraps_from_its_final_observation(script: Script):
    """Changing the observation of the filler row after a truncation changes the update; after a termination it does
    not."""
    results = {}
    ended = {"none": None, "truncated": script.truncated, "terminated": script.terminated}
    for name, flags in ended.items():
        case = LearnerCase(script)
        if flags is not None:
            after = torch.cat([torch.zeros_like(flags[:1]), flags])[:-1] & ~script.valid
            assert after.any()
            case.rollout.observations[:-1][after] += 1.0
        case.update()
        results[name] = case.parameters()
    assert differences(results["none"], results["truncated"]) != []
    assert differences(results["none"], results["terminated"]) == []


def test_a_loss_that_is_not_finite_is_not_applied_nor_is_what_follows(script: Script, monkeypatch: pytest.MonkeyPatch):
    case = LearnerCase(script, num_minibatches=5, update_epochs=2, optimizer="rmsprop")
    optimizer, applied = case.learner.optimizer, []
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (applied.append(not optimizer.found_inf), step()))
    row, env = script.valid.nonzero()[0].tolist()
    case.rollout.rewards[row, env] = math.nan  # of the first row: no credit but its own is of it
    withheld = int(case.update()["skipped_minibatches"])
    assert withheld > 5, "the second pass is withheld whole"
    assert applied == [True] * (10 - withheld) + [False] * withheld
    case.rollout.rewards.fill_(math.nan)
    before = case.parameters()
    assert case.update()["skipped_minibatches"] == 10
    assert differences(before, case.parameters()) == []


def test_the_correction_switch_takes_every_ratio_for_one(script: Script):
    corrected, uncorrected = LearnerCase(script, correction=True), LearnerCase(script, correction=False)
    on_policy = LearnerCase(script)
    on_policy.rollout.log_probs.copy_(independent_policy(on_policy).log_prob(on_policy.rollout.actions).detach())
    for case in (corrected, uncorrected, on_policy):
        case.update()
    assert differences(corrected.parameters(), uncorrected.parameters()) != []
    for name, tensor in uncorrected.parameters().items():
        torch.testing.assert_close(tensor, on_policy.parameters()[name], rtol=1e-4, atol=1e-5)


def test_further_passes_keep_the_credit_and_clip_around_its_policy(script: Script):
    """A large step leaves the ratio's range in every row that pushes outwards: what remains is value and entropy."""
    case = LearnerCase(script, update_epochs=2, clip_range=1e-6, value_coef=0.0, entropy_coef=0.0)
    kept = case.learner.optimizer = KeptGradients(case.policy, lr=1e-2)
    statistics = case.update()
    first, second = kept.kept
    assert statistics["loss/clip_fraction"] > 0.4, "a half of the two passes: all rows of the second"
    norm = [math.sqrt(sum(float(g.square().sum()) for g in kept.values())) for kept in (first, second)]
    assert norm[1] < norm[0]


def test_a_row_of_no_weight_whose_ratio_overflows_spoils_nothing(script: Script):
    """Hundreds of nats away from the policy that acted: infinity times an advantage of 0 would be NaN."""
    case = LearnerCase(script, BOX, update_epochs=2, learning_rate=3.0)
    case.rollout.actions[script.valid] *= 1000.0
    case.rollout.log_probs += 5000.0
    assert case.update()["skipped_minibatches"] == 0
    assert all(torch.isfinite(tensor).all() for tensor in case.parameters().values())


def test_at_lag_zero_the_ratio_is_one_though_observations_are_normalized(script: Script):
    """Statistics move after the update: the batch that moved them was acted on, and learned from, without them."""
    normalizer = ObservationNormalizer((script.observations.shape[2],), clip=10.0)
    normalizer.update(torch.randn(50, 3, 3) * 4 + 1, torch.ones(50, 3, dtype=torch.bool))
    case = LearnerCase(script, observation_normalizer=normalizer, drift=0.0)
    actor = independent_policy(case)  # on raw observations
    with torch.no_grad():
        outputs = case.policy.outputs(normalizer(case.rollout.observations[:-1]))
        policy = torch.distributions.Categorical(logits=outputs.policy_outputs)
        case.rollout.log_probs.copy_(policy.log_prob(case.rollout.actions))
    assert not torch.allclose(actor.log_prob(case.rollout.actions), case.rollout.log_probs)
    count = float(normalizer.running.count)
    assert case.update()["loss/approx_kl"] == pytest.approx(0, abs=1e-10)
    assert float(normalizer.running.count) == count + int(script.valid.sum())


def test_a_critic_in_units_of_its_targets_learns_the_same_credit(script: Script):
    """PopArt's statistics are those before the update, and predictions do not jump when they move."""
    case = LearnerCase(script, value_normalizer=ValueNormalizer(), drift=0.0, learning_rate=0.0)
    observations = case.rollout.observations.clone()
    normalizer = case.value_normalizer
    assert normalizer is not None
    for _ in range(3):
        before = normalizer.denormalize(case.policy.value(observations))
        case.update()
        after = normalizer.denormalize(case.policy.value(observations))
        torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
    assert float(normalizer.running.count) == 3 * int(script.valid.sum())


def test_advantages_are_centred_by_their_weights_so_that_rows_of_none_get_none(
    script: Script, monkeypatch: pytest.MonkeyPatch
):
    """Rows that the present policy would never have come to have no weight, whatever the others' mean is."""
    plain, case = LearnerCase(script), LearnerCase(script, normalize_advantages=True)
    impossible = torch.zeros_like(script.valid)
    impossible[::2] = script.valid[::2]
    seen: list[list[Any]] = []
    for learner in (plain, case):
        learner.rollout.log_probs[impossible] = 200.0
        seen.append(kept_arguments(learner, monkeypatch))
        learner.update()
    raw, advantages = (arguments[0][2].advantages.view_as(script.valid) for arguments in seen)
    ratios = independent_policy(LearnerCase(script)).log_prob(case.rollout.actions) - case.rollout.log_probs
    weights = torch.where(script.valid, ratios.detach().exp().clamp(max=1.0), 0.0)
    shifted = raw - weights * (raw.sum() / weights.sum())
    torch.testing.assert_close(advantages, shifted / shifted[script.valid].square().mean().sqrt(), rtol=1e-4, atol=1e-6)
    assert abs(float(raw.sum())) > 0.1
    assert torch.equal(advantages == 0, ~script.valid | impossible)


@pytest.mark.parametrize("value", [7.0, 123.456, 0.1, -2.7])
@pytest.mark.parametrize("shape", [(16, 4096), (5, 7), (1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_advantages_are_0_once_centred(value: float, shape: tuple[int, int], weighted: bool):
    torch.manual_seed(0)
    weights = torch.rand(shape) if weighted else torch.ones(shape)
    assert not standardized(value * weights, weights, torch.ones(shape, dtype=torch.bool)).any()


@pytest.mark.skipif(not triton_launch.INTERPRETED, reason="needs the Triton interpreter")
@pytest.mark.parametrize("estimator", ["vtrace", "retrace"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_the_fused_loss_descends_the_same_gradients(script: Script, space: gymnasium.Space, estimator: str):
    if estimator == "retrace" and space is BOX:
        pytest.skip("Retrace takes Discrete actions")
    results = {}
    for backend in ("torch", "triton"):
        credit = CreditConfig(estimator=estimator, gamma=0.9)
        case = LearnerCase(script, space, credit, loss_backend=backend, update_epochs=2, num_minibatches=2)
        kept = case.learner.optimizer = KeptGradients(case.policy, lr=1e-2)
        results[backend] = case.update(), kept.kept
    for name, value in results["torch"][0].items():
        assert results["triton"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for plain, fused in zip(results["torch"][1], results["triton"][1], strict=True):
        for name in plain:
            torch.testing.assert_close(fused[name], plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_the_linear_schedule_and_the_state_go_on_where_they_were(script: Script, optimizer: str):
    straight, resumed = (LearnerCase(script, optimizer=optimizer, lr_schedule="linear") for _ in range(2))
    assert straight.update(progress=0.25)["learning_rate"] == pytest.approx(0.0075)
    state, weights = straight.learner.state_dict(), straight.policy.state_dict()
    resumed.policy.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    resumed.learner.load_state_dict(torch.load(saved, weights_only=True))
    for case in (straight, resumed):
        case.update(progress=0.5)
    assert differences(straight.parameters(), resumed.parameters()) == []
