"""Off-policy credit under the present policy: V-trace from state values, Retrace from a Q head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import kernels
from kernels.operations import Backend
from trainer.config import CreditConfig
from trainer.policy import ActorCritic
from trainer.q_policy import QActorCritic

Denormalize = Callable[[Tensor], Tensor]  #: from the critic's units to those of the reward


class Window(NamedTuple):
    """``T`` rows of ``n`` envs, as the learner reads them; single rows are windows of ``T = 1``."""

    observations: Tensor  #: ``[T, n, *observation_shape]``, normalized; one row more where credit is assigned
    actions: Tensor  #: ``[T, n, *action_shape]``
    log_probs: Tensor  #: ``[T, n]``, of the actions under the behaviour policy
    rewards: Tensor  #: ``[T, n]``
    terminated: Tensor  #: ``[T, n]`` bool
    truncated: Tensor  #: ``[T, n]`` bool
    valid: Tensor  #: ``[T, n]`` bool
    core_state: Tensor  #: ``[1, n, state_size]``, the memory that enters row 0

    def narrow(self, columns: Tensor | slice) -> Window:
        """Some envs."""
        return Window(*(tensor[:, columns] for tensor in self))

    def rows(self) -> Window:
        """``T * n`` windows of one row each; for policies without a memory."""
        length, envs = self.valid.shape
        tensors = (self.observations[:length], *self[1:-1], self.core_state.expand(length, envs, 0))
        return Window(*(x.reshape(1, length * envs, *x.shape[2:]) for x in tensors))


class Present(NamedTuple):
    """What the present policy says of a window, with gradients but for the log-probs."""

    policy_outputs: Tensor  #: ``[T, n, outputs]``, means or logits
    log_std: Tensor | None  #: ``[outputs]``, for continuous actions
    log_probs: Tensor  #: ``[T, n]``, of the actions; a constant
    predictions: Tensor  #: ``[T, n]``, of the targets by the critic, in its units


class OffPolicyCredit(NamedTuple):
    """Constants that the losses take; credit is 0 in filler rows."""

    log_probs: Tensor  #: ``[T, n]``, of the actions under the policy that credit was assigned by
    predictions: Tensor  #: ``[T, n]``, of the targets by its critic, in units of reward
    advantages: Tensor  #: ``[T, n]``, times ``weights``, in units of reward
    weights: Tensor  #: ``[T, n]``, the clipped importance ratio ``min(pg_rho_bar, rho)``
    targets: Tensor  #: ``[T, n]``, what the critic shall predict, in units of reward


class OffPolicyEstimator(Protocol):
    """Assigns credit under the present policy, and evaluates it for the losses."""

    def evaluate(self, window: Window) -> tuple[Tensor, ...]:
        """What credit is assigned from, without gradients: tensors ``[T or T + 1, n, ...]``."""
        ...

    def assign(self, window: Window, *evaluation: Tensor) -> OffPolicyCredit:
        """The credit of a window that was evaluated, maybe some envs at a time."""
        ...

    def present(self, window: Window) -> Present:
        """What losses are made of."""
        ...


class _Options(NamedTuple):
    """What the two estimators share."""

    denormalize: Denormalize
    config: CreditConfig
    backend: Backend
    correction: bool  #: False takes all importance ratios for 1

    def behaviour(self, window: Window, target_log_probs: Tensor) -> Tensor:
        return window.log_probs if self.correction else target_log_probs

    def weights(self, window: Window, target_log_probs: Tensor) -> Tensor:
        ratios = (target_log_probs - self.behaviour(window, target_log_probs)).exp()
        return torch.where(window.valid, ratios.clamp(max=self.config.pg_rho_bar), 0.0)

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

    @torch.no_grad()
    def evaluate(self, window: Window) -> tuple[Tensor, Tensor]:
        """Log-probs of the actions ``[T, n]``, and values ``[T + 1, n]`` in the critic's units."""
        outputs = self._policy.outputs(window.observations, window.core_state[0], window.valid)
        return self._log_probs(window, outputs.policy_outputs[:-1], outputs.log_std), outputs.values

    def assign(self, window: Window, *evaluation: Tensor) -> OffPolicyCredit:
        """By `kernels.vtrace`."""
        options, config, (log_probs, values) = self._options, self._options.config, evaluation
        values = options.denormalize(values)
        trace = kernels.vtrace(
            options.behaviour(window, log_probs), log_probs, window.rewards, values[:-1], values[-1],
            vtrace_lambda=config.vtrace_lambda, rho_bar=config.rho_bar, pg_rho_bar=config.pg_rho_bar,
            **options.common(window),
        )  # fmt: skip
        weights = options.weights(window, log_probs)
        return OffPolicyCredit(log_probs, values[:-1], trace.pg_advantages, weights, trace.value_targets)

    def present(self, window: Window) -> Present:
        """Actor and critic."""
        outputs = self._policy.outputs(window.observations, window.core_state[0], window.valid)
        with torch.no_grad():
            log_probs = self._log_probs(window, outputs.policy_outputs, outputs.log_std)
        return Present(outputs.policy_outputs, outputs.log_std, log_probs, outputs.values)

    def _log_probs(self, window: Window, policy_outputs: Tensor, log_std: Tensor | None) -> Tensor:
        head = self._policy.head
        return head.distribution(policy_outputs, log_std).log_prob(head.flat(window.actions))


class RetraceEstimator:
    """Retrace targets for Q (Munos et al. 2016, equation 4), and from them the policy's advantages.

    ``advantage = min(pg_rho_bar, rho) * (Qret - sum_a pi(a) * Q(a))``: the truncated term of ACER's policy gradient
    (Wang et al. 2017, arXiv 1611.01224, equation 9).
    """

    def __init__(self, policy: QActorCritic, options: _Options):
        self._policy, self._options = policy, options

    @torch.no_grad()
    def evaluate(self, window: Window) -> tuple[Tensor, Tensor]:
        """Log-probs and Q of every action, ``[T + 1, n, actions]``, the latter in the critic's units."""
        outputs = self._policy.q_outputs(window.observations, window.core_state[0], window.valid)
        return outputs.logits.log_softmax(-1), outputs.q_values

    def assign(self, window: Window, *evaluation: Tensor) -> OffPolicyCredit:
        """By `kernels.retrace_categorical`."""
        options, config, (log_probs, q_values) = self._options, self._options.config, evaluation
        q_values = options.denormalize(q_values)
        expected = (log_probs.exp() * q_values).sum(-1)
        target = _of_action(log_probs[:-1], window.actions)
        behaviour = options.behaviour(window, target)
        q_targets = kernels.retrace_categorical(
            window.rewards, q_values[:-1], log_probs[:-1], behaviour, window.actions, expected[-1],
            retrace_lambda=config.retrace_lambda, **options.common(window),
        )  # fmt: skip
        weights = options.weights(window, target)
        advantages = torch.where(window.valid, weights * (q_targets - expected[:-1]), 0.0)
        return OffPolicyCredit(target, _of_action(q_values[:-1], window.actions), advantages, weights, q_targets)

    def present(self, window: Window) -> Present:
        """Actor, and Q of the actions that were taken."""
        outputs = self._policy.q_outputs(window.observations, window.core_state[0], window.valid)
        log_probs = _of_action(outputs.logits.detach().log_softmax(-1), window.actions)
        return Present(outputs.logits, None, log_probs, _of_action(outputs.q_values, window.actions))


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
