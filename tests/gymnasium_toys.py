"""Gymnasium envs for tests of that engine, which its processes import by name."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import WrapperSpec
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

LENGTH = 4
BOOM_AT = 3


class Counter(gymnasium.Env):
    """Observes its start and its steps, ends after ``LENGTH`` of them, and does as told by ``fault`` at ``BOOM_AT``."""

    observation_space = Dict({"start": Box(0, 1, (), np.float64), "steps": Box(-9, 9, (2, 1), np.int64)})
    action_space = MultiDiscrete([3, 5], start=[1, -2])

    def __init__(self, fault: str = "none", only: int = -1, reward: float = 1.0) -> None:
        self._fault, self._only, self._reward = fault, only, reward
        if fault == "constructor":
            raise FileNotFoundError("no map\nin three\nlines")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed = self._seed if seed is None else seed
        self._start, self._steps = self.np_random.random(), 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise TypeError(f"{action!r} is no action")
        self._steps += 1
        if self._steps == BOOM_AT and self._seed == self._only:
            self._fail()
        if self._fault == "four values":
            return self._observe(), 0.0, False, {}
        return self._observe(), self._reward * action.sum(), self._steps == LENGTH, self._steps == LENGTH, {"who": self}

    def _observe(self) -> dict[str, Any]:
        steps = np.array([[self._steps], [-self._steps]])
        return {"start": np.float64(self._start), "steps": steps[:1] if self._fault == "narrow part" else steps}

    def _fail(self) -> None:
        if self._fault == "raise":
            raise ValueError("boom")
        if self._fault == "sys.exit":
            sys.exit(0)
        if self._fault == "exit":
            os._exit(9)
        if self._fault == "hang":
            time.sleep(100)


class Frames(gymnasium.Env):
    """Frames whose numbers are all the action; its episodes never end, ``height`` and ``dtype`` may belie the space."""

    observation_space = Box(0, 255, (2, 3, 3), np.uint8)
    action_space = Discrete(2, start=1)

    def __init__(self, height: int = 3, dtype: str = "uint8") -> None:
        self._height, self._dtype = height, dtype

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros((2, 3, 3), np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.full((2, self._height, 3), action, self._dtype), 0, False, False, {}


class Doubled(gymnasium.RewardWrapper, gymnasium.utils.RecordConstructorArgs):
    """A wrapper that belongs to a registration."""

    def __init__(self, env: gymnasium.Env) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def reward(self, reward: Any) -> float:
        return 2 * reward


class Strict(Frames):
    """Refuses what is not in a space whose bounds float32 does not hold."""

    action_space = Box(-0.1, 0.3, (1,), np.float64)

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is out of bounds")
        return super().step(0)


def whole_number_actions() -> gymnasium.Env:
    """An env that the engine cannot serve."""
    env = Frames()
    env.action_space = Box(0, 3, (1,), np.int64)
    return env


for name, entry, wrappers in (
    ("Counter-v0", "Counter", ()),
    (
        "DoubledCounter-v0",
        "Counter",
        (WrapperSpec("Doubled", "gymnasium_toys:Doubled", {}),),
    ),
    ("toys/Frames-v0", "Frames", ()),
    ("Strict-v0", "Strict", ()),
    ("WholeNumbers-v0", "whole_number_actions", ()),
):
    gymnasium.register(name, f"gymnasium_toys:{entry}", additional_wrappers=wrappers)
