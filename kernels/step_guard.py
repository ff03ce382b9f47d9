"""Whether and how far an optimizer step is taken, decided where the losses are: on the device, with no word to the
host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.operations import describe

#: Scalars of the state in front of the sums: minibatches skipped, stopped and reported.
COUNTS = 3


class GuardSettings(NamedTuple):
    """When minibatches are withheld, how gradients are clipped, and how the learning rate follows the KL."""

    max_grad_norm: float = float("inf")  #: longer gradients are shortened to it
    target_kl: float | None = None  #: above it no further step is taken; None never stops
    desired_kl: float | None = None  #: what the learning rate is adapted to; None leaves it
    min_learning_rate: float = 0.0
    max_learning_rate: float = 1.0


class Decision(NamedTuple):
    """What `guard_step` returns, for one optimizer step; float32 scalars on the device."""

    withheld: Tensor  #: 1 where the step is not to be taken, else 0
    scale: Tensor  #: what the gradient is multiplied with, at most 1
    learning_rate: Tensor  #: of this step


def guard_step(
    report: Tensor,
    squares: Tensor,
    num_valid: Tensor,
    state: Tensor,
    steps: Tensor,
    learning_rate: Tensor,
    settings: GuardSettings,
    fused: bool = False,
) -> Decision:
    """Decide over one minibatch's optimizer step, and count it.

    A minibatch *skips* if its report or gradient norm is not finite, or if one before it in the update did; it *stops*
    if its KL is above ``target_kl``, or if one before it did. It is *live*, and counted in the sums, if none before it
    halted the update, its numbers are finite and a row of it is valid; the step is taken if it is live and does not
    stop. The gradient is scaled by ``min(1, max_grad_norm / (norm + 1e-6))``. A live minibatch adapts the rate of the
    next: ``max(lr / 1.5, min)`` where its KL is above twice ``desired_kl``, ``min(lr * 1.5, max)`` where it is below
    half of it.

    Args:
        report: ``[R]`` float32, the KL first, over all ranks.
        squares: ``[parts]`` float32, which sum to the squared norm of the gradient.
        num_valid: scalar float32, valid rows of the minibatch over all ranks.
        state: ``[COUNTS + R + 1]`` float32, changed in place: how many minibatches skipped, stopped and were live, and
            the sums of live reports and gradient norms; zeros before an update.
        steps: scalar float32, one more in place where the step is taken.
        learning_rate: scalar float32, of this step; in place, of the next.
        settings: thresholds and bounds.
        fused: one Triton launch instead of some fifty of torch.

    Raises:
        ValueError: ``state`` has another size.
    """
    size = COUNTS + len(report) + 1
    if state.shape != (size,):
        raise ValueError(f"state: expected [{size}] for report {describe(report)}, got {describe(state)}")
    if fused:
        from kernels import triton_step_guard  # here, so that the package imports where Triton is not installed

        return triton_step_guard.guard_step(report, squares, num_valid, state, steps, learning_rate, settings)
    return _in_torch(report, squares.sum().sqrt(), num_valid, state, steps, learning_rate, settings)


def _in_torch(
    report: Tensor,
    grad_norm: Tensor,
    num_valid: Tensor,
    state: Tensor,
    steps: Tensor,
    learning_rate: Tensor,
    settings: GuardSettings,
) -> Decision:
    report = torch.cat([report, grad_norm[None]])
    skipped, stopped, reported = state[:COUNTS].unbind()
    kl = report[0]
    above = torch.zeros_like(kl, dtype=torch.bool) if settings.target_kl is None else kl > settings.target_kl
    skipping = (skipped > 0) | ((stopped == 0) & ~torch.isfinite(report).all())
    stopping = ~skipping & ((stopped > 0) | above)
    live = ~skipping & (stopped == 0) & (num_valid > 0)
    withheld = (~live | stopping).float()
    skipped += skipping
    stopped += stopping
    reported += live
    state[COUNTS:] += torch.where(live, report, 0.0)
    steps += 1.0 - withheld
    decision = Decision(withheld, (settings.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0), learning_rate.clone())
    if settings.desired_kl is not None:
        lower = (learning_rate / 1.5).clamp(min=settings.min_learning_rate)
        higher = (learning_rate * 1.5).clamp(max=settings.max_learning_rate)
        adapted = torch.where(kl > 2.0 * settings.desired_kl, lower, learning_rate)
        adapted = torch.where(kl < 0.5 * settings.desired_kl, higher, adapted)
        learning_rate.copy_(torch.where(live, adapted, learning_rate))
    return decision
