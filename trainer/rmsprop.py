"""RMSProp as IMPALA uses it: the constant under the root, and steps that can be withheld on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RMSProp(torch.optim.Optimizer):
    """``square = decay * square + (1 - decay) * g^2``; ``p -= lr * g / sqrt(square + eps)`` (Hinton, lecture 6e).

    Espeholt et al. 2018 (appendix D) train with decay 0.99, eps 0.1 and gradients that are sums over a batch. Here
    ``square`` starts at 0, there is no momentum, and the learning rate may be a tensor.

    A step is withheld, bit for bit, where the attribute ``found_inf`` is a scalar tensor other than 0: the switch that
    torch's fused optimizers have, read on the device.

    Args:
        params: float32 parameters.
        lr: learning rate, a number or a scalar tensor.
        decay: in [0, 1].
        eps: above 0.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[nn.Parameter], lr: float | Tensor, decay: float = 0.99, eps: float = 0.01):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step on the gradients that are there; parameters without one stay."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"], group["decay"], group["eps"])

    def _step(self, parameter: Tensor, gradient: Tensor, lr: float | Tensor, decay: float, eps: float) -> None:
        state = self.state[parameter]
        if not state:
            state["square"] = torch.zeros_like(parameter)
        square = torch.addcmul(decay * state["square"], gradient, gradient, value=1.0 - decay)
        stepped = parameter - lr * gradient * torch.rsqrt(square + eps)
        for old, new in ((state["square"], square), (parameter, stepped)):
            old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, old, new))
