"""IMPALA's update by Retrace: gradients from the paper's formula, the value of a Q policy, what is refused."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from fake_env import random_script
from impala_cases import BOX, DISCRETE, KeptGradients, LearnerCase, gradient_of, independent_policy
from torch import Tensor

from kernels import reference
from trainer.config import ConfigError, CreditConfig, PolicyConfig
from trainer.q_policy import QActorCritic


def retrace_gradient(case: LearnerCase) -> dict[str, Tensor]:
    """Of Retrace's losses, from the float64 sums of the paper."""
    rollout, config = case.rollout, case.learner.config
    policy = independent_policy(case)
    log_probs = policy.log_prob(rollout.actions)
    logits = case.policy.actor(rollout.observations.flatten(2))
    q_values = case.policy.critic(rollout.observations.flatten(2))
    expected = (logits.softmax(-1) * q_values).sum(-1).detach()
    taken = q_values[:-1].gather(-1, rollout.actions[..., None]).squeeze(-1)
    targets = reference.retrace(
        rollout.rewards, taken, expected[:-1], log_probs - rollout.log_probs, expected[-1], rollout.terminated,
        rollout.truncated, valid=rollout.valid, gamma=0.9, retrace_lambda=0.95,
    ).float()  # fmt: skip
    weights = (log_probs.detach() - rollout.log_probs).exp().clamp(max=1.0)
    losses = (
        -weights * (targets - expected[:-1]) * log_probs
        + config.value_coef * 0.5 * (targets - taken).square()
        - config.entropy_coef * policy.entropy()
    )
    return gradient_of(case, losses[rollout.valid].mean())


def test_retrace_learns_q_of_the_action_and_improves_on_its_expectation():
    credit = CreditConfig(estimator="retrace", gamma=0.9, retrace_lambda=0.95)
    case = LearnerCase(random_script(9, 5, seed=4), credit=credit)
    expected = retrace_gradient(case)
    kept = case.learner.optimizer = KeptGradients(case.policy, lr=0.0)
    case.update()
    for name, gradient in kept.kept[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_value_of_a_q_policy_is_the_expectation_of_q():
    torch.manual_seed(0)
    policy = QActorCritic(gymnasium.spaces.Box(-1, 1, (3,)), DISCRETE, PolicyConfig(hidden_sizes=[8]))
    observations = torch.randn(7, 4, 3)
    outputs = policy.q_outputs(observations)
    assert outputs.q_values.shape == (7, 4, 3)
    probabilities = torch.distributions.Categorical(logits=outputs.logits).probs
    torch.testing.assert_close(policy.value(observations), (probabilities * outputs.q_values).sum(-1))
    action = policy.act(observations[0])
    torch.testing.assert_close(action.values, policy.value(observations[0]))


def test_retrace_with_continuous_actions_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"credit.estimator=retrace: it needs Discrete actions, not Box; set"):
        QActorCritic(gymnasium.spaces.Box(-1, 1, (3,)), BOX, PolicyConfig())
