"""The policy: a torso, an optional recurrent core, actor and critic heads, and what they say of a batch of states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import ConfigError, PolicyConfig
from trainer.distributions import Distribution, action_head
from trainer.networks import PIXEL_TORSOS, Torso, VectorTorso, mlp
from trainer.recurrent import CORES

#: Channels of one picture: red, green, blue and alpha.
_MOST_COLOURS = 4


class Action(NamedTuple):
    """What the behaviour policy did in a batch of states."""

    actions: Tensor  #: ``[batch, *action_shape]``, raw
    log_probs: Tensor  #: ``[batch]`` float32, of the raw actions
    values: Tensor  #: ``[batch]`` float32, in the critic's units
    state: Tensor | None  #: ``[batch, state_size]`` float32, the memory that enters the next row, as in `Outputs`


class Outputs(NamedTuple):
    """What the networks say of observations; ``batch`` is ``[batch]`` or ``[T, batch]``."""

    policy_outputs: Tensor  #: ``[*batch, outputs]`` float32: means of continuous actions, or logits
    log_std: Tensor | None  #: ``[outputs]`` float32 within its bounds, for continuous actions
    values: Tensor  #: ``[*batch]`` float32, in the critic's units
    state: Tensor | None  #: ``[batch, state_size]`` float32, the memory after the last row; without a core, as given


class ActorCritic(nn.Module):
    """``torso -> core -> actor and critic``.

    Over vectors the torso learns nothing, and actor and critic are separate MLPs; over frames they share a
    convolutional torso. A recurrent core, if there is one, stands between and is shared, too.

    Continuous actions follow a diagonal Gaussian whose log standard deviation is a parameter of its own, the same in
    every state and kept within ``[min_log_std, max_log_std]``: the deviation cannot be negative, and stays finite.
    ``Discrete`` and ``MultiDiscrete`` actions follow (independent) categorical distributions.

    Observations are ``[batch, *observation_shape]``, or ``[T, batch, *observation_shape]`` for a whole window. With a
    core ``state`` is ``[batch, state_size]``, the memory that enters the (first) row, and ``valid`` (``[batch]`` or
    ``[T, batch]`` bool) is False in filler rows, after which the memory is empty; both are ignored without a core.
    """

    log_std: nn.Parameter | None
    generator: torch.Generator | None = None  #: of sampled actions; None: the device's default one

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig,
        autocast_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self._log_std_bounds = (config.min_log_std, config.max_log_std)
        self._autocast_dtype = autocast_dtype
        self.head = action_head(action_space)
        self.action_shape, self.action_dtype = self.head.shape, self.head.dtype
        initial = torch.full((self.head.outputs,), config.init_log_std)
        self.log_std = None if self.head.choices else nn.Parameter(initial)
        self.torso = _torso(observation_space, config.torso)
        self._observation_rank = len(observation_space.shape or ())
        features = self.torso.features
        self.core = CORES[config.core](features, config.core_size) if config.core != "none" else None
        inputs, widths = self.core.size if self.core else features, config.hidden_sizes
        self.activation = config.activation  #: of both networks' hidden layers
        self.actor = mlp(inputs, widths, self.head.outputs, self.activation, output_gain=0.01)
        self.critic = mlp(inputs, widths, 1, self.activation, output_gain=1.0)

    @property
    def value_head(self) -> nn.Linear:
        """The critic's last layer."""
        head = self.critic[-1]
        if not isinstance(head, nn.Linear):
            raise TypeError("the critic ends in a linear layer")
        return head

    @property
    def state_size(self) -> int:
        """Numbers of memory per env, 0 without a core."""
        return self.core.state_size if self.core else 0

    def initial_state(self, num_envs: int) -> Tensor:
        """``[num_envs, state_size]``: the empty memory with which an episode's first row is seen."""
        return self.value_head.weight.new_zeros(num_envs, self.state_size)

    def outputs(self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None) -> Outputs:
        """Actor and critic over the same features, computed once; through a core's memory gradients reach back
        to the first row."""
        features, state = self._features(observations, state, valid)
        return Outputs(self._actor(features), self._bounded_log_std(), self._critic(features), state)

    def distribution(
        self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None
    ) -> Distribution:
        """The distribution over (flat) actions."""
        features, _ = self._features(observations, state, valid)
        return self.head.distribution(self._actor(features), self._bounded_log_std())

    def value(self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """State values in the critic's units, ``[batch]`` or ``[T, batch]``."""
        features, _ = self._features(observations, state, valid)
        return self._critic(features)

    def act(
        self,
        observations: Tensor,
        state: Tensor | None = None,
        valid: Tensor | None = None,
        deterministic: bool = False,
    ) -> Action:
        """One action per row of ``[batch, *observation_shape]``: sampled, or the most likely one."""
        outputs = self.outputs(observations, state, valid)
        distribution = self.head.distribution(outputs.policy_outputs, outputs.log_std)
        flat = distribution.mode() if deterministic else distribution.sample(self.generator)
        return Action(self.head.shaped(flat), distribution.log_prob(flat), outputs.values, outputs.state)

    @torch.no_grad()
    def clamp_log_std_(self) -> None:
        """Bring the log standard deviation back to its bounds after an optimizer step: beyond them it would have no
        gradient, and stay there."""
        if self.log_std is not None:
            self.log_std.clamp_(*self._log_std_bounds)

    def _features(
        self, observations: Tensor, state: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the heads see, ``[*batch, features]`` float32, and the memory after the last row."""
        batch = observations.shape[: observations.dim() - self._observation_rank]
        with self._autocast(observations.device):
            features = self.torso(observations.flatten(0, len(batch) - 1)).float().view(*batch, self.torso.features)
        if self.core is None:
            return features, state
        if state is None:
            raise ValueError("a policy with a core needs the state that enters the first row: initial_state(num_envs)")
        if len(batch) > 1:
            return self.core(features, state, valid)
        outputs, state = self.core(features[None], state, None if valid is None else valid[None])
        return outputs[0], state

    def _actor(self, features: Tensor) -> Tensor:
        with self._autocast(features.device):
            return self.actor(features).float()

    def _critic(self, features: Tensor) -> Tensor:
        with self._autocast(features.device):
            return self.critic(features).float().squeeze(-1)

    def _bounded_log_std(self) -> Tensor | None:
        return None if self.log_std is None else self.log_std.clamp(*self._log_std_bounds)

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self._autocast_dtype) if self._autocast_dtype else nullcontext()


def _torso(space: gymnasium.Space[Any], kind: str) -> Torso:
    """The torso for an observation space.

    Raises:
        ConfigError: they do not fit together.
    """
    if not isinstance(space, gymnasium.spaces.Box):
        raise ConfigError(f"env.id: observations of {type(space).__name__} are not supported, only Box")
    shape, dtype = space.shape, space.dtype
    is_image, are_frames = len(shape) >= 3, len(shape) == 3 and dtype == np.uint8
    if kind == "mlp" and not is_image:
        return VectorTorso(shape)
    if is_image and not are_frames:
        raise ConfigError(
            f"policy.torso={kind}: observations of shape {shape} are images of {dtype}; networks take uint8 frames "
            f"[channels, height, width], so wrap the env"
        )
    if kind == "mlp":
        raise ConfigError(
            f"policy.torso=mlp: observations of shape {shape} are images; set policy=nature_cnn or policy=impala_resnet"
        )
    if not are_frames:
        raise ConfigError(
            f"policy.torso={kind}: it takes uint8 frames [channels, height, width], not {dtype} observations of shape "
            f"{shape}; set policy.torso=mlp"
        )
    if shape[2] <= _MOST_COLOURS < shape[0]:
        raise ConfigError(
            f"policy.torso={kind}: frames are [channels, height, width], and those of shape {shape} look like [height, "
            f"width, channels]; move their channels first in a wrapper of the env"
        )
    try:
        return PIXEL_TORSOS[kind](shape)
    except ValueError as error:
        raise ConfigError(f"policy.torso={kind}: {error}") from error
