"""The guard over optimizer steps: what is withheld, what is counted, how the rate follows the KL, fused or not."""

import math

import pytest
import torch

from kernels.step_guard import COUNTS, Decision, GuardSettings, guard_step

ADAPTIVE = GuardSettings(max_grad_norm=1.0, desired_kl=0.008, min_learning_rate=1e-5, max_learning_rate=1e-2)
BACKENDS = [
    pytest.param(False, "cpu", id="torch"),
    pytest.param(True, "cpu", id="interpreted", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU")),
    pytest.param(True, "cuda", id="fused", marks=pytest.mark.gpu),
]


class Update:
    """One update's minibatches, one after another."""

    def __init__(self, settings: GuardSettings, fused: bool, device: str, rate: float = 3e-4, size: int = 6) -> None:
        if fused:
            pytest.importorskip("triton")
        self.settings, self.fused, self.device = settings, fused, device
        self.rate, self.steps = torch.tensor(rate, device=device), torch.tensor(10.0, device=device)
        self.state = torch.zeros(COUNTS + size + 1, device=device)

    def decide(
        self, kl: float = 0.008, others: float = 1.0, grad_norm: float = 2.0, num_valid: float = 5.0
    ) -> Decision:
        report = torch.tensor([kl, *[others] * (len(self.state) - COUNTS - 2)], device=self.device)
        squares = grad_norm**2 * torch.tensor([0.5, 0.25, 0.25], device=self.device)
        valid = torch.tensor(num_valid, device=self.device)
        return guard_step(report, squares, valid, self.state, self.steps, self.rate, self.settings, self.fused)

    def step(self, *arguments: float, **options: float) -> bool:
        """Whether the step is withheld."""
        rate, steps = float(self.rate), float(self.steps)
        decision = self.decide(*arguments, **options)
        assert all(x.shape == () and x.dtype == torch.float32 for x in decision)
        assert float(decision.learning_rate) == rate
        withheld = {0.0: False, 1.0: True}[float(decision.withheld)]
        assert float(self.steps) == steps + (not withheld)
        return withheld

    @property
    def counts(self) -> list[float]:
        """Skipped, stopped, live."""
        return self.state[:COUNTS].tolist()


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["kl", "others", "grad_norm"])
def test_numbers_that_are_not_finite_withhold_the_step_and_all_after_it(
    fused: bool, device: str, bad: float, place: str
) -> None:
    update = Update(ADAPTIVE, fused, device)
    assert [update.step(), update.step(**{place: bad}), update.step(), update.step()] == [False, True, True, True]
    assert update.counts == [3, 0, 1]
    torch.testing.assert_close(update.state[COUNTS:].cpu(), torch.tensor([0.008, 1, 1, 1, 1, 1, 2]))
    assert float(update.rate) == pytest.approx(3e-4)


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
def test_a_kl_above_the_target_stops_the_update_but_is_reported(fused: bool, device: str) -> None:
    update = Update(GuardSettings(target_kl=0.01), fused, device)
    assert [update.step(kl) for kl in (0.01, 0.011, 0.0, math.nan)] == [False, True, True, True]
    assert update.counts == [0, 3, 2]
    assert float(update.state[COUNTS]) == pytest.approx(0.021)
    assert update.step(others=math.nan) and update.counts == [0, 4, 2]


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
def test_a_minibatch_without_a_valid_row_is_neither_taken_nor_counted(fused: bool, device: str) -> None:
    update = Update(ADAPTIVE, fused, device)
    assert [update.step(kl=0.0, num_valid=0.0), update.step()] == [True, False]
    assert update.counts == [0, 0, 1]
    assert float(update.rate) == pytest.approx(3e-4)


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0161, 1 / 1.5), (0.0159, 1.0), (0.008, 1.0), (0.0041, 1.0), (0.0039, 1.5), (0.0, 1.5)]
)
def test_the_adaptive_rate_moves_by_half_away_from_a_wrong_kl(
    fused: bool, device: str, kl: float, factor: float
) -> None:
    update = Update(ADAPTIVE, fused, device)
    update.step(kl)
    assert float(update.rate) == pytest.approx(3e-4 * factor, rel=1e-6)


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
@pytest.mark.parametrize(("kl", "limit"), [(1.0, 1e-5), (0.0, 1e-2)])
def test_the_adaptive_rate_stops_at_its_limits(fused: bool, device: str, kl: float, limit: float) -> None:
    update = Update(ADAPTIVE, fused, device)
    for _ in range(30):
        update.step(kl)
    assert float(update.rate) == pytest.approx(limit)


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_without_a_desired_kl_the_rate_stays(fused: bool, device: str, kl: float) -> None:
    update = Update(GuardSettings(), fused, device)
    assert not update.step(kl)
    assert update.rate == torch.tensor(3e-4)


@pytest.mark.parametrize(("fused", "device"), BACKENDS)
@pytest.mark.parametrize(
    ("grad_norm", "limit", "scale"), [(2.0, 0.5, 0.25), (2.0, 4.0, 1.0), (2.0, math.inf, 1.0), (0.0, 0.5, 1.0)]
)
def test_a_long_gradient_is_shortened_to_the_limit(
    fused: bool, device: str, grad_norm: float, limit: float, scale: float
) -> None:
    update = Update(GuardSettings(max_grad_norm=limit), fused, device)
    assert float(update.decide(grad_norm=grad_norm).scale) == pytest.approx(scale, rel=1e-6)
    assert float(update.state[-1]) == pytest.approx(grad_norm)  # reported as it was


@pytest.mark.parametrize(("fused", "device"), BACKENDS[1:])
@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_fused_and_in_torch_any_update_goes_alike(fused: bool, device: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    settings = ADAPTIVE._replace(target_kl=0.03)
    for _ in range(5):
        one, other = Update(settings, fused, device, size=size), Update(settings, False, "cpu", size=size)
        for _ in range(8):
            kl, others, norm = (0.012 * torch.randn(3, generator=generator).abs()).tolist()
            valid = float(torch.randint(0, 4, (), generator=generator))
            bad = math.nan if float(torch.rand((), generator=generator)) < 0.05 else norm
            assert one.step(kl, others, bad, valid) == other.step(kl, others, bad, valid)
        torch.testing.assert_close(one.state.cpu(), other.state)
        torch.testing.assert_close(one.rate.cpu(), other.rate)


def test_a_state_of_another_size_is_refused() -> None:
    report, scalar = torch.zeros(6), torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"state: expected \[10\]"):
        guard_step(report, report, scalar, torch.zeros(9), scalar, scalar, GuardSettings())
