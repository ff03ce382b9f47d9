"""IMPALA's whole loss in one call: log-probabilities, policy gradient, value loss and entropy, with their gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.loss_dispatch import solve
from kernels.loss_inputs import Coefficients, LossInputs, Scalar
from kernels.operations import Backend


class VTraceLoss(NamedTuple):
    """What `vtrace_loss` returns: float32 scalars (float64 for float64 inputs); only ``total`` has a gradient."""

    total: Tensor  #: the scalar to descend: ``policy + value_coef * value - entropy_coef * entropy``
    policy: Tensor  #: the negated policy-gradient objective
    value: Tensor  #: half the mean of the squared errors
    entropy: Tensor  #: mean entropy, in nats; a larger one is a more random policy
    explained_variance: Tensor  #: ``1 - Var[target - value] / Var[target]``; 0 where the targets do not vary
    row_count: Tensor  #: what the sums were divided by
    report: Tensor  #: ``[6]``, detached: the scalars above in their order; all but the last two sum over ranks


def vtrace_loss(
    policy_outputs: Tensor,
    values: Tensor,
    actions: Tensor,
    pg_advantages: Tensor,
    value_targets: Tensor,
    valid: Tensor | None = None,
    *,
    log_std: Tensor | None = None,
    indices: Tensor | None = None,
    count: Tensor | None = None,
    advantage_moments: Tensor | None = None,
    value_coef: Scalar,
    entropy_coef: Scalar,
    backend: Backend = "auto",
) -> VTraceLoss:
    """The losses of an actor-critic with V-trace targets (Espeholt et al. 2018, section 4.2).

    Over the valid rows, n their ``count``, at least 1: ``policy = -sum(pg_advantage * log_prob) / n``;
    ``value = 0.5 * sum((vs - v)^2) / n``; ``total = policy + value_coef * value - entropy_coef * entropy``. The paper
    sums where this takes means: a ``count`` of 1 gives its sums.

    Args:
        pg_advantages: ``[R]``, ``rho * (r + gamma * vs_next - V)``, a constant.
        value_targets: ``[R]``, vs, in the units of ``values``.
        policy_outputs, values, actions, valid, log_std, indices, count, advantage_moments, value_coef, entropy_coef:
            see `kernels.ppo_loss`, as for distributions, gradients, rows that are not valid, and ``backend``.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: an argument of the wrong shape, device or range, or a backend that is unknown or cannot run here.
    """
    inputs = LossInputs(
        policy_outputs, values, log_std, actions, pg_advantages, value_targets, None, None, valid, indices, count,
        advantage_moments,
    )  # fmt: skip
    total, report = solve(inputs, Coefficients(0.0, None, value_coef, entropy_coef), backend)
    _, _, _, policy, value, entropy, explained_variance, row_count = report.unbind()
    return VTraceLoss(total, policy, value, entropy, explained_variance, row_count, report[2:])
