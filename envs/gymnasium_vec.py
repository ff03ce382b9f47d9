"""Gymnasium: any registered id, also one's own, stepped by Gymnasium's vector envs in this process or in many."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box
from numpy.typing import NDArray

from envs.actions import float_actions, index_range
from envs.base import EnvError
from envs.gymnasium_pool import Pool, in_one_line
from envs.host import HostVecEnv, Rows, check_timing
from envs.observations import ObservationMap

_MODES = ("sync", "async")
_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")


class GymnasiumVecEnv(HostVecEnv):
    """``num_envs`` copies of an env that is registered with Gymnasium, with its wrappers.

    Observations become float32, except uint8 (images), which stays; a ``Dict`` of vectors becomes one vector
    (`envs.observations`). Infos are dropped. Gymnasium's checker watches the first env. Results are bitwise the same in
    both modes and for any number of pools, if the env takes all its randomness from the seed of its reset.

    Args:
        id: an exact id of Gymnasium's registry, e.g. ``CartPole-v1``.
        num_envs: envs of this rank.
        device: where results go; on CUDA through a pinned ring, one asynchronous copy per step.
        seed: of the whole run, over all ranks; see `envs.seeding.first_seed`.
        rank: this process among ``world_size``.
        world_size: processes of the run, each with ``num_envs`` envs.
        pools: contiguous groups of envs that step apart; their sizes differ by at most one. 0 makes two in mode async,
            one in mode sync, where a step keeps this process busy.
        num_threads: async: envs of a pool that may step at a time; 0 sets no limit.
        timeout: async: seconds to wait for one step of a pool before an env counts as stuck.
        vectorization_mode: sync steps the envs one after another in this process; async gives each a process.
        **options: passed to `gymnasium.make`, e.g. ``max_episode_steps`` or the arguments of the env's constructor.

    Raises:
        EnvError: an option is unknown or out of range, the env cannot be made, or its spaces are not supported.
    """

    engine = "gymnasium"

    def __init__(
        self,
        id: str,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pools: int = 0,
        num_threads: int = 0,
        timeout: float = 60.0,
        vectorization_mode: str = "sync",
        **options: Any,
    ) -> None:
        check_timing(num_threads, timeout)
        if vectorization_mode not in _MODES:
            raise EnvError(f"env.options.vectorization_mode={vectorization_mode}: it must be {' or '.join(_MODES)}")
        self._spec, self._options = gymnasium.spec(id), options
        self._mode, self._num_threads, self._timeout = vectorization_mode, num_threads, timeout
        self.limits_steps = vectorization_mode == "async"
        observation_space, action_space = _spaces(self._spec, options)
        self._join = ObservationMap(id, observation_space)
        if index_range(action_space) is None:
            action_space = _within(action_space, float_actions(id, action_space, "Discrete, MultiDiscrete"))
        self._pools: tuple[Pool, ...] = ()
        super().__init__(
            id, num_envs, self._join.space, action_space,
            device=device, seed=seed, rank=rank, world_size=world_size,
            pools=pools or (min(2, num_envs) if vectorization_mode == "async" else 1),
        )  # fmt: skip

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """All ids of Gymnasium's registry, one's own included."""
        return tuple(gymnasium.registry)

    def close(self) -> None:
        """Close the envs and end their processes, those that do not answer by force; calling it twice is fine."""
        for pool in self._pools:
            pool.close()
        self._pools = ()

    def _start(self, first_seed: int) -> None:
        self._seeds: list[int | None] = [first_seed + columns.start for columns in self.pools]
        if not self._pools:
            self._pools = tuple(
                Pool(self._spec, self._numbers(pool), self._options, self._mode, self._num_threads, self._timeout)
                for pool in range(len(self.pools))
            )

    def _reset_pool(self, pool: int) -> NDArray:
        seed, self._seeds[pool] = self._seeds[pool], None  # a reset without a seed goes on with the env's own generator
        return self._join(self._pools[pool].reset(seed))

    def _send_to(self, pool: int, actions: NDArray) -> None:
        self._pools[pool].send(actions)

    def _recv_from(self, pool: int) -> Rows:
        observations, *rest = self._pools[pool].recv()
        return Rows(self._join(observations), *rest)


def _within(exact: Any, rounded: Box) -> Box:
    """The float32 bounds of actions, none beyond the env's own: it may refuse 0.1 in float32, which is above 0.1."""
    low = np.where(rounded.low < exact.low, np.nextafter(rounded.low, np.float32(np.inf)), rounded.low)
    high = np.where(rounded.high > exact.high, np.nextafter(rounded.high, np.float32(-np.inf)), rounded.high)
    return Box(low, high, dtype=np.float32)


def _spaces(spec: EnvSpec, options: dict[str, Any]) -> tuple[gymnasium.Space, gymnasium.Space]:
    """Observation and action space of one env, which also shows whether the options are its own."""
    try:
        env = gymnasium.make(spec, **{"disable_env_checker": True, **options})
        env.close()
    except Exception as error:
        unknown = _UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
        if unknown and unknown[1] in options:
            raise EnvError(f"env.options.{unknown[1]}: {spec.id} has no such option") from error
        raise EnvError(f"env.id={spec.id}: Gymnasium cannot make it: {in_one_line(error)}") from error
    return env.observation_space, env.action_space
