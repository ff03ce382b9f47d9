"""PPO: which rows a minibatch holds, what is never applied, and that it learns."""

import copy
import math
from typing import Any

import gymnasium
import pytest
import torch
from fake_env import PPOCase, Script, random_script
from torch import Tensor

from trainer import losses
from trainer.config import CreditConfig
from trainer.estimator import estimate
from trainer.ppo_objective import Batch
from trainer.rollout import Rollout

BOX = gymnasium.spaces.Box(-1, 1, (2,))
DISCRETE = gymnasium.spaces.Discrete(3)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def no_ends(length: int, num_envs: int) -> Script:
    return random_script(length, num_envs, end_rate=0.0)


@pytest.mark.parametrize(
    ("length", "num_envs", "num_minibatches", "sizes"),
    [(5, 2, 3, [4, 3, 3]), (9, 1, 4, [3, 2, 2, 2]), (3, 1, 3, [1, 1, 1]), (1, 1, 1, [1]), (7, 3, 2, [11, 10])],
)
def test_every_row_is_in_exactly_one_minibatch_per_epoch(
    length: int, num_envs: int, num_minibatches: int, sizes: list[int]
) -> None:
    case = PPOCase(no_ends(length, num_envs), update_epochs=3, num_minibatches=num_minibatches)
    case.number_rows()
    case.update()
    orders = torch.cat(case.batches)[:, 0].view(3, -1).tolist()
    assert [len(batch) for batch in case.batches] == 3 * sizes
    assert all(sorted(order) == list(range(1, length * num_envs + 1)) for order in orders)
    assert length * num_envs < 9 or orders[0] != orders[1] != orders[2]  # shuffled anew each time


@pytest.mark.parametrize("case", ["minibatches of one row", "one env for one step"])
def test_the_smallest_batches_leave_everything_finite(case: str) -> None:
    script = no_ends(3, 3) if case == "minibatches of one row" else no_ends(1, 1)
    trained = PPOCase(script, num_minibatches=script.rewards.numel(), value_normalizer=True)
    metrics = trained.update()
    assert metrics["skipped_minibatches"] == 0
    assert all(math.isfinite(x) for x in metrics.values())
    assert all(tensor.isfinite().all() for tensor in trained.state().values())


def advantages_of_the_loss(case: PPOCase, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The advantages of the valid rows in the only minibatch, in the order of the rollout."""
    seen: list[Tensor] = []
    surrogate = losses.clipped_surrogate

    def note(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *rest: Any) -> losses.SurrogateLoss:
        seen.append(advantages)
        return surrogate(log_probs, old_log_probs, advantages, *rest)

    monkeypatch.setattr(losses, "clipped_surrogate", note)
    case.number_rows()
    case.update()
    numbers = case.batches[0][:, 0]
    return seen[0][numbers.argsort()][int((numbers == 0).sum()) :]


def test_advantages_are_normalized_over_the_whole_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PPOCase(no_ends(5, 2), num_minibatches=1, update_epochs=1)
    case.set_advantages(torch.arange(1.0, 11.0).square().view(5, 2))
    result = advantages_of_the_loss(case, monkeypatch)
    torch.testing.assert_close(result[:3], torch.tensor([-1.15669692, -1.06416117, -0.90993491]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[9], torch.tensor(1.89698295), rtol=1e-5, atol=1e-5)


def test_filler_rows_do_not_enter_the_normalization(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PPOCase(random_script(9, 4), num_minibatches=1, update_epochs=1)
    valid = case.rollout.valid
    case.set_advantages(torch.randn(9, 4).masked_fill(~valid, 1e6))
    kept = case.estimate.advantages[valid]
    assert len(kept) < valid.numel()
    expected = (kept - kept.mean()) / kept.std(correction=0)
    torch.testing.assert_close(advantages_of_the_loss(case, monkeypatch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("constant", [7.0, 0.1])
def test_constant_advantages_leave_the_actor_alone(constant: float) -> None:
    case = PPOCase(no_ends(5, 2))
    case.set_advantages(torch.full((5, 2), constant))
    before = case.state()
    case.update()
    after = case.state()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith(("actor", "log_std")))
    assert not torch.equal(after["critic.0.weight"], before["critic.0.weight"])


def poison_filler(rollout: Rollout, value: float) -> None:
    filler = ~rollout.valid
    assert filler.any()
    for name in ("observations", "log_probs", "rewards", "actions"):
        tensor = getattr(rollout, name)
        if tensor.is_floating_point():
            tensor[: rollout.length][filler] = value
    for name in ("terminated", "truncated"):
        getattr(rollout, name)[filler] = math.isnan(value)


@pytest.mark.parametrize("space", [BOX, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize("value_normalizer", [False, True])
def test_what_filler_rows_hold_changes_no_bit(space: gymnasium.Space, value_normalizer: bool) -> None:
    options: dict[str, Any] = {"num_minibatches": 3, "entropy_coef": 0.01, "value_normalizer": value_normalizer}
    zeros, poisoned = (PPOCase(random_script(9, 4), space, **options) for _ in range(2))
    poison_filler(zeros.rollout, 0.0)
    poison_filler(poisoned.rollout, math.nan)
    filler = ~poisoned.rollout.valid
    for tensor in poisoned.estimate[:2]:
        tensor[filler] = math.nan
    expected, got = zeros.update(), poisoned.update()
    assert got == expected
    assert got["skipped_minibatches"] == 0
    assert_same(poisoned.state(), zeros.state())


def test_a_nan_final_observation_after_a_termination_harms_nothing() -> None:
    script = random_script(9, 4, seed=1)
    after_termination = ~script.valid & ~script.bootstrapped_from_final
    assert after_termination.any()
    observations = script.observations.clone()
    observations[:-1][after_termination] = math.nan
    case = PPOCase(script._replace(observations=observations))
    assert case.rollout.actions.isnan().any()  # the policy saw it
    assert case.update()["skipped_minibatches"] == 0
    assert all(tensor.isfinite().all() for tensor in case.state().values())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["log_probs", "value_targets"])
def test_a_minibatch_that_is_not_finite_is_withheld_with_all_that_follow(field: str, poison: float) -> None:
    rehearsal, case = (PPOCase(no_ends(6, 4), num_minibatches=4, update_epochs=2) for _ in range(2))
    rehearsal.number_rows()
    rehearsal.update()
    row = int(rehearsal.batches[1][0, 0]) - 1  # of the second minibatch, in an update from the same seed
    tensor = case.rollout.log_probs if field == "log_probs" else case.estimate.value_targets
    tensor.view(-1)[row] = poison
    metrics = case.update()
    final = case.state()
    assert final["steps"] == 1
    assert not torch.equal(case.snapshots[0]["actor.0.weight"], final["actor.0.weight"])
    for snapshot in case.snapshots[1:]:
        assert_same({name: final[name] for name in snapshot}, snapshot)
    assert metrics["skipped_minibatches"] == 7
    assert all(math.isfinite(metrics[name]) for name in metrics if name != "explained_variance")


def test_an_update_of_nothing_but_nan_changes_no_bit_and_the_next_one_is_applied() -> None:
    case = PPOCase(no_ends(6, 4), num_minibatches=2, update_epochs=2, lr_schedule="adaptive")
    clean = case.rollout.log_probs.clone()
    case.update()
    before, rate = case.state(), float(case.ppo.learning_rate)
    case.rollout.log_probs.fill_(math.nan)
    assert case.update()["skipped_minibatches"] == 4
    assert_same(case.state(), before)
    assert float(case.ppo.learning_rate) == rate
    case.rollout.log_probs.copy_(clean)
    assert case.update()["skipped_minibatches"] == 0
    assert case.state()["steps"] == before["steps"] + 4


def test_target_kl_withholds_the_minibatch_that_exceeds_it_and_all_that_follow() -> None:
    case = PPOCase(no_ends(8, 4), num_minibatches=2, update_epochs=4, learning_rate=3e-2, target_kl=0.01)
    metrics = case.update()
    applied = int(case.state()["steps"])
    assert 1 <= applied < 8
    assert metrics["stopped_minibatches"] == 8 - applied
    assert metrics["skipped_minibatches"] == 0
    for snapshot in case.snapshots[applied:]:
        assert_same(snapshot, case.state())


@pytest.mark.parametrize(("threshold", "stopped"), [(0.0700, 1.0), (0.0900, 0.0)])
def test_the_stop_compares_the_non_negative_kl_of_the_minibatch(threshold: float, stopped: float) -> None:
    case = PPOCase(no_ends(5, 1), num_minibatches=1, update_epochs=1, target_kl=threshold)
    log_ratio = torch.tensor([0.3, -0.5, 0.1, -0.2, 0.6])  # k1 = -0.06, k3 = 0.0805
    case.rollout.log_probs -= log_ratio[:, None]
    metrics = case.update()
    assert metrics["stopped_minibatches"] == stopped
    assert metrics["loss/approx_kl"] == pytest.approx(0.08048199, rel=1e-4)
    assert metrics["loss/clip_fraction"] == pytest.approx(0.6)


def test_a_minibatch_without_a_valid_row_is_not_applied() -> None:
    case = PPOCase(no_ends(6, 2), lr_schedule="adaptive")
    case.update()
    before, rate = case.state(), float(case.ppo.learning_rate)
    case.rollout.valid.fill_(False)
    metrics = case.update()
    assert_same(case.state(), before)
    assert float(case.ppo.learning_rate) == rate
    assert metrics["skipped_minibatches"] == metrics["stopped_minibatches"] == 0


def test_the_first_minibatch_finds_the_behaviour_policy_itself() -> None:
    case = PPOCase(random_script(9, 4), num_minibatches=1, update_epochs=1)
    metrics = case.update()
    assert metrics["loss/approx_kl"] < 1e-10  # roundings of a batch of another size
    assert metrics["loss/clip_fraction"] == 0
    log_std = case.snapshots[0]["log_std"]
    assert metrics["loss/entropy"] == pytest.approx(float((log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()))


def test_the_first_minibatch_finds_the_old_values_also_in_the_critics_units() -> None:
    def first_value_loss(value_clip_range: float | None) -> float:
        options: dict[str, Any] = {"value_clip_range": value_clip_range, "num_minibatches": 1, "update_epochs": 1}
        case = PPOCase(random_script(9, 4), value_normalizer=True, **options)
        case.estimate = case.estimate._replace(value_targets=100 + 50 * case.estimate.value_targets)
        return case.update()["loss/value"]

    assert first_value_loss(0.01) == pytest.approx(first_value_loss(None), rel=1e-4)


def test_the_reported_losses_make_up_the_total() -> None:
    case = PPOCase(random_script(9, 4), num_minibatches=1, update_epochs=1, value_coef=0.7, entropy_coef=0.3)
    metrics = case.update()
    parts = metrics["loss/policy"] + 0.7 * metrics["loss/value"] - 0.3 * metrics["loss/entropy"]
    assert metrics["loss/total"] == pytest.approx(parts, rel=1e-5)


def test_the_gradient_is_clipped_to_its_norm_and_the_full_norm_is_reported() -> None:
    tight, loose = (PPOCase(no_ends(6, 2), num_minibatches=1, update_epochs=1, max_grad_norm=n) for n in (1e-3, 1e3))
    assert tight.update()["grad_norm"] == pytest.approx(loose.update()["grad_norm"])
    # Adam's first moment after one step is 0.1 times the gradient
    assert float(tight.state()["first"].norm()) == pytest.approx(1e-4, rel=1e-3)


def test_a_loaded_state_continues_bit_for_bit() -> None:
    straight, resumed = (PPOCase(random_script(9, 4), lr_schedule="adaptive") for _ in range(2))
    straight.update()
    for parameter, tensor in zip(resumed.policy.parameters(), straight.policy.parameters(), strict=True):
        parameter.data.copy_(tensor)
    resumed.ppo.load_state_dict(copy.deepcopy(straight.ppo.state_dict()))
    assert resumed.update(seed=1) == straight.update(seed=1)
    assert_same(resumed.state(), straight.state())


@pytest.mark.parametrize("value_normalizer", [False, True])
def test_updates_raise_the_probability_of_the_rewarded_action_and_learn_its_value(value_normalizer: bool) -> None:
    script = no_ends(4, 64)
    case = PPOCase(script, DISCRETE, value_normalizer, update_epochs=4, value_clip_range=None)
    rewards = 5.0 * (case.rollout.actions == 2).float()
    observations = script.observations[:-1].flatten(0, 1)

    @torch.no_grad()
    def probability() -> float:
        return float(case.policy.distribution(observations).log_prob(torch.full((256,), 2)).exp().mean())

    before = probability()
    case.rollout.terminated.fill_(True)
    case.estimate = estimate(case.rollout, rewards, CreditConfig(), "torch")
    history = [case.update(seed) for seed in range(20)]
    assert before < 0.4 < probability()
    # one rollout again and again: the clip lets the ratio go 0.2 above 1, and momentum a little further
    values = case.policy.value(observations).detach()
    if case.value_normalizer is not None:
        values = case.value_normalizer.denormalize(values)
    assert float(values.mean()) == pytest.approx(float(rewards.mean()), rel=0.1)
    assert history[-1]["loss/clip_fraction"] > 0


def test_the_log_deviation_never_leaves_its_bounds_and_is_not_stuck_there() -> None:
    case = PPOCase(no_ends(6, 4), learning_rate=10.0, entropy_coef=100.0, update_epochs=1)
    log_std = case.policy.log_std
    assert log_std is not None
    case.update()
    assert torch.equal(log_std, torch.full((2,), 2.0))
    case.ppo.objective.entropy_coef.fill_(-100.0)
    for _ in range(3):
        case.update()
    assert (log_std < 2.0).all()


@pytest.mark.parametrize("state_size", [0, 4])
@pytest.mark.parametrize(("steps", "envs"), [(1, 1), (7, 5), (8, 4)])
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_the_valid_rows_of_every_minibatch_are_counted(steps: int, envs: int, parts: int, state_size: int) -> None:
    rows = torch.zeros(steps * envs)
    valid = torch.rand(len(rows), generator=torch.Generator().manual_seed(0)) < 0.6
    batch = Batch(rows, rows, rows, valid, rows, rows, rows, core_state=torch.zeros(envs, state_size))
    orders = torch.stack([torch.randperm(batch.num_units) for _ in range(3)])
    expected = [[float(valid[batch.rows_of(part)].sum()) for part in order.tensor_split(parts)] for order in orders]
    assert batch.counts_of(orders, parts).tolist() == expected
