"""Action distributions: what a policy head's output means.

``batch`` stands for any leading dimensions; log-probs and entropies are ``[*batch]``, whatever an action's shape.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from kernels import torch_loss
from trainer.config import ConfigError


class Distribution(Protocol):
    """What the trainer asks of a distribution over a batch of actions."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row; ``generator`` (None: the device's default one) gives the randomness."""
        ...

    def mode(self) -> Tensor:
        """The most likely action of each row."""
        ...

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[*batch]`` log-probability (density) of ``actions``."""
        ...

    def entropy(self) -> Tensor:
        """``[*batch]`` entropy in nats."""
        ...


class DiagonalGaussian(NamedTuple):
    """Independent normal distributions over the entries of an action.

    ``log p(a) = sum_i -(a_i - mean_i)^2 / (2 std_i^2) - log std_i - log(2 pi) / 2``; ``H = sum_i log std_i + (1 + log
    2 pi) / 2``.
    """

    mean: Tensor  #: ``[*batch, actions]`` float32
    log_std: Tensor  #: ``[actions]`` float32, the same in every state

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """``[*batch, actions]``: ``mean + std * noise``."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def mode(self) -> Tensor:
        """``[*batch, actions]``: the mean."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[*batch]`` log-density of ``actions`` ``[*batch, actions]``."""
        return torch_loss.gaussian_log_prob(self.mean, self.log_std, actions)

    def entropy(self) -> Tensor:
        """``[*batch]`` differential entropy, the same in every row."""
        return torch_loss.gaussian_entropy(self.log_std).expand(self.mean.shape[:-1])


class Categorical(NamedTuple):
    """One of ``actions`` choices: ``p = softmax(logits)``."""

    logits: Tensor  #: ``[*batch, actions]`` float32, not normalized

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """``[*batch]`` int64, by the Gumbel trick: no host synchronization and no ``[*batch, actions]`` of
        probabilities."""
        noise = (
            torch.empty_like(self.logits)
            .exponential_(generator=generator)
            .clamp(min=torch.finfo(self.logits.dtype).tiny)
        )
        return (self.logits - noise.log()).argmax(-1)

    def mode(self) -> Tensor:
        """``[*batch]`` int64."""
        return self.logits.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[*batch]`` log-probability of ``actions`` ``[*batch]`` int64."""
        return self.logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """``[*batch]``: ``-sum_a p log p``; an action of probability 0 contributes 0."""
        return torch_loss.categorical_entropy(self.logits)


class MultiCategorical(NamedTuple):
    """Independent choices: component ``i`` is one of ``choices[i]``.

    ``log p(a) = sum_i log softmax(logits_i)[a_i]``; ``H = sum_i H_i``.
    """

    logits: Tensor  #: ``[*batch, sum of choices]`` float32, the components one after another
    choices: tuple[int, ...]

    def _components(self) -> list[Categorical]:
        return [Categorical(logits) for logits in self.logits.split(self.choices, dim=-1)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """``[*batch, components]`` int64."""
        return torch.stack([component.sample(generator) for component in self._components()], dim=-1)

    def mode(self) -> Tensor:
        """``[*batch, components]`` int64."""
        return torch.stack([component.mode() for component in self._components()], dim=-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[*batch]`` log-probability of ``actions`` ``[*batch, components]`` int64."""
        pairs = zip(self._components(), actions.unbind(-1), strict=True)
        return torch.stack([component.log_prob(action) for component, action in pairs]).sum(0)

    def entropy(self) -> Tensor:
        """``[*batch]``: the sum over components."""
        return torch.stack([component.entropy() for component in self._components()]).sum(0)


class ActionHead(NamedTuple):
    """How a policy's output becomes an action of a space."""

    shape: tuple[int, ...]  #: of one action
    dtype: torch.dtype
    choices: tuple[int, ...]  #: of each discrete component; empty for continuous actions
    outputs: int  #: width of the network's output: means, or logits

    def distribution(self, outputs: Tensor, log_std: Tensor | None) -> Distribution:
        """The distribution over *flat* actions (``[*batch]`` if discrete, else ``[*batch, components]``) that the
        network's ``outputs`` ``[*batch, outputs]`` parameterize."""
        if log_std is not None:
            return DiagonalGaussian(outputs, log_std)
        return MultiCategorical(outputs, self.choices) if self.shape else Categorical(outputs)

    def flat(self, actions: Tensor) -> Tensor:
        """``[*batch, *shape]`` as the distribution takes it."""
        batch = actions.shape[: actions.dim() - len(self.shape)]
        return actions if self._is_index else actions.reshape(*batch, -1)

    def shaped(self, flat: Tensor) -> Tensor:
        """The distribution's actions as ``[*batch, *shape]``."""
        batch = flat.shape if self._is_index else flat.shape[:-1]
        return flat.view(*batch, *self.shape)

    @property
    def _is_index(self) -> bool:
        """``Discrete``: the flat action has no axis of components."""
        return bool(self.choices) and not self.shape


def action_head(space: spaces.Space[Any]) -> ActionHead:
    """The head for ``Box``, ``Discrete`` and ``MultiDiscrete`` actions.

    Raises:
        ConfigError: another space.
    """
    if isinstance(space, spaces.Box):
        return ActionHead(space.shape, torch.float32, (), math.prod(space.shape))
    if isinstance(space, spaces.Discrete):
        return ActionHead((), torch.int64, (int(space.n),), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        choices = tuple(map(int, space.nvec.flatten()))
        return ActionHead(space.nvec.shape, torch.int64, choices, sum(choices))
    raise ConfigError(
        f"env.id: actions of {type(space).__name__} are not supported, only Box, Discrete and MultiDiscrete"
    )
