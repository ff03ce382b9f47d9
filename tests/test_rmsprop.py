"""RMSProp: the recurrence, and steps that are withheld bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from trainer.rmsprop import RMSProp


def gradients(steps: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(steps, 7)) * 10.0 ** np.arange(-3, 4))


def step(optimizer: RMSProp, parameter: nn.Parameter, gradient: np.ndarray, withheld: float | None = None) -> None:
    parameter.grad = torch.from_numpy(gradient).to(parameter)
    optimizer.found_inf = None if withheld is None else torch.tensor(withheld)
    optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.99])
def test_steps_follow_the_recurrence_in_float64(decay: float):
    parameter = nn.Parameter(torch.ones(7))
    optimizer = RMSProp([parameter], torch.tensor(0.01), decay, eps=0.1)
    expected, square = np.ones(7), np.zeros(7)
    for gradient in gradients(20):
        step(optimizer, parameter, gradient)
        square = decay * square + (1 - decay) * gradient**2
        expected = expected - 0.01 * gradient / np.sqrt(square + 0.1)
    # 20 float32 steps of at most 0.1 around 1
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.0])
def test_a_withheld_step_changes_no_bit_whatever_the_gradient_is(bad: float):
    parameter = nn.Parameter(torch.ones(7))
    optimizer = RMSProp([parameter], 0.01)
    step(optimizer, parameter, gradients(1)[0], withheld=0.0)
    before, square = parameter.detach().clone(), optimizer.state[parameter]["square"].clone()
    assert not torch.equal(before, torch.ones(7))
    step(optimizer, parameter, np.full(7, bad), withheld=1.0)
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.state[parameter]["square"], square)


def test_a_parameter_without_a_gradient_stays():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = RMSProp([used, unused], 0.01)
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))


def test_the_state_continues_where_it_was_saved():
    first, second = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    a, b = RMSProp([first], 0.01), RMSProp([second], 0.01)
    for gradient in gradients(3):
        step(a, first, gradient)
    with torch.no_grad():
        second.copy_(first)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for gradient in gradients(2):
        step(a, first, gradient)
        step(b, second, gradient)
    assert torch.equal(first, second)
