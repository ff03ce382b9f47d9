"""A `VecEnv` as Gymnasium users know it: `gymnasium.vector.VectorEnv`, with numpy arrays or torch tensors."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from envs.actions import index_range
from envs.base import EnvError, VecEnv


class VectorView(VectorEnv):
    """All of a `VecEnv`'s columns as one `gymnasium.vector.VectorEnv`; build it with `as_gymnasium`."""

    def __init__(self, env: VecEnv, output: Literal["numpy", "torch"]) -> None:
        if output not in ("numpy", "torch"):
            raise EnvError(f"output={output}: it must be numpy or torch")
        self.env = env
        self.num_envs = env.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space = batch_space(env.single_observation_space, env.num_envs)
        self.action_space = batch_space(env.single_action_space, env.num_envs)
        self._output = output

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start every env anew and return the first observations ``[num_envs, *observation_shape]`` and an empty info.

        ``seed`` re-seeds the env with its own seed and this number as epoch (`VecEnv.reseed`): equal numbers give equal
        episodes, on every rank others.

        Raises:
            EnvError: ``options`` were given; no engine has any.
        """
        if options:
            raise EnvError(f"reset got options {', '.join(options)}: the envs of engine {self.env.engine} have none")
        super().reset(seed=seed)
        if seed is not None:
            self.env.reseed(seed)
        return self._out(self.env.reset()), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every env with ``actions`` ``[num_envs, *action_shape]``, an array or a tensor on any device.

        Returns:
            Observations, rewards, terminations, truncations, and an info whose ``valid`` ``[num_envs]`` bool is False
            in the rows that only reset an env (the step after an end). The caller owns all of them.

        Raises:
            EnvError: the env refuses the actions, or a discrete space got numbers with a fraction.
        """
        observations, *flags = self.env.step(self._in(actions))
        rewards, terminated, truncated, valid = map(self._out, flags)
        return self._out(observations), rewards, terminated, truncated, {"valid": valid}

    def close_extras(self, **kwargs: Any) -> None:
        """Close the env behind the view."""
        self.env.close()

    def _in(self, actions: Any) -> Tensor:
        tensor = torch.as_tensor(actions, device=self.env.device)
        if index_range(self.single_action_space) is None:
            return tensor.to(torch.float32)
        if tensor.is_floating_point():
            raise EnvError(f"actions are {tensor.dtype}: {self.single_action_space} needs integers")
        return tensor.to(torch.int64)

    def _out(self, tensor: Tensor) -> Tensor | np.ndarray:
        """A copy, because engines reuse their memory."""
        return tensor.clone() if self._output == "torch" else tensor.cpu().numpy().copy()


def as_gymnasium(env: VecEnv, output: Literal["numpy", "torch"] = "numpy") -> VectorView:
    """View ``env`` as a `gymnasium.vector.VectorEnv` with next-step autoreset; closing the view closes the env.

    Args:
        env: any engine's env, of any device and number of pools.
        output: ``numpy`` gives arrays on the host, ``torch`` gives tensors on the env's device.

    Raises:
        EnvError: another ``output``.
    """
    return VectorView(env, output)
