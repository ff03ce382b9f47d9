"""Several envs side by side as one: each member is a pool, and may be stepped by a thread of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from envs.base import EnvError, StepResult, VecEnv


class EnvGroup(VecEnv):
    """Members of one kind whose columns are joined; a member's own pools are stepped as one.

    Members share nothing, so that each may also be used alone, from its own thread and on its own CUDA stream. Their
    states are not joined: each member is asked for its own.

    Args:
        members: at least one, of the same id, engine, device and spaces.

    Raises:
        EnvError: no member.
    """

    def __init__(self, members: Sequence[VecEnv]) -> None:
        if not members:
            raise EnvError("an env group needs at least one member")
        first = members[0]
        self.members = tuple(members)
        self.id, self.engine, self.device = first.id, first.engine, first.device
        self.single_observation_space, self.single_action_space = (
            first.single_observation_space,
            first.single_action_space,
        )
        bounds = itertools.accumulate((member.num_envs for member in members), initial=0)
        self.pools = tuple(slice(*ends) for ends in itertools.pairwise(bounds))
        self.num_envs = self.pools[-1].stop
        self._steps: list[StepResult | None] = [None] * len(members)

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """None of its own: its members know theirs."""
        return ()

    def reset(self) -> Tensor:
        """Start every env anew and return the first observations ``[num_envs, *observation_shape]``."""
        return torch.cat([member.reset() for member in self.members])

    def send(self, pool: int, actions: Tensor) -> None:
        """Start one step of a member."""
        member = self.members[pool]
        for inner, columns in enumerate(member.pools):
            member.send(inner, actions[columns])

    def recv(self, pool: int) -> StepResult:
        """Wait for the member's step and return its result."""
        member = self.members[pool]
        results = [member.recv(inner) for inner in range(len(member.pools))]
        return results[0] if len(results) == 1 else StepResult(*map(torch.cat, zip(*results, strict=True)))

    def reseed(self, epoch: int) -> None:
        """Derive every member's random streams anew."""
        for member in self.members:
            member.reseed(epoch)

    def counters(self) -> dict[str, int]:
        """Faults survived since the last call, summed over the members."""
        counts = [member.counters() for member in self.members]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def close(self) -> None:
        """Close every member."""
        for member in self.members:
            member.close()
