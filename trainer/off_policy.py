"""Off-policy credit under the present policy: V-trace from state values, Retrace from a Q head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import kernels
from kernels.operations import Backend
from trainer.config import CreditConfig
from trainer.normalize import moments
from trainer.policy import ActorCritic
from trainer.q_policy import QActorCritic

Denormalize = Callable[[Tensor], Tensor]  #: from the critic's units to those of the reward


class Window(NamedTuple):
    """Whole windows of ``n`` envs, as the learner reads them."""

    observations: Tensor  #: ``[T + 1, n, *observation_shape]``, normalized
    actions: Tensor  #: ``[T, n, *action_shape]``
    log_probs: Tensor  #: ``[T, n]``, of the actions under the behaviour policy
    rewards: Tensor  #: ``[T, n]``
    terminated: Tensor  #: ``[T, n]`` bool
    truncated: Tensor  #: ``[T, n]`` bool
    valid: Tensor  #: ``[T, n]`` bool
    core_state: Tensor  #: ``[n, state_size]``, the memory that enters row 0


class Present(NamedTuple):
    """What the present policy says of a window, with gradients but for the log-probs."""

    policy_outputs: Tensor  #: ``[T, n, outputs]``, means or logits
    log_std: Tensor | None  #: ``[outputs]``, for continuous actions
    log_probs: Tensor  #: ``[T, n]``, of the actions; a constant
    predictions: Tensor  #: ``[T, n]``, of the targets by the critic, in its units


class OffPolicyCredit(NamedTuple):
    """Constants that the losses take, 0 in filler rows."""

    advantages: Tensor  #: ``[T, n]``, times the clipped importance ratio, in units of reward
    targets: Tensor  #: ``[T, n]``, what the critic shall predict, in units of reward
    advantage_moments: Tensor  #: ``[3]``: count, mean and M2 of the valid advantages on this rank


class OffPolicyEstimator(Protocol):
    """Evaluates a window under the present policy, and assigns credit from what it found."""

    def __call__(self, window: Window) -> tuple[Present, Callable[[], OffPolicyCredit]]:
        """The evaluation, and the credit to be computed when it is asked for."""
        ...


class _Options(NamedTuple):
    """What the two estimators share."""

    denormalize: Denormalize
    config: CreditConfig
    backend: Backend
    correction: bool  #: False takes all importance ratios for 1

    def behaviour(self, window: Window, target_log_probs: Tensor) -> Tensor:
        return window.log_probs if self.correction else target_log_probs

    def common(self, window: Window) -> dict[str, Any]:
        return {
            "terminated": window.terminated, "truncated": window.truncated, "valid": window.valid,
            "gamma": self.config.gamma, "c_bar": self.config.c_bar, "backend": self.backend,
            "torch_mode": self.config.torch_mode,
        }  # fmt: skip


class VTraceEstimator:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, equation 1 and section 4.2)."""

    def __init__(self, policy: ActorCritic, options: _Options):
        self._policy, self._options = policy, options

    def __call__(self, window: Window) -> tuple[Present, Callable[[], OffPolicyCredit]]:
        """Evaluate; the credit is that of `kernels.vtrace`."""
        head = self._policy.head
        outputs = self._policy.outputs(window.observations, window.core_state, window.valid)
        policy_outputs, log_std = outputs.policy_outputs[:-1], outputs.log_std
        with torch.no_grad():
            log_probs = head.distribution(policy_outputs, log_std).log_prob(head.flat(window.actions))
        present = Present(policy_outputs, log_std, log_probs, outputs.values[:-1])
        return present, lambda: self._credit(window, log_probs, outputs.values.detach())

    def _credit(self, window: Window, log_probs: Tensor, values: Tensor) -> OffPolicyCredit:
        options, config = self._options, self._options.config
        values = options.denormalize(values)
        trace = kernels.vtrace(
            options.behaviour(window, log_probs), log_probs, window.rewards, values[:-1], values[-1],
            vtrace_lambda=config.vtrace_lambda, rho_bar=config.rho_bar, pg_rho_bar=config.pg_rho_bar, moments=True,
            **options.common(window),
        )  # fmt: skip
        return OffPolicyCredit(trace.pg_advantages, trace.value_targets, trace.moments)


class RetraceEstimator:
    """Retrace targets for Q (Munos et al. 2016, equation 4), and from them the policy's advantages.

    ``advantage = min(pg_rho_bar, rho) * (Qret - sum_a pi(a) * Q(a))``: the truncated term of ACER's policy gradient
    (Wang et al. 2017, arXiv 1611.01224, equation 9).
    """

    def __init__(self, policy: QActorCritic, options: _Options):
        self._policy, self._options = policy, options

    def __call__(self, window: Window) -> tuple[Present, Callable[[], OffPolicyCredit]]:
        """Evaluate; the credit is that of `kernels.retrace_categorical`."""
        outputs = self._policy.q_outputs(window.observations, window.core_state, window.valid)
        log_probs = outputs.logits.detach().log_softmax(-1)
        taken = _of_action(log_probs[:-1], window.actions)
        present = Present(outputs.logits[:-1], None, taken, _of_action(outputs.q_values[:-1], window.actions))
        return present, lambda: self._credit(window, log_probs, taken, outputs.q_values.detach())

    def _credit(self, window: Window, log_probs: Tensor, target: Tensor, q_values: Tensor) -> OffPolicyCredit:
        options, config = self._options, self._options.config
        q_values = options.denormalize(q_values)
        expected = (log_probs.exp() * q_values).sum(-1)
        behaviour = options.behaviour(window, target)
        q_targets = kernels.retrace_categorical(
            window.rewards, q_values[:-1], log_probs[:-1], behaviour, window.actions, expected[-1],
            retrace_lambda=config.retrace_lambda, **options.common(window),
        )  # fmt: skip
        ratios = (target - behaviour).exp().clamp(max=config.pg_rho_bar)
        advantages = torch.where(window.valid, ratios * (q_targets - expected[:-1]), 0.0)
        return OffPolicyCredit(advantages, q_targets, moments(advantages.flatten(), window.valid.flatten()))


def _of_action(values: Tensor, actions: Tensor) -> Tensor:
    """``[T, n, actions]`` at ``[T, n]``."""
    return values.gather(-1, actions[..., None]).squeeze(-1)


def make_estimator(
    policy: ActorCritic, denormalize: Denormalize, config: CreditConfig, backend: Backend, correction: bool
) -> OffPolicyEstimator:
    """The estimator that ``credit.estimator`` names.

    Args:
        policy: the learner's; with a Q head for ``retrace``.
        denormalize: from the critic's units to those of the reward.
        config: which estimator, with its coefficients.
        backend: ``triton`` or ``torch``.
        correction: False takes all importance ratios for 1, to see what the correction is worth.
    """
    options = _Options(denormalize, config, backend, correction)
    if isinstance(policy, QActorCritic):
        return RetraceEstimator(policy, options)
    return VTraceEstimator(policy, options)
