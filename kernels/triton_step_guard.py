"""The step guard as one launch of one program: a handful of scalars that torch would touch one at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.step_guard import COUNTS, Decision, GuardSettings
from kernels.triton_call import Launch, run
from kernels.triton_tiles import next_power


@triton.jit
def guard_kernel(
    report, grad_norm, num_valid, state, learning_rate, withheld, next_rate, target_kl, desired_kl, lowest, highest,
    R: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr, STOPS: tl.constexpr, ADAPTS: tl.constexpr,
):  # fmt: skip
    """`kernels.step_guard.guard_step`; the gradient norm is the report's last entry."""
    index = tl.arange(0, BLOCK)
    values = tl.load(report + index, mask=index < R, other=0.0)
    values = tl.where(index == R, tl.load(grad_norm), values)
    finite = tl.sum(tl.where(tl.abs(values) < float("inf"), 0, 1), axis=0) == 0
    kl = tl.load(report)
    skipped, stopped, reported = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    skipping = (skipped > 0) | ((stopped == 0) & (finite == 0))
    stopping = stopped > 0
    if STOPS:
        stopping = stopping | (kl > target_kl)
    stopping = stopping & (skipping == 0)
    live = (skipping == 0) & (stopped == 0) & (tl.load(num_valid) > 0)
    tl.store(state, skipped + tl.where(skipping, 1.0, 0.0))
    tl.store(state + 1, stopped + tl.where(stopping, 1.0, 0.0))
    tl.store(state + 2, reported + tl.where(live, 1.0, 0.0))
    sums, summed = state + COUNTS + index, index <= R
    tl.store(sums, tl.load(sums, mask=summed, other=0.0) + tl.where(live, values, 0.0), mask=summed)
    rate = tl.load(learning_rate)
    if ADAPTS:
        adapted = tl.where(kl > 2.0 * desired_kl, tl.maximum(rate / 1.5, lowest), rate)
        adapted = tl.where(kl < 0.5 * desired_kl, tl.minimum(rate * 1.5, highest), adapted)
        rate = tl.where(live, adapted, rate)
    tl.store(next_rate, rate)
    tl.store(withheld, tl.where(live & (stopping == 0), 0.0, 1.0))


def launch(
    report: Tensor, grad_norm: Tensor, num_valid: Tensor, state: Tensor, learning_rate: Tensor, settings: GuardSettings
) -> tuple[Decision, Launch]:
    """The result and what fills it."""
    decision = Decision(learning_rate.new_empty(()), learning_rate.new_empty(()))
    arguments = (
        report, grad_norm, num_valid, state, learning_rate, *decision, float(settings.target_kl or 0.0),
        float(settings.desired_kl or 0.0), float(settings.min_learning_rate), float(settings.max_learning_rate),
    )  # fmt: skip
    constants = {
        "R": len(report), "BLOCK": next_power(len(report) + 1), "COUNTS": COUNTS,
        "STOPS": settings.target_kl is not None, "ADAPTS": settings.desired_kl is not None, "num_warps": 1,
    }  # fmt: skip
    return decision, Launch(guard_kernel, (1,), arguments, constants)


def guard_step(
    report: Tensor, grad_norm: Tensor, num_valid: Tensor, state: Tensor, learning_rate: Tensor, settings: GuardSettings
) -> Decision:
    """`kernels.step_guard.guard_step` on the tensors' device."""
    decision, one = launch(report, grad_norm, num_valid, state, learning_rate, settings)
    run([one], learning_rate.device)
    return decision
