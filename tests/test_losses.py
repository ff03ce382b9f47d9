"""Losses against numbers worked out by hand, and what rows that do not count may hold."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer import losses
from trainer.distributions import Categorical

ALL = torch.ones(4, dtype=torch.bool)
FOUR = torch.tensor(4.0)
CLIP = torch.tensor(0.2)
ADVANTAGES = torch.tensor([1.0, -2.0, 3.0, 0.5])
LOG_RATIO = torch.tensor([0.1, -0.1, 0.3, 0.0])
SQUARES = torch.tensor([1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0, 64.0, 81.0, 100.0]).view(5, 2)


def moments(values: Tensor) -> Tensor:
    mean = values.double().mean()
    return torch.stack([torch.tensor(values.numel()).double(), mean, (values.double() - mean).square().sum()])


def surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: float = 0.2) -> losses.SurrogateLoss:
    valid = torch.ones(len(log_ratio), dtype=torch.bool)
    count, clip = torch.tensor(float(len(log_ratio))), torch.tensor(clip_range, dtype=log_ratio.dtype)
    return losses.clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, valid, count, clip)


def test_clipped_surrogate_has_the_known_value() -> None:
    torch.testing.assert_close(surrogate(LOG_RATIO, ADVANTAGES).loss, torch.tensor(-0.84887402))


def test_clipped_surrogate_equals_the_minimum_written_as_cases() -> None:
    rng = np.random.default_rng(3)
    log_ratio, advantages = rng.normal(0, 0.4, 101), rng.normal(size=101)
    expected = []
    for ratio, advantage in zip(np.exp(log_ratio), advantages, strict=True):
        bounded = min(ratio, 1.3) if advantage >= 0 else max(ratio, 0.7)
        expected.append(bounded * advantage)
    loss = surrogate(torch.tensor(log_ratio), torch.tensor(advantages), 0.3).loss
    assert float(loss) == pytest.approx(-np.mean(expected), rel=1e-12)


def test_the_surrogate_has_no_gradient_where_the_ratio_left_the_clip_range_for_the_better() -> None:
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    surrogate(log_ratio, torch.tensor([1.0, -1.0, -1.0, 1.0])).loss.backward()
    expected = torch.tensor([0.0, 0.0, math.exp(0.5), -math.exp(-0.5)]) / 4
    torch.testing.assert_close(log_ratio.grad, expected)


def test_approx_kl_is_the_non_negative_estimator() -> None:
    log_ratio = torch.tensor([0.3, -0.5, 0.1, -0.2, 0.6])
    result = surrogate(log_ratio, torch.zeros(5))
    torch.testing.assert_close(result.approx_kl, torch.tensor(0.08048199))
    torch.testing.assert_close(result.clip_fraction, torch.tensor(0.6))
    assert not result.approx_kl.requires_grad


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_approx_kl_is_never_negative(scale: float) -> None:
    log_ratio = scale * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    for part in log_ratio.split(10):
        assert surrogate(part, torch.zeros(10)).approx_kl >= 0


@pytest.mark.parametrize("columns", [c for c in itertools.product([False, True], repeat=4) if any(c)])
def test_a_column_among_batch_vectors_is_refused_by_the_surrogate(columns: tuple[bool, ...]) -> None:
    tensors = (LOG_RATIO, torch.zeros(4), ADVANTAGES, ALL)
    new, old, advantages, valid = (x[:, None] if column else x for x, column in zip(tensors, columns, strict=True))
    with pytest.raises(ValueError, match=r"has shape \(4, 1\), expected \[batch\]"):
        losses.clipped_surrogate(new, old, advantages, valid, FOUR, CLIP)


@pytest.mark.parametrize("column", range(4))
def test_a_column_among_batch_vectors_is_refused_by_the_value_loss(column: int) -> None:
    tensors = (torch.zeros(4), torch.zeros(4), torch.zeros(4), ALL)
    values, old, targets, valid = (x[:, None] if index == column else x for index, x in enumerate(tensors))
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        losses.value_loss(values, old, targets, valid, FOUR, CLIP)


def test_a_shorter_vector_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"valid has shape \(4,\), expected .* entropies \(1,\)"):
        losses.entropy_bonus(torch.zeros(1), ALL, FOUR)


@pytest.mark.parametrize(
    ("value", "loss", "gradient"), [(2.0, 1.62, 0.0), (-1.0, 8.0, -4.0), (1.1, 1.805, -1.9), (5.0, 2.0, 2.0)]
)
def test_the_clipped_value_loss_takes_the_larger_error(value: float, loss: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    one = torch.ones(1)
    result = losses.value_loss(values, one, 3 * one, one.bool(), one[0], 0.2)
    result.backward()
    torch.testing.assert_close(result.detach(), torch.tensor(loss))
    torch.testing.assert_close(values.grad, torch.tensor([gradient]))


def test_without_a_range_the_value_loss_is_half_the_mean_squared_error() -> None:
    values, targets = torch.randn(2, 7).unbind()
    valid = torch.ones(7, dtype=torch.bool)
    loss = losses.value_loss(values, torch.zeros(7), targets, valid, torch.tensor(7.0), None)
    torch.testing.assert_close(loss, 0.5 * torch.nn.functional.mse_loss(values, targets))


def test_descending_the_entropy_term_makes_the_policy_more_random() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    one = torch.ones(1)
    entropy = losses.entropy_bonus(Categorical(logits).entropy(), one.bool(), one[0])
    (-0.01 * entropy).backward()
    torch.testing.assert_close(entropy.detach(), torch.tensor(0.56233514))
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.00205990, 0.00205990]]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_that_do_not_count_change_no_loss_and_no_gradient(poison: float) -> None:
    valid = torch.tensor([True, False, True, True, False])
    three = torch.tensor(3.0)

    def evaluate(filler: float) -> tuple[Tensor, Tensor]:
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).masked_fill(~valid, filler)
        rows.requires_grad_()
        a, b, c, d = rows.unbind()
        loss = losses.clipped_surrogate(a, b, c, valid, three, CLIP).loss
        loss = loss + losses.value_loss(d, b.detach(), c.detach(), valid, three, CLIP)
        (loss + losses.entropy_bonus(a, valid, three)).backward()
        assert rows.grad is not None
        return loss.detach(), rows.grad

    for got, expected in zip(evaluate(poison), evaluate(0.0), strict=True):
        assert torch.equal(got, expected)


def test_a_batch_without_a_valid_row_has_a_loss_of_zero() -> None:
    none, zero = torch.zeros(4, dtype=torch.bool), torch.tensor(0.0)
    result = losses.clipped_surrogate(LOG_RATIO, LOG_RATIO, ADVANTAGES, none, zero, CLIP)
    assert [float(x) for x in result] == [0.0, 0.0, 0.0]


def test_advantages_are_standardized_over_the_whole_batch_by_the_population_deviation() -> None:
    expected = [-1.15669692, -1.06416117, -0.90993491, -0.69401815, -0.41641089]
    expected += [-0.07711313, 0.32387514, 0.78655391, 1.31092318, 1.89698295]
    result = losses.standardize(SQUARES, moments(SQUARES))
    torch.testing.assert_close(result, torch.tensor(expected).view(5, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("constant", [7.0, 0.0, 0.1, 0.7, 1.1, -123.4])
def test_constant_advantages_become_exactly_zero(constant: float) -> None:
    advantages = torch.full((1000,), constant)
    mean = advantages.sum() / 1000  # in float32, as a kernel sums: most of these means are off by a rounding
    m2 = (advantages - mean).square().sum()
    result = losses.standardize(advantages, torch.stack([torch.tensor(1000.0), mean, m2]))
    assert torch.equal(result, torch.zeros(1000))


def test_a_nan_advantage_is_not_taken_for_a_constant() -> None:
    result = losses.standardize(torch.ones(3), torch.tensor([3.0, math.nan, math.nan]))
    assert result.isnan().all()


def test_explained_variance_equals_numpy_over_the_valid_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randn(7, 3, generator=generator) + 4
    values = targets + 0.3 * torch.randn(7, 3, generator=generator)
    valid = torch.rand(7, 3, generator=generator) < 0.7
    expected = 1 - np.var((targets - values)[valid].numpy()) / np.var(targets[valid].numpy())
    poisoned = targets.masked_fill(~valid, math.nan)
    assert float(losses.explained_variance(values, poisoned, valid)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("constant", [0.0, 0.1, 7.0])
def test_explained_variance_of_targets_that_do_not_vary_is_zero(constant: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    valid = torch.ones(1000, dtype=torch.bool)
    assert losses.explained_variance(values, torch.full((1000,), constant), valid) == 0
