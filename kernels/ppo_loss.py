"""PPO's whole loss in one call: log-probabilities, clipped surrogate, value loss and entropy, with their gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.loss_dispatch import solve
from kernels.loss_inputs import Coefficients, LossInputs, Scalar
from kernels.operations import Backend


class PPOLoss(NamedTuple):
    """What `ppo_loss` returns: float32 scalars (float64 for float64 inputs); only ``total`` has a gradient."""

    total: Tensor  #: the scalar to descend: ``policy + value_coef * value - entropy_coef * entropy``
    policy: Tensor  #: the negated clipped surrogate
    value: Tensor  #: half the mean of the (clipped) squared errors
    entropy: Tensor  #: mean entropy, in nats; a larger one is a more random policy
    approx_kl: Tensor  #: not negative: mean of ``(ratio - 1) - log ratio``
    clip_fraction: Tensor  #: the share of rows whose ratio left ``[1 - clip_range, 1 + clip_range]``
    explained_variance: Tensor  #: ``1 - Var[target - value] / Var[target]``; 0 where the targets do not vary
    row_count: Tensor  #: what the sums were divided by
    #: ``[8]``, detached: approx_kl, clip_fraction, total, policy, value, entropy (which sum over ranks),
    #: explained_variance, row_count
    report: Tensor


def ppo_loss(
    policy_outputs: Tensor,
    values: Tensor,
    actions: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    value_targets: Tensor,
    old_values: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    log_std: Tensor | None = None,
    indices: Tensor | None = None,
    count: Tensor | None = None,
    advantage_moments: Tensor | None = None,
    clip_range: Scalar,
    value_clip_range: Scalar | None = None,
    value_coef: Scalar,
    entropy_coef: Scalar,
    backend: Backend = "auto",
) -> PPOLoss:
    """PPO's clipped surrogate, value loss and entropy bonus (Schulman et al. 2017, equations 7 and 9).

    With ``ratio = exp(log_prob - old_log_prob)``, sums over the valid rows and n their ``count``, at least 1:
    ``policy = -sum(min(ratio * A, clip(ratio, 1 - c, 1 + c) * A)) / n``;
    ``value = 0.5 * sum(max((v - R)^2, (old + clip(v - old, -d, d) - R)^2)) / n``, without ``value_clip_range`` d
    ``0.5 * sum((v - R)^2) / n``; ``total = policy + value_coef * value - entropy_coef * entropy``. The KL is the
    estimator k3 of Schulman, "Approximating KL divergence" (2020).

    A state-independent diagonal Gaussian has
    ``log_prob = sum_i -((a_i - mean_i) / std_i)^2 / 2 - log_std_i - log(2 pi) / 2``, a categorical distribution the
    log-softmax of its logits at the action. An action of probability 0 adds 0 to the entropy, also where its logit is
    ``-inf``.

    Gradients reach ``policy_outputs``, ``log_std`` and ``values``; the other tensors are constants. Rows that are not
    valid are selected away: whatever they hold (NaN too) reaches no result, and their gradient is exactly 0. At the
    ends of a clip range the gradient passes, and where clipped and unclipped term are equal it is the mean of both.

    Args:
        policy_outputs: ``[B, A]``, means if ``log_std`` is given, else logits; float32, bfloat16 or float16.
        values: ``[B]``, v, of the present critic.
        actions: ``[R, A]`` floating, or ``[R]`` int64 or int32 in [0, A) for logits.
        old_log_probs: ``[R]``, of the behaviour policy, in nats.
        advantages: ``[R]``, A.
        value_targets: ``[R]``, R, in the units of ``values``.
        old_values: ``[R]``, as they were when the rollout was collected; needed for ``value_clip_range``.
        valid: ``[R]`` bool or uint8 (nonzero is true), all rows if None.
        log_std: ``[A]``, the same in every state.
        indices: ``[B]`` int64 or int32, in [0, R), unchecked: which rows of the ``[R]`` tensors ``policy_outputs`` and
            ``values`` belong to; without it R is B and they are in order.
        count: scalar, n, over several ranks the global one; the valid rows of this call if None.
        advantage_moments: ``[3]``, count, mean and M2 of the advantages, which are then standardized:
            ``(A - mean) / (sqrt(M2 / count) + 1e-8)``, 0 where they do not vary.
        clip_range, value_clip_range, value_coef, entropy_coef: numbers of at least 0, or float32 scalars on the device,
            whose present value a replayed CUDA graph reads.
        backend: ``triton`` (fused: two launches forward, one backward and a sum; CUDA), ``torch`` (float64 too), or
            ``auto`` (Triton where it runs, else torch).

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: an argument of the wrong shape, device or range, or a backend that is unknown or cannot run here.
    """
    inputs = LossInputs(
        policy_outputs, values, log_std, actions, advantages, value_targets, old_log_probs, old_values, valid, indices,
        count, advantage_moments,
    )  # fmt: skip
    total, report = solve(inputs, Coefficients(clip_range, value_clip_range, value_coef, entropy_coef), backend)
    approx_kl, clip_fraction, _, policy, value, entropy, explained_variance, row_count = report.unbind()
    return PPOLoss(total, policy, value, entropy, approx_kl, clip_fraction, explained_variance, row_count, report)
