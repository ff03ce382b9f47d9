"""Running normalizers against numpy in float64, in odd splits, with rows that must not count."""

import math

import numpy as np
import pytest
import torch
from fake_env import CPU, random_script
from torch import Tensor, nn

from trainer.normalize import ObservationNormalizer, RewardNormalizer, RunningMoments, ValueNormalizer, moments

SPLITS = {"at once": [60], "one by one": [1] * 60, "odd": [1, 7, 0, 31, 2, 19]}


def all_valid(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


def learned(rows: Tensor, *, valid: Tensor | None = None, split: list[int] | None = None) -> RunningMoments:
    running = RunningMoments(tuple(rows.shape[1:]))
    valid = all_valid(rows) if valid is None else valid
    for part, mask in zip(rows.split(split or [len(rows)]), valid.split(split or [len(rows)]), strict=True):
        running.update(part, mask)
    return running


def assert_moments(running: RunningMoments, rows: np.ndarray) -> None:
    rows = rows.astype(np.float64)
    assert running.count == len(rows)
    np.testing.assert_allclose(running.mean.numpy(), rows.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(running.variance().numpy(), rows.var(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("offset", [0.0, 20_000.0, -1e6])
def test_running_moments_equal_numpy_however_the_rows_are_split(split: list[int], offset: float) -> None:
    rows = torch.randn(60, 2, 3, generator=torch.Generator().manual_seed(0)) + offset
    assert_moments(learned(rows, split=split), rows.numpy())


@pytest.mark.parametrize("split", [[3], [1, 1, 1]])
def test_a_large_offset_cancels_nothing(split: list[int]) -> None:
    rows = torch.tensor([20000.0, 20000.5, 20001.0])
    normalizer = ObservationNormalizer((), clip=10.0)
    normalizer.running = learned(rows, split=split)
    assert float(normalizer.running.mean) == 20000.5
    assert float(normalizer.running.variance()) == pytest.approx(1 / 6, rel=1e-12)
    torch.testing.assert_close(normalizer(rows), torch.tensor([-1.22474487, 0.0, 1.22474487]))


def test_a_mean_between_two_float32_numbers_is_subtracted_whole() -> None:
    rows = torch.tensor([20000.0, 20000.0 + 2**-9])  # neighbours in float32
    normalizer = ObservationNormalizer((), clip=10.0)
    normalizer.running = learned(rows)
    deviation = 2**-10
    expected = deviation / math.sqrt(deviation**2 + 1e-8)
    torch.testing.assert_close(normalizer(rows), torch.tensor([-expected, expected]))


def test_the_deviation_does_not_shrink_with_more_batches() -> None:
    running = RunningMoments(())
    for _ in range(1000):
        running.update(torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    assert (float(running.count), float(running.variance())) == (2000.0, 1.0)


def test_the_count_goes_on_beyond_float32() -> None:
    running = RunningMoments(())
    running.count.fill_(2**24)
    running.m2.fill_(2**24)
    running.update(torch.tensor([1.0]), torch.ones(1, dtype=torch.bool))
    assert float(running.count) == 2**24 + 1
    assert float(running.mean) == pytest.approx(1 / (2**24 + 1), rel=1e-12)


@pytest.mark.parametrize("constant", [3.0, 0.1, -1234.567])
def test_a_constant_column_becomes_exactly_zero(constant: float) -> None:
    rows = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    rows[:, 1] = constant
    normalizer = ObservationNormalizer((2,), clip=10.0)
    for part in rows.split(37):
        normalizer.running.update(part, all_valid(part))
    assert torch.equal(normalizer(rows)[:, 1], torch.zeros(1000))


def test_unsigned_integers_do_not_wrap_around() -> None:
    running = learned(torch.tensor([[0], [255]], dtype=torch.uint8))
    assert (float(running.mean), float(running.variance())) == (127.5, 16256.25)


def test_float64_rows_keep_their_precision() -> None:
    running = learned(torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64))
    assert float(running.variance()) == pytest.approx(2 / 3, rel=1e-12)


def test_squares_beyond_float32_do_not_overflow() -> None:
    assert float(learned(torch.tensor([1e25, -1e25])).variance()) == pytest.approx(1e50)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_or_not_valid_count_nowhere(poison: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, valid = torch.randn(31, 3, generator=generator), torch.rand(31, generator=generator) < 0.8
    finite = torch.rand(31, generator=generator) < 0.8
    poisoned = rows.clone()
    poisoned[~finite, 1] = poison
    poisoned[~valid] = poison
    assert_moments(learned(poisoned, valid=valid, split=[7, 24]), rows[valid & finite].numpy())


def test_a_batch_without_a_row_that_counts_changes_nothing() -> None:
    rows = torch.randn(5, 2)
    running, untouched = learned(rows), learned(rows)
    running.update(torch.full((3, 2), math.nan), torch.ones(3, dtype=torch.bool))
    running.update(rows, torch.zeros(5, dtype=torch.bool))
    for got, expected in zip(running.buffers(), untouched.buffers(), strict=True):
        assert torch.equal(got, expected)
    assert moments(rows[:0], all_valid(rows[:0])).abs().sum() == 0


def test_normalizing_updates_nothing_clips_and_lets_a_nan_be_seen() -> None:
    normalizer = ObservationNormalizer((2,), clip=2.0)
    normalizer.running = learned(torch.randn(100, 2, generator=torch.Generator().manual_seed(0)))
    before = [buffer.clone() for buffer in normalizer.buffers()]
    result = normalizer(torch.tensor([[1e9, -1e9], [math.nan, 0.0]]))
    assert torch.equal(result[0], torch.tensor([2.0, -2.0]))
    assert result[1, 0].isnan() and result[1, 1].isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, normalizer.buffers(), strict=True))


def test_before_anything_was_seen_observations_pass() -> None:
    observations = torch.tensor([[-3.0, 0.0, 4.0]])
    torch.testing.assert_close(ObservationNormalizer((3,), clip=10.0)(observations), observations)


def naive_discounted_returns(script, gamma: float) -> list[float]:
    """The return so far at every valid row, env by env."""
    returns = []
    for env in range(script.rewards.shape[1]):
        running = 0.0
        for t in range(len(script.rewards)):
            if not script.valid[t, env]:
                continue
            running = float(script.rewards[t, env]) + gamma * running
            returns.append(running)
            if script.terminated[t, env] or script.truncated[t, env]:
                running = 0.0
    return returns


@pytest.mark.parametrize("windows", [[29], [1] * 29, [3, 7, 1, 18]])
def test_reward_normalization_equals_a_loop_over_each_env_whatever_the_windows(windows: list[int]) -> None:
    script = random_script(29, 5, seed=3)
    normalizer = RewardNormalizer(5, 0.9, "torch", CPU)
    results = [
        normalizer(*parts) for parts in zip(*(tensor.split(windows) for tensor in script[1:]), strict=True)
    ]  # rewards, terminated, truncated, valid
    expected = naive_discounted_returns(script, 0.9)
    assert normalizer.running.count == len(expected)
    # the returns are float32 sums
    assert float(normalizer.running.mean) == pytest.approx(np.mean(expected), abs=1e-6)
    assert float(normalizer.running.variance()) == pytest.approx(np.var(expected), rel=1e-6)
    last = windows[-1]
    torch.testing.assert_close(results[-1], script.rewards[-last:] / float(np.std(expected)), rtol=1e-5, atol=1e-6)


def test_reward_normalization_ignores_what_filler_rows_hold() -> None:
    script = random_script(29, 5, seed=3)
    clean, poisoned = (RewardNormalizer(5, 0.9, "torch", CPU) for _ in range(2))
    flags = script.terminated, script.truncated, script.valid
    expected = clean(script.rewards, *flags)
    result = poisoned(script.rewards.masked_fill(~script.valid, math.nan), *flags)
    assert torch.equal(result[script.valid], expected[script.valid])
    for got, want in zip(poisoned.buffers(), clean.buffers(), strict=True):
        assert torch.equal(got, want)


def test_restarting_forgets_the_returns_under_way() -> None:
    one = torch.ones(1, 1)
    no, yes = torch.zeros(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    normalizer = RewardNormalizer(1, 1.0, "torch", CPU)
    normalizer(one, no, no, yes)
    normalizer.restart()
    normalizer(one, no, no, yes)
    assert (float(normalizer.running.mean), float(normalizer.running.variance())) == (1.0, 0.0)


def test_popart_keeps_predictions_while_the_statistics_move() -> None:
    torch.manual_seed(0)
    normalizer, head = ValueNormalizer(), nn.Linear(8, 1)
    features, valid = torch.randn(31, 8), torch.ones(7, 3, dtype=torch.bool)
    for scale, offset in ((1.0, 0.0), (50.0, 300.0), (0.1, -20.0)):
        before = normalizer.denormalize(head(features))
        normalizer.update(offset + scale * torch.randn(7, 3), valid, head)
        # rounding of numbers of the size of the running mean and deviation
        torch.testing.assert_close(normalizer.denormalize(head(features)), before, rtol=1e-5, atol=1e-3)


def test_popart_normalizes_targets_to_mean_zero_and_deviation_one() -> None:
    targets = 5 + 3 * torch.randn(63, 3, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(63, 3, generator=torch.Generator().manual_seed(1)) < 0.8
    normalizer, head = ValueNormalizer(), nn.Linear(2, 1)
    normalizer.update(targets.masked_fill(~valid, math.nan), valid, head)
    normalized = normalizer.normalize(targets)[valid]
    assert abs(float(normalized.mean())) < 1e-5
    assert float(normalized.std(correction=0)) == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(normalizer.denormalize(normalizer.normalize(targets)), targets)


def test_statistics_that_do_not_move_change_no_bit_of_the_head() -> None:
    normalizer, head = ValueNormalizer(), nn.Linear(4, 1)
    targets, nothing = torch.randn(5, 2), torch.zeros(5, 2, dtype=torch.bool)
    normalizer.update(targets, ~nothing, head)
    before = [parameter.clone() for parameter in head.parameters()]
    normalizer.update(targets, nothing, head)
    assert all(torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))
