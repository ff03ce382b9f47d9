"""What the tests of the policy losses share: random problems, and one call that gives report and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import loss_reference
from kernels.loss_inputs import REPORTED

Problem = dict[str, Any]
LEAVES = ("policy_outputs", "values", "log_std")
#: Distribution, rows, actions: one row, less than a tile, several tiles with a last one in part, one action, many.
SHAPES = [("gaussian", 1, 1), ("gaussian", 33, 3), ("gaussian", 601, 8), ("categorical", 1, 1), ("categorical", 63, 5),
          ("categorical", 301, 18)]  # fmt: skip
OPTIONS = ("gathered", "value_clip", "moments")
VARIANTS = [dict(zip(OPTIONS, flags, strict=True)) for flags in itertools.product((False, True), repeat=3)]


def problem(
    distribution: str, rows: int, actions: int, seed: int = 0, *, gathered: bool = False, value_clip: bool = True,
    moments: bool = False, valid: float = 0.7,
) -> Problem:  # fmt: skip
    """Arguments of `kernels.ppo_loss`: ratios on both sides of the clip range, about ``valid`` of the rows count."""
    generator = torch.Generator().manual_seed(seed)
    total = 2 * rows + 1 if gathered else rows

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    outputs, log_std = draw(rows, actions), 0.3 * draw(actions)
    indices = torch.randperm(total, generator=generator)[:rows] if gathered else torch.arange(rows)
    if distribution == "gaussian":
        taken = draw(total, actions)
        taken[indices] = outputs + log_std.exp() * draw(rows, actions)
    else:
        taken = torch.randint(actions, (total,), generator=generator)
    present = loss_reference.log_probs_and_entropies(
        outputs, taken[indices], log_std if distribution == "gaussian" else None
    )[0]
    old_log_probs = draw(total)
    old_log_probs[indices] = present + 0.25 * draw(rows)
    advantages = 2.0 * draw(total) + 0.5
    kept = torch.rand(total, generator=generator) < valid
    kept[indices[0]] = True
    spread = (advantages - advantages.mean()).square().sum()
    return {
        "policy_outputs": outputs,
        "values": draw(rows),
        "actions": taken,
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "value_targets": draw(total) + 3.0,
        "old_values": draw(total) if value_clip else None,
        "valid": kept,
        "log_std": log_std if distribution == "gaussian" else None,
        "indices": indices if gathered else None,
        "advantage_moments": torch.stack([torch.tensor(float(total)), advantages.mean(), spread]) if moments else None,
        "clip_range": 0.2,
        "value_clip_range": 0.3 if value_clip else None,
        "value_coef": 0.7,
        "entropy_coef": 0.05,
    }


def for_vtrace(problem: Mapping[str, Any]) -> Problem:
    """The same rows as arguments of `kernels.vtrace_loss`."""
    dropped = ("old_log_probs", "old_values", "clip_range", "value_clip_range", "advantages")
    kept = {name: value for name, value in problem.items() if name not in dropped}
    return {**kept, "pg_advantages": problem["advantages"]}


def leaves_of(problem: Mapping[str, Any], dtype: torch.dtype | None = None, device: str = "cpu") -> dict[str, Tensor]:
    """Fresh copies of the tensors that gradients flow to."""
    given = {name: problem[name] for name in LEAVES if problem[name] is not None}
    return {name: x.to(device, dtype or x.dtype, copy=True).requires_grad_() for name, x in given.items()}


def run(problem: Mapping[str, Any], backend: str, device: str = "cpu", scale: float = 1.0) -> dict[str, Tensor]:
    """Report and gradients of ``scale * total`` by name, on the CPU; with ``pg_advantages`` the V-trace loss."""
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in problem.items()}
    leaves = leaves_of(problem, device=device)
    function: Any = kernels.vtrace_loss if "pg_advantages" in problem else kernels.ppo_loss
    loss = function(**{**there, **leaves}, backend=backend)
    (scale * loss.total).backward()
    report = dict(zip(REPORTED[-len(loss.report) :], loss.report.cpu().unbind(), strict=True))
    torch.testing.assert_close(loss.total.detach().cpu(), report["total"], rtol=0, atol=0, equal_nan=True)
    return {**report, **gradients_of(leaves)}


def run_reference(problem: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same from `kernels.loss_reference`, in float64."""
    arguments, leaves = dict(problem), leaves_of(problem, torch.float64)
    is_vtrace = "pg_advantages" in arguments
    if is_vtrace:
        arguments |= {"advantages": arguments.pop("pg_advantages"), "old_log_probs": None}
    results = loss_reference.policy_loss(**{**arguments, **leaves})
    results["total"].backward()
    names = REPORTED[2:] if is_vtrace else REPORTED
    return {**{name: results[name].detach() for name in names}, **gradients_of(leaves)}


def gradients_of(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by name, on the CPU."""
    found = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        found[f"d_{name}"] = leaf.grad.cpu()
    return found


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 2e-5) -> None:
    """Every result within float32's rounding of some hundred terms, as a share of the largest entry."""
    assert set(got) == set(expected)
    for name, x in expected.items():
        scale = float(x.abs().max()) if x.numel() else 0.0
        torch.testing.assert_close(
            got[name].double(),
            x.double(),
            rtol=0,
            atol=rtol * max(scale, 0.05),
            msg=lambda text, n=name: f"{n}: {text}",
        )
