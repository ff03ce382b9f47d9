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
    report, squares, num_valid, state, steps, learning_rate, withheld, scale, rate_of_step, max_grad_norm, target_kl,
    desired_kl, lowest, highest, parts, R: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, COUNTS: tl.constexpr,
    STOPS: tl.constexpr, ADAPTS: tl.constexpr,
):  # fmt: skip
    """`kernels.step_guard.guard_step`; the gradient norm is the report's last entry."""
    index = tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    norm = tl.sqrt(tl.sum(tl.load(squares + part, mask=part < parts, other=0.0), axis=0))
    values = tl.load(report + index, mask=index < R, other=0.0)
    values = tl.where(index == R, norm, values)
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
    taken = tl.where(live & (stopping == 0), 1.0, 0.0)
    tl.store(steps, tl.load(steps) + taken)
    tl.store(withheld, 1.0 - taken)
    tl.store(scale, tl.minimum(max_grad_norm / (norm + 1e-6), 1.0))
    rate = tl.load(learning_rate)
    tl.store(rate_of_step, rate)
    if ADAPTS:
        adapted = tl.where(kl > 2.0 * desired_kl, tl.maximum(rate / 1.5, lowest), rate)
        adapted = tl.where(kl < 0.5 * desired_kl, tl.minimum(rate * 1.5, highest), adapted)
        tl.store(learning_rate, tl.where(live, adapted, rate))


def launch(
    report: Tensor, squares: Tensor, num_valid: Tensor, state: Tensor, steps: Tensor, learning_rate: Tensor,
    settings: GuardSettings,
) -> tuple[Decision, Launch]:  # fmt: skip
    """The result and what fills it."""
    decision = Decision(*(learning_rate.new_empty(()) for _ in Decision._fields))
    thresholds = (
        settings.max_grad_norm, settings.target_kl, settings.desired_kl, settings.min_learning_rate,
        settings.max_learning_rate,
    )  # fmt: skip
    arguments = (
        report, squares, num_valid, state, steps, learning_rate, *decision, *(float(x or 0.0) for x in thresholds),
        len(squares),
    )  # fmt: skip
    constants = {
        "R": len(report), "BLOCK": next_power(len(report) + 1), "PARTS": next_power(len(squares)), "COUNTS": COUNTS,
        "STOPS": settings.target_kl is not None, "ADAPTS": settings.desired_kl is not None, "num_warps": 1,
    }  # fmt: skip
    return decision, Launch(guard_kernel, (1,), arguments, constants)


def guard_step(
    report: Tensor, squares: Tensor, num_valid: Tensor, state: Tensor, steps: Tensor, learning_rate: Tensor,
    settings: GuardSettings,
) -> Decision:  # fmt: skip
    """`kernels.step_guard.guard_step` on the tensors' device."""
    decision, one = launch(report, squares, num_valid, state, steps, learning_rate, settings)
    run([one], learning_rate.device)
    return decision
