"""Recurrent cores: memory between a policy's torso and its heads, forgotten where an episode ended."""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn


class Core(nn.Module, abc.ABC):
    """A cell that is stepped through time; its state is one tensor ``[envs, state_size]``, output first.

    An episode's memory must reach V(final observation), which is the value of the filler row after its end, and must
    not reach the next episode's first observation, one row later. So the state is zeroed *after* every filler row:

        ``state' = cell(features[t], state)``; ``outputs[t] = state'[:size]``; ``state = state' if valid[t] else 0``
    """

    state_size: int  #: numbers per env

    def __init__(self, cell: nn.RNNCellBase):
        super().__init__()
        self.cell = cell
        self.size = cell.hidden_size
        for name, parameter in cell.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    @abc.abstractmethod
    def step(self, features: Tensor, state: Tensor) -> Tensor:
        """The state after ``features`` ``[envs, inputs]``."""

    def forward(self, features: Tensor, state: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Step through a window.

        Args:
            features: ``[T, envs, inputs]``.
            state: ``[envs, state_size]``, what enters row 0.
            valid: ``[T, envs]`` bool, False in filler rows; None if there are none. The last row may be absent, where
                no row follows it.

        Returns:
            ``[T, envs, size]`` outputs and the ``[envs, state_size]`` state that enters row T.
        """
        outputs = []
        # in float32 whatever autocast says: rounding errors of a state add up over an episode
        with torch.autocast(features.device.type, enabled=False):
            for t, row in enumerate(features.unbind()):
                state = self.step(row, state)
                outputs.append(state[:, : self.size])
                if valid is not None and t < len(valid):
                    state = torch.where(valid[t, :, None], state, 0.0)
        return torch.stack(outputs), state


class LSTMCore(Core):
    """Long short-term memory (Hochreiter and Schmidhuber 1997); the state is output and cell."""

    def __init__(self, inputs: int, size: int):
        super().__init__(nn.LSTMCell(inputs, size))
        self.state_size = 2 * size

    def step(self, features: Tensor, state: Tensor) -> Tensor:
        """``[envs, 2 * size]``."""
        return torch.cat(self.cell(features, state.chunk(2, dim=-1)), dim=-1)


class GRUCore(Core):
    """Gated recurrent unit (Cho et al. 2014, arXiv 1406.1078); the state is the output."""

    def __init__(self, inputs: int, size: int):
        super().__init__(nn.GRUCell(inputs, size))
        self.state_size = size

    def step(self, features: Tensor, state: Tensor) -> Tensor:
        """``[envs, size]``."""
        return self.cell(features, state)


CORES: dict[str, type[LSTMCore] | type[GRUCore]] = {"lstm": LSTMCore, "gru": GRUCore}
