"""Adam over one vector against torch's in float64: clipped, withheld, fused or not; and over a module's parameters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from kernels.adam import Moments, adam_step, sum_squares
from kernels.step_guard import COUNTS, Decision, GuardSettings
from trainer.optimizer import GuardedAdam

BACKENDS = [
    pytest.param(False, "cpu", id="torch"),
    pytest.param(True, "cpu", id="interpreted", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU")),
    pytest.param(True, "cuda", id="fused", marks=pytest.mark.gpu),
]
every_backend = pytest.mark.parametrize(("fused", "device"), BACKENDS)


def decision(device: str, withheld: bool = False, scale: float = 1.0, learning_rate: float = 1e-2) -> Decision:
    return Decision(*(torch.tensor(float(x), device=device) for x in (withheld, scale, learning_rate)))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@every_backend
@pytest.mark.parametrize("size", [1, 63, 1025, 3001])
def test_steps_are_those_of_torchs_adam_in_float64(fused: bool, device: str, size: int) -> None:
    vector = noise(size).to(device)
    moments = Moments(torch.zeros_like(vector), torch.zeros_like(vector), torch.zeros((), device=device))
    expected = nn.Parameter(noise(size).double())
    adam = torch.optim.Adam([expected], lr=1e-2, eps=1e-5)
    for step in range(1, 6):
        gradient = noise(size, seed=step) * 10.0 ** (step - 3)
        expected.grad = 0.25 * gradient.double()
        adam.step()
        moments.steps.add_(1)
        adam_step(vector, gradient.to(device), moments, decision(device, scale=0.25), 1e-5, fused)
        # both moments are rounded to float32 at every step
        torch.testing.assert_close(vector.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    state = adam.state[expected]
    torch.testing.assert_close(moments.first.cpu().double(), state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.second.cpu().double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-9)


@every_backend
@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf])
def test_a_step_that_is_withheld_changes_no_bit(fused: bool, device: str, bad: float) -> None:
    kept = [noise(1025, seed=seed).to(device) for seed in range(2)] + [noise(1025, seed=2).abs().to(device)]
    before = [x.clone() for x in kept]
    moments = Moments(kept[1], kept[2], torch.tensor(0.0, device=device))
    gradient = torch.full((1025,), bad, device=device)
    adam_step(kept[0], gradient, moments, decision(device, withheld=True, scale=bad), 1e-5, fused)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


@every_backend
@pytest.mark.parametrize("size", [1, 1023, 300_001])
def test_the_squares_of_a_gradient_are_summed_in_parts(fused: bool, device: str, size: int) -> None:
    gradient = noise(size)
    parts = sum_squares(gradient.to(device), fused)
    assert parts.dim() == 1 and parts.dtype == torch.float32
    assert float(parts.double().sum()) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)


class Network(nn.Module):
    """Parameters of several layouts, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, kernel_size=2)
        self.convolution.weight.data = self.convolution.weight.data.contiguous(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, frames: Tensor) -> Tensor:
        return self.convolution(frames).mean((2, 3)) @ self.turned


@every_backend
def test_parameters_are_trained_in_place_whatever_their_layout(fused: bool, device: str) -> None:
    module, expected = Network().to(device), Network().to(device)
    strides = [p.stride() for p in module.parameters()]
    rate = torch.tensor(1e-2, device=device)
    optimizer = GuardedAdam(module.parameters(), rate, 1e-5, GuardSettings(max_grad_norm=0.5), fused)
    for a, b in itertools.zip_longest(module.parameters(), expected.parameters()):
        assert torch.equal(a, b)
    adam = torch.optim.Adam(expected.parameters(), lr=1e-2, eps=1e-5)
    totals, one = torch.zeros(COUNTS + 2, device=device), torch.ones((), device=device)
    for seed in range(4):
        frames = noise(6, 3, 5, 5, seed=seed).to(device)
        gradient, report = optimizer.gradient(module(frames).square().mean(), one[None])
        optimizer.step(gradient, report, one, totals)
        adam.zero_grad()
        expected(frames).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        adam.step()
        assert gradient.shape == optimizer.moments.first.shape
        assert float(gradient.norm()) == pytest.approx(float(norm), rel=1e-5)
    assert [p.stride() for p in module.parameters()] == strides
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert totals.tolist()[:COUNTS] == [0, 0, 4] and float(optimizer.moments.steps) == 4


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    def steps(optimizer: GuardedAdam, module: nn.Module, seeds: range) -> None:
        for seed in seeds:
            gradient, report = optimizer.gradient(module(noise(6, 3, 5, 5, seed=seed)).square().mean(), torch.ones(1))
            optimizer.step(gradient, report, torch.ones(()), torch.zeros(COUNTS + 2))

    def make(module: nn.Module) -> GuardedAdam:
        return GuardedAdam(module.parameters(), torch.tensor(1e-2), 1e-5, GuardSettings(), fused=False)

    one, other = Network(), Network()
    straight, resumed = make(one), make(other)
    steps(straight, one, range(6))
    first = Network()
    began = make(first)
    steps(began, first, range(3))
    other.load_state_dict(first.state_dict())
    resumed.load_state_dict(began.state_dict())
    steps(resumed, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_saved_state_is_in_the_parameters_order_wherever_they_lie() -> None:
    parameters = [nn.Parameter(noise(size, seed=size)) for size in (3, 8, 5, 4)]  # those of 3 and 5 lie last
    before = torch.cat([p.detach().clone() for p in parameters])

    def make() -> GuardedAdam:
        return GuardedAdam(parameters, torch.tensor(1e-2), 1e-5, GuardSettings(max_grad_norm=100.0), fused=False)

    optimizer, other = make(), make()
    gradient, report = other.gradient(torch.stack([p.square().sum() / 2 for p in parameters]).sum(), torch.zeros(2))
    other.step(gradient, report, torch.ones(()), torch.zeros(COUNTS + 3))
    state = other.state_dict()
    torch.testing.assert_close(state["first"], 0.1 * before)
    torch.testing.assert_close(state["second"], 1e-3 * before.square())
    optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.moments, other.moments, strict=True))
