"""Returns and lengths of the episodes that ended, as the env rewarded them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import episodic_prefix_sum
from kernels.operations import Backend
from trainer import distributed
from trainer.rollout import Rollout


class Ended(NamedTuple):
    """The episodes that ended in one window, on the device."""

    mask: Tensor  #: ``[T, N]`` bool: the last row of an episode
    returns: Tensor  #: ``[T, N]`` float32, the sum of rewards so far in the row's episode
    lengths: Tensor  #: ``[T, N]`` float32, the number of transitions so far


class Statistics(NamedTuple):
    """Episodes of all ranks; the fields are names of metrics."""

    episodes: int  #: that ended since the run began
    episode_return: float | None  #: mean of the last ones, None before the first ended
    episode_length: float | None


class EpisodeTracker:
    """Follows every env's episode over windows by a prefix sum on the device; keeps a bounded window of ended ones."""

    def __init__(self, num_envs: int, window: int, backend: Backend, device: torch.device):
        self._backend: Backend = backend
        self._carry = torch.zeros(2, num_envs, device=device)
        self._previous_done = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[float] = deque(maxlen=window)
        self._ended = 0  #: of all ranks since the run began, when `statistics` was last asked for
        self._recorded = 0  #: of this rank since then

    def follow(self, rollout: Rollout) -> Ended:
        """Go on through a window; reads nothing on the host."""
        ends, columns = (rollout.terminated, rollout.truncated), rollout.columns
        sums = [
            episodic_prefix_sum(
                inputs,
                *ends,
                valid=rollout.valid,
                carry=carry[columns],
                previous_done=self._previous_done[columns],
                backend=self._backend,
            )
            for inputs, carry in zip((rollout.rewards, torch.ones_like(rollout.rewards)), self._carry, strict=True)
        ]
        self._carry[:, columns] = torch.stack([scan.carry for scan in sums])
        done = (rollout.terminated | rollout.truncated) & rollout.valid
        self._previous_done[columns] = done[-1]
        return Ended(done, sums[0].values, sums[1].values)

    def record(self, ended: Ended) -> None:
        """Read the ended episodes of a window, oldest first; waits for the device."""
        sums = torch.stack([ended.returns[ended.mask], ended.lengths[ended.mask]])
        self._recorded += sums.shape[1]
        returns, lengths = sums[:, -(self.returns.maxlen or 0) :].tolist()  # a window of many envs may end thousands
        self.returns.extend(returns)
        self.lengths.extend(lengths)

    def statistics(self) -> Statistics:
        """What all ranks have recorded; each keeps a window of its own, and all must ask together."""
        own = (self._recorded, len(self.returns), sum(self.returns), sum(self.lengths))
        recorded, count, returns, lengths = distributed.sum_numbers(own, self._carry.device)
        self._ended, self._recorded = self._ended + int(recorded), 0
        return Statistics(self._ended, returns / count if count else None, lengths / count if count else None)

    def restart(self) -> None:
        """Forget the episodes that are under way: the envs start anew."""
        self._carry.zero_()
        self._previous_done.zero_()

    def state_dict(self) -> dict[str, object]:
        """Sums under way and the window of ended episodes."""
        return {
            "carry": self._carry.clone(),
            "previous_done": self._previous_done.clone(),
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` gave."""
        self._carry.copy_(state["carry"])
        self._previous_done.copy_(state["previous_done"])
        self.returns = deque(state["returns"], self.returns.maxlen)
        self.lengths = deque(state["lengths"], self.lengths.maxlen)
        self._ended, self._recorded = state["ended"], 0
