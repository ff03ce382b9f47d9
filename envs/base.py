"""The transition contract: what every engine gives to the trainer, stated once.

Row ``t`` of env ``n`` is one transition: ``observations[t]`` was seen, ``actions[t]`` was sent, and ``rewards[t]``,
``terminated[t]``, ``truncated[t]`` came back. Every engine resets *on the next step* (Gymnasium's
``AutoresetMode.NEXT_STEP``):

- the step that ends an episode returns the true final observation;
- the step after it ignores its action and returns the first observation of the next episode with reward 0 and both
  flags false. That row is no transition. It is *filler*: ``valid`` is False, and no loss, moment, normalizer, step
  count or episode statistic may read it.

So the final observation is the policy's input one row later, and V(final observation) is simply ``values[t + 1]``.

| what       | ``terminated`` | ``truncated`` | ``valid`` | bootstrap                   | trace |
|------------|----------------|---------------|-----------|-----------------------------|-------|
| inside     | False          | False         | True      | V(next observation)         | goes on |
| terminated | True           | any           | True      | none                        | cut   |
| truncated  | False          | True          | True      | V(final observation)        | cut   |
| window end | False          | False         | True      | V(observation after row T-1)| cut   |
| filler     | False          | False         | False     | -                           | -     |
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import gymnasium
import torch
from torch import Tensor


class EnvError(ValueError):
    """An env, an engine or an action was refused; the message is one line: its name and what would be right."""


class StepResult(NamedTuple):
    """What one step of ``n`` envs returned, as tensors on the env's device.

    Engines may reuse the memory: a result is good until the same pool's next ``recv``.
    """

    observations: Tensor  #: ``[n, *observation_shape]``, seen next; the final one where an episode ended
    rewards: Tensor  #: ``[n]`` float32, exactly 0 in filler rows
    terminated: Tensor  #: ``[n]`` bool
    truncated: Tensor  #: ``[n]`` bool, False wherever ``terminated`` is True
    valid: Tensor  #: ``[n]`` bool, False in filler rows


class Clock(Protocol):
    """The part of the trainer's clock that an engine uses, to tell simulation (`env_step`) from copies (`transfer`)."""

    def phase(self, name: str, /) -> AbstractContextManager[Any]:
        """Time the block under this phase's name."""
        ...


class NullClock:
    """Times nothing: the clock of an env that is used without a trainer."""

    def phase(self, name: str, /) -> AbstractContextManager[Any]:
        """Do nothing around the block."""
        return nullcontext()

    def turns(self, count: int) -> Iterable[int]:
        """``0 .. count - 1``."""
        return range(count)


class VecEnv(abc.ABC):
    """``num_envs`` copies of one env, stepped in one or more pools.

    A pool is a contiguous range of env columns that steps as one. With several pools the policy works on one while the
    others step: ``send`` starts a pool's step and returns, ``recv`` waits for it. Engines on the GPU have one pool.
    """

    id: str  #: the exact id that was resolved, e.g. ``Ant-v5``
    engine: str  #: ``envpool``, ``mujoco_warp`` or ``torch``
    num_envs: int
    device: torch.device
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    pools: tuple[slice, ...]  #: the columns of each pool; together ``0 .. num_envs``
    capturable: bool = False  #: True if ``send`` and ``recv`` only launch work on the current CUDA stream
    fixed_results: bool = False  #: True if a pool's ``recv`` always returns the same tensors, for CUDA graphs to read
    limits_steps: bool = False  #: True if ``recv`` itself raises where a step takes longer than ``env.timeout``
    clock: Clock = NullClock()

    @classmethod
    @abc.abstractmethod
    def known_ids(cls) -> Sequence[str]:
        """All exact ids that the engine can make, e.g. ``Ant-v5``; `envs.resolve` chooses among them."""

    @abc.abstractmethod
    def reset(self) -> Tensor:
        """Start every env anew and return the first observations ``[num_envs, *observation_shape]``."""

    @abc.abstractmethod
    def send(self, pool: int, actions: Tensor) -> None:
        """Start one step of a pool with ``actions`` ``[n, *action_shape]`` (float32, or int64 if discrete).

        Raises:
            EnvError: wrong shape or dtype, or (where the engine reads actions on the host) a value that is not finite
                or not in a discrete space; nothing reaches the engine.
        """

    @abc.abstractmethod
    def recv(self, pool: int) -> StepResult:
        """Wait for the step that ``send`` started and return its result."""

    def step(self, actions: Tensor) -> StepResult:
        """Step all envs once: ``send`` to every pool, then ``recv`` from every pool, joined along the env axis.

        If a pool refuses its actions, the pools before it have a step under way, which `reset` drops.
        """
        for pool, columns in enumerate(self.pools):
            self.send(pool, actions[columns])
        results = [self.recv(pool) for pool in range(len(self.pools))]
        if len(results) == 1:
            return results[0]
        return StepResult(*(torch.cat(fields) for fields in zip(*results, strict=True)))

    @abc.abstractmethod
    def reseed(self, epoch: int) -> None:
        """Derive all random streams anew from (seed, rank, epoch); the next ``reset`` starts episodes from them."""

    def state_dict(self) -> dict[str, Tensor] | None:
        """All state, or None where the engine cannot give it (EnvPool): a resumed run then calls ``reseed``."""
        return None

    def load_state_dict(self, state: dict[str, Tensor]) -> Tensor:
        """Restore what `state_dict` gave and return the current observations; only for engines that have one."""
        raise EnvError(f"env.engine={self.engine} cannot restore its state; it is re-seeded on resume")

    def counters(self) -> dict[str, int]:
        """Faults survived since the last call (dropped contacts, worlds that became NaN); may synchronize."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Free the engine's threads and memory; calling it twice is fine."""
