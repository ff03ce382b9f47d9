"""Action distributions: what a policy head's output means. Log-probs and entropies are always ``[batch]``."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(Protocol):
    """What the trainer asks of a distribution over a batch of actions."""

    def sample(self) -> Tensor:
        """One action per row."""
        ...

    def mode(self) -> Tensor:
        """The most likely action of each row."""
        ...

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[batch]`` log-probability (density) of ``actions``."""
        ...

    def entropy(self) -> Tensor:
        """``[batch]`` entropy in nats."""
        ...


class DiagonalGaussian(NamedTuple):
    """Independent normal distributions over the entries of an action.

    ``log p(a) = sum_i -(a_i - mean_i)^2 / (2 std_i^2) - log std_i - log(2 pi) / 2``; ``H = sum_i log std_i + (1 + log
    2 pi) / 2``.
    """

    mean: Tensor  #: ``[batch, actions]`` float32
    log_std: Tensor  #: ``[actions]`` float32, the same in every state

    def sample(self) -> Tensor:
        """``[batch, actions]``: ``mean + std * noise``."""
        return torch.addcmul(self.mean, self.log_std.exp(), torch.randn_like(self.mean))

    def mode(self) -> Tensor:
        """``[batch, actions]``: the mean."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[batch]`` log-density of ``actions`` ``[batch, actions]``."""
        standardized = (actions - self.mean) * (-self.log_std).exp()
        return (-0.5 * standardized.square() - self.log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """``[batch]`` differential entropy, the same in every row."""
        return (self.log_std + 0.5 + _HALF_LOG_2PI).sum().expand(self.mean.shape[0])


class Categorical(NamedTuple):
    """One of ``actions`` choices: ``p = softmax(logits)``."""

    logits: Tensor  #: ``[batch, actions]`` float32, not normalized

    def sample(self) -> Tensor:
        """``[batch]`` int64, by the Gumbel trick: no host synchronization and no ``[batch, actions]`` of
        probabilities."""
        noise = torch.empty_like(self.logits).exponential_().clamp(min=torch.finfo(self.logits.dtype).tiny)
        return (self.logits - noise.log()).argmax(-1)

    def mode(self) -> Tensor:
        """``[batch]`` int64."""
        return self.logits.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """``[batch]`` log-probability of ``actions`` ``[batch]`` int64."""
        return self.logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """``[batch]``: ``-sum_a p log p``; an action of probability 0 contributes 0."""
        log_probs = self.logits.log_softmax(-1)
        # a probability that underflowed to 0 meets a finite number: 0 * -inf would be NaN, here or in the gradient
        return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)
