"""Learning-rate schedules, as pure functions of progress or KL."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(initial: float, progress: float) -> float:
    """``initial * (1 - progress)``, with progress in [0, 1] = env steps done over ``total_steps``.

    It depends on nothing but the counter, so a resumed run continues where it was, and one that is resumed with a
    larger ``total_steps`` takes the value that the longer run would have had at that step. It never leaves ``[0,
    initial]``.
    """
    return initial * (1.0 - min(max(progress, 0.0), 1.0))


def adapt_to_kl_(learning_rate: Tensor, approx_kl: Tensor, desired_kl: float, minimum: float, maximum: float) -> None:
    """Move a learning rate towards a desired KL, in place and without reading it on the host.

    ``lr / 1.5`` where ``approx_kl > 2 * desired_kl``, ``lr * 1.5`` where ``approx_kl < desired_kl / 2``, kept within
    ``[minimum, maximum]``; a KL that is not finite changes nothing.

    Args:
        learning_rate: scalar tensor, changed in place.
        approx_kl: scalar tensor, the KL between the behaviour policy and the present one.
        desired_kl: the KL aimed at.
        minimum: the lowest learning rate.
        maximum: the highest learning rate.
    """
    lower = (learning_rate / 1.5).clamp(min=minimum)
    higher = (learning_rate * 1.5).clamp(max=maximum)
    adapted = torch.where(approx_kl > 2.0 * desired_kl, lower, learning_rate)
    adapted = torch.where(approx_kl < 0.5 * desired_kl, higher, adapted)
    learning_rate.copy_(torch.where(torch.isfinite(approx_kl), adapted, learning_rate))
