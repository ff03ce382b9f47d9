"""Whether an optimizer step is taken, decided where the losses are: on the device, with no word to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.operations import describe

#: Scalars of the state in front of the sums: minibatches skipped, stopped and reported.
COUNTS = 3


class GuardSettings(NamedTuple):
    """When minibatches are withheld, and how the learning rate follows the KL."""

    target_kl: float | None = None  #: above it no further step is taken; None never stops
    desired_kl: float | None = None  #: what the learning rate is adapted to; None leaves it
    min_learning_rate: float = 0.0
    max_learning_rate: float = 1.0


class Decision(NamedTuple):
    """What `guard_step` returns; float32 scalars on the device."""

    withheld: Tensor  #: 1 where the step is not to be taken, else 0
    learning_rate: Tensor  #: for the minibatches after this one


def guard_step(
    report: Tensor,
    grad_norm: Tensor,
    num_valid: Tensor,
    state: Tensor,
    learning_rate: Tensor,
    settings: GuardSettings,
    fused: bool = False,
) -> Decision:
    """Decide over one minibatch's optimizer step, and count it.

    A minibatch *skips* if its report or gradient norm is not finite, or if one before it in the update did; it *stops*
    if its KL is above ``target_kl``, or if one before it did. It is *live*, and counted in the sums, if none before it
    halted the update, its numbers are finite and a row of it is valid; the step is taken if it is live and does not
    stop. A live minibatch adapts the rate of the next: ``max(lr / 1.5, min)`` where its KL is above twice
    ``desired_kl``, ``min(lr * 1.5, max)`` where it is below half of it.

    Args:
        report: ``[R]`` float32, the KL first, over all ranks.
        grad_norm: scalar float32.
        num_valid: scalar float32, valid rows of the minibatch over all ranks.
        state: ``[COUNTS + R + 1]`` float32, changed in place: how many minibatches skipped, stopped and were live, and
            the sums of live reports and gradient norms; zeros before an update.
        learning_rate: scalar float32, of this step.
        settings: thresholds and bounds.
        fused: one Triton launch instead of some forty of torch.

    Raises:
        ValueError: ``state`` has another size.
    """
    size = COUNTS + len(report) + 1
    if state.shape != (size,):
        raise ValueError(f"state: expected [{size}] for report {describe(report)}, got {describe(state)}")
    if fused:
        from kernels import triton_step_guard  # here, so that the package imports where Triton is not installed

        return triton_step_guard.guard_step(report, grad_norm, num_valid, state, learning_rate, settings)
    return _in_torch(torch.cat([report, grad_norm[None]]), num_valid, state, learning_rate, settings)


def _in_torch(
    report: Tensor, num_valid: Tensor, state: Tensor, learning_rate: Tensor, settings: GuardSettings
) -> Decision:
    skipped, stopped, reported = state[:COUNTS].unbind()
    kl = report[0]
    above = torch.zeros_like(kl, dtype=torch.bool) if settings.target_kl is None else kl > settings.target_kl
    skipping = (skipped > 0) | ((stopped == 0) & ~torch.isfinite(report).all())
    stopping = ~skipping & ((stopped > 0) | above)
    live = ~skipping & (stopped == 0) & (num_valid > 0)
    skipped += skipping
    stopped += stopping
    reported += live
    state[COUNTS:] += torch.where(live, report, 0.0)
    if settings.desired_kl is not None:
        lower = (learning_rate / 1.5).clamp(min=settings.min_learning_rate)
        higher = (learning_rate * 1.5).clamp(max=settings.max_learning_rate)
        adapted = torch.where(kl > 2.0 * settings.desired_kl, lower, learning_rate)
        adapted = torch.where(kl < 0.5 * settings.desired_kl, higher, adapted)
        learning_rate = torch.where(live, adapted, learning_rate)
    return Decision((~live | stopping).float(), learning_rate)
