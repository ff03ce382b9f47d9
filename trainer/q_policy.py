"""A policy with a Q head: what Retrace learns from."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from trainer.config import ConfigError, PolicyConfig
from trainer.policy import ActorCritic, Outputs


class QOutputs(NamedTuple):
    """What the networks say of observations; ``batch`` is ``[batch]`` or ``[T, batch]``."""

    logits: Tensor  #: ``[*batch, actions]`` float32
    q_values: Tensor  #: ``[*batch, actions]`` float32, in the critic's units
    state: Tensor | None  #: ``[batch, state_size]`` float32, the memory after the last row; None without a core


class QActorCritic(ActorCritic):
    """An `ActorCritic` over ``Discrete`` actions whose critic predicts Q of each; ``V = sum_a pi(a) * Q(a)``.

    Raises:
        ConfigError: the actions are not ``Discrete``.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig,
        autocast_dtype: torch.dtype | None = None,
    ):
        if not isinstance(action_space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"credit.estimator=retrace: it needs Discrete actions, not {type(action_space).__name__}; set "
                f"credit.estimator=vtrace"
            )
        super().__init__(observation_space, action_space, config, autocast_dtype)
        head = nn.Linear(self.value_head.in_features, self.head.outputs)
        nn.init.orthogonal_(head.weight, 1.0 / math.sqrt(self.head.outputs))
        nn.init.zeros_(head.bias)
        self.critic[-1] = head

    def q_outputs(self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None) -> QOutputs:
        """Logits and Q of every action over the same features."""
        features, state = self._features(observations, state, valid)
        with self._autocast(features.device):
            q_values = self.critic(features).float()
        return QOutputs(self._actor(features), q_values, state)

    def outputs(self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None) -> Outputs:
        """As `ActorCritic.outputs`, with V as the expectation of Q."""
        outputs = self.q_outputs(observations, state, valid)
        values = (outputs.logits.softmax(-1) * outputs.q_values).sum(-1)
        return Outputs(outputs.logits, None, values, outputs.state)

    def value(self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """The expectation of Q, ``[batch]`` or ``[T, batch]``."""
        return self.outputs(observations, state, valid).values
