"""Adam over all of a module's parameters as one flat vector, and steps that the device may withhold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kernels.adam import Moments, adam_step, sum_squares
from kernels.step_guard import GuardSettings, guard_step
from trainer import distributed


class GuardedAdam:
    """Clips and applies gradients, unless `kernels.step_guard` withholds the step.

    The parameters become views of one vector, so that a step is a few launches however many there are.

    Args:
        parameters: float32, on one device; they keep their values and layouts.
        learning_rate: scalar tensor, which the guard may adapt.
        eps: of Adam.
        settings: of the guard.
        fused: by Triton kernels.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: Tensor,
        eps: float,
        settings: GuardSettings,
        fused: bool,
    ):
        # those that would leave what follows them unaligned come last: libraries multiply aligned memory faster
        self._given = list(parameters)
        self._parameters = sorted(self._given, key=lambda p: p.numel() % 4 > 0)
        self.learning_rate, self.eps, self._settings, self._fused = learning_rate, eps, settings, fused
        self._vector = _flat([(p.detach(), p) for p in self._parameters])
        for p, part in zip(self._given, self._parts(self._vector), strict=True):
            p.data = part.as_strided(p.shape, p.stride())
        self.moments = Moments(
            torch.zeros_like(self._vector), torch.zeros_like(self._vector), torch.zeros_like(learning_rate)
        )

    def gradient(self, loss: Tensor, report: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of a scalar in all parameters, ``[P]``, and what is reported beside it, ``[R]``, both summed
        over ranks, in one message."""
        gradients = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        both = distributed.sum_(_flat([*zip(gradients, self._parameters, strict=True), (report, report)]))
        gradient, report = both.split([len(self._vector), len(report)])
        return gradient, report

    def step(self, gradient: Tensor, report: Tensor, num_valid: Tensor, totals: Tensor) -> None:
        """Decide over a step and take it; arguments as `kernels.step_guard.guard_step`, ``totals`` its state."""
        squares = sum_squares(gradient, self._fused)
        decision = guard_step(
            report, squares, num_valid, totals, self.moments.steps, self.learning_rate, self._settings, self._fused
        )
        adam_step(self._vector, gradient, self.moments, decision, self.eps, self._fused)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, parameter by parameter in the order in which they were given, and the number of steps taken."""
        moments = self.moments._asdict()
        return {name: x.clone() if name == "steps" else torch.cat(self._parts(x)) for name, x in moments.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave, for parameters of the same shapes."""
        for name in ("first", "second"):
            saved = state[name].split([p.numel() for p in self._given])
            for part, of_parameter in zip(self._parts(getattr(self.moments, name)), saved, strict=True):
                part.copy_(of_parameter)
        self.moments.steps.copy_(state["steps"])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Each parameter's part of a vector, in the order in which they were given."""
        parts = vector.split([p.numel() for p in self._parameters])
        of_parameter = {id(p): part for p, part in zip(self._parameters, parts, strict=True)}
        return [of_parameter[id(p)] for p in self._given]


def _flat(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """First tensors in one vector, each as the second lies in memory: a layout need not be that of its axes."""
    parts = []
    for x, like in pairs:
        outer_first = sorted(range(like.dim()), key=like.stride, reverse=True)
        parts.append(x.permute(outer_first).flatten())
    return torch.cat(parts)
