"""The policy: torsos, heads, and the distribution over actions that they make."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from trainer.config import ConfigError, PolicyConfig
from trainer.distributions import Categorical, DiagonalGaussian, Distribution

_ACTIVATIONS: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}


class Action(NamedTuple):
    """What the behaviour policy did in a batch of states."""

    actions: Tensor  #: ``[batch, *action_shape]``, raw
    log_probs: Tensor  #: ``[batch]`` float32, of the raw actions
    values: Tensor  #: ``[batch]`` float32, in the critic's units


class Evaluation(NamedTuple):
    """What the present policy says of actions taken before."""

    log_probs: Tensor  #: ``[batch]`` float32
    entropies: Tensor  #: ``[batch]`` float32, nats
    values: Tensor  #: ``[batch]`` float32, in the critic's units


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden_sizes: list[int], outputs: int, activation: str, output_gain: float) -> nn.Sequential:
    """Orthogonally initialized linear layers (gain sqrt 2 inside, ``output_gain`` last) with an activation between
    them."""
    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [_linear(inputs, width, math.sqrt(2.0)), _ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers, _linear(inputs, outputs, output_gain))


class ActorCritic(nn.Module):
    """Separate actor and critic networks over flat observations.

    Continuous actions follow a diagonal Gaussian whose log standard deviation is a parameter of its own, the same in
    every state and kept within ``[min_log_std, max_log_std]``: the deviation cannot be negative, and stays finite.
    ``Discrete`` actions follow a categorical distribution.
    """

    log_std: nn.Parameter | None

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig,
        autocast_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.observation_size = _observation_size(observation_space)
        self._log_std_bounds = (config.min_log_std, config.max_log_std)
        self._autocast_dtype = autocast_dtype
        if isinstance(action_space, gymnasium.spaces.Box):
            self.action_shape: tuple[int, ...] = action_space.shape
            self.action_dtype = torch.float32
            outputs = math.prod(action_space.shape)
            self.log_std = nn.Parameter(torch.full((outputs,), config.init_log_std))
        elif isinstance(action_space, gymnasium.spaces.Discrete):
            self.action_shape, self.action_dtype = (), torch.int64
            outputs = int(action_space.n)
            self.log_std = None
        else:
            raise ConfigError(
                f"env.id: actions of {type(action_space).__name__} are not supported, only Box and Discrete"
            )
        inputs, widths, activation = self.observation_size, config.hidden_sizes, config.activation
        self.actor = mlp(inputs, widths, outputs, activation, output_gain=0.01)
        self.critic = mlp(inputs, widths, 1, activation, output_gain=1.0)

    @property
    def value_head(self) -> nn.Linear:
        """The critic's last layer."""
        head = self.critic[-1]
        if not isinstance(head, nn.Linear):
            raise TypeError("the critic ends in a linear layer")
        return head

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(
            device.type, self._autocast_dtype or torch.bfloat16, enabled=self._autocast_dtype is not None
        )

    def distribution(self, observations: Tensor) -> Distribution:
        """The distribution over actions given ``[batch, *observation_shape]``."""
        with self._autocast(observations.device):
            outputs = self.actor(observations.flatten(1).float()).float()
        if self.log_std is None:
            return Categorical(outputs)
        return DiagonalGaussian(outputs, self.log_std.clamp(*self._log_std_bounds))

    def value(self, observations: Tensor) -> Tensor:
        """``[batch]`` state values in the critic's units."""
        with self._autocast(observations.device):
            return self.critic(observations.flatten(1).float()).float().squeeze(-1)

    @torch.no_grad()
    def clamp_log_std_(self) -> None:
        """Bring the log standard deviation back to its bounds after an optimizer step: beyond them it would have no
        gradient, and stay there."""
        if self.log_std is not None:
            self.log_std.clamp_(*self._log_std_bounds)

    def act(self, observations: Tensor) -> Action:
        """Sample one action per row."""
        distribution = self.distribution(observations)
        flat = distribution.sample()
        actions = flat.view(-1, *self.action_shape)
        return Action(actions, distribution.log_prob(flat), self.value(observations))

    def act_deterministically(self, observations: Tensor) -> Tensor:
        """``[batch, *action_shape]``: the most likely action per row."""
        return self.distribution(observations).mode().view(-1, *self.action_shape)

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        """Log-probs of ``actions``, entropies and values under the present parameters, with gradients."""
        distribution = self.distribution(observations)
        flat = actions.flatten(1) if self.log_std is not None else actions
        return Evaluation(distribution.log_prob(flat), distribution.entropy(), self.value(observations))


def _observation_size(space: gymnasium.Space[Any]) -> int:
    if not isinstance(space, gymnasium.spaces.Box):
        raise ConfigError(f"env.id: observations of {type(space).__name__} are not supported, only Box")
    if len(space.shape) >= 3:
        raise ConfigError(f"env.id: observations of shape {space.shape} are images; the MLP policy takes vectors")
    return math.prod(space.shape)
