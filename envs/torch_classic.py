"""The torch engine: any task of `envs.torch_tasks`, batched on any device, with no dependency but torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

import envs.torch_memory  # noqa: F401  (registers its task)
from envs.actions import check_layout, index_range
from envs.base import EnvError, StepResult, VecEnv
from envs.checks import check_columns, check_flag, check_limit, copy_state, usable_device
from envs.counter_rng import random_ages, stream_key
from envs.torch_step import Columns, Starts, StepFunction, assign, step_function
from envs.torch_tasks import TASKS

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TorchVecEnv(VecEnv):
    """``num_envs`` copies of a task written in torch: the classic control tasks, or one's own (`register_task`).

    In float64 a step equals Gymnasium's within 1e-12; only ``MountainCarContinuous-v0`` differs by a rounding, since
    Gymnasium stores its state in float32. First states depend on (seed, rank, epoch, env, episode) alone, whatever the
    device and the actions. A row whose action is not finite or outside its ``Discrete`` space, or whose outcome is not
    finite, keeps its state, earns 0 and ends as terminated; `counters` tells how many.

    The step updates buffers in place and may be captured in a CUDA graph at once; on CUDA it is compiled when the env
    is built.

    Args:
        id: a key of `envs.torch_tasks.TASKS`.
        num_envs: the number of env columns, in one pool.
        device: where all tensors live.
        seed: a seed of any size, 0 or more.
        rank: this process among ``world_size``; no two ranks share a random stream.
        world_size: the number of processes.
        dtype: float32 or float64, of state, observations and rewards; a `torch.dtype` or its name.
        max_episode_steps: transitions until truncation; None takes the task's own limit.
        stagger: `reset` counts a random part of each env's time limit as past, lest all limits come at once.
        compile: compile the step; None means on CUDA only. If that fails, a warning says so and the step runs eagerly.

    Raises:
        EnvError: an unknown task or option, an impossible value, or a device that is absent.
    """

    engine = "torch"
    capturable = True

    def __init__(
        self,
        id: str,
        num_envs: int,
        *,
        device: torch.device | str,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        dtype: torch.dtype | str = torch.float32,
        max_episode_steps: int | None = None,
        stagger: bool = False,
        compile: bool | None = None,
        **unknown: object,
    ) -> None:
        dtype_name = str(dtype).removeprefix("torch.")
        _refuse(bool(unknown), f"env.engine=torch has no option {', '.join(unknown)}")
        _refuse(id not in TASKS, f"env.id={id}: the torch engine has {', '.join(TASKS)}")
        check_columns(num_envs, seed, rank, world_size)
        _refuse(dtype_name not in _DTYPES, f"env.options.dtype={dtype_name}: it must be {' or '.join(_DTYPES)}")
        check_limit(max_episode_steps)
        check_flag("stagger", stagger)
        check_flag("compile", compile or False)

        self.id, self.num_envs, self.pools = id, num_envs, (slice(0, num_envs),)
        self.device = usable_device(device)
        self._task, self._dtype = TASKS[id], _DTYPES[dtype_name]
        self._seed, self._rank, self._stagger = seed, rank, stagger
        self._limit = max_episode_steps or self._task.max_episode_steps
        self.single_observation_space = _cast(self._task.observation_space, dtype_name)
        self.single_action_space = copy.deepcopy(self._task.action_space)  # a space owns a generator: share none
        self._started, self._result = False, None
        self._counted = 0  #: faults that `counters` has told of
        self._allocate()
        self._check_observations()
        self._step = step_function(self._task, self._limit)
        if self.device.type == "cuda" if compile is None else compile:
            self._step = self._compiled(self._step)

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        """The ids of all tasks, registered ones included."""
        return tuple(TASKS)

    def reset(self) -> Tensor:
        """Start every env's next episode and return the first observations ``[num_envs, *observation_shape]``."""
        columns = self._columns
        columns.episode.add_(1)
        columns.elapsed.zero_()
        if self._stagger:
            columns.elapsed.copy_(random_ages(self._starts.key, columns.episode, self._limit))
        columns.done.zero_()
        assign(columns.state, self._starts.draw(columns.episode, self._dtype))
        return self._current_observations()

    def send(self, pool: int, actions: Tensor) -> None:
        """Step all envs with ``actions`` ``[num_envs, *action_shape]``, float32 or int64 if discrete; never waits.

        Raises:
            EnvError: wrong shape, dtype or device, no such pool, or no `reset` yet. Values stay on the device unread:
                a row whose action cannot be used ends as terminated.
        """
        _refuse(pool != 0, f"pool={pool}: the torch engine has pool 0 only")
        _refuse(not self._started, f"{self.id} was stepped before its first reset")
        check_layout(actions, self.single_action_space, self.num_envs)
        _refuse(actions.device != self.device, f"actions are on {actions.device}: {self.id} is on {self.device}")
        with self.clock.phase("env_step"), torch.inference_mode(False), torch.no_grad():
            self._actions.copy_(actions)  # a buffer of our own: no caller's strides or flags make the step recompile
            self._result = self._step(self._columns, self._starts, self._actions)

    def recv(self, pool: int) -> StepResult:
        """Return the result of the last `send`, in the order of the current stream; fresh memory outside a CUDA graph.

        Raises:
            EnvError: no step was sent.
        """
        result, self._result = self._result, None
        if result is None:
            raise EnvError(f"pool={pool}: no step of {self.id} was sent")
        return result

    def reseed(self, epoch: int) -> None:
        """Derive all random streams anew from (seed, rank, epoch), also those of a captured step."""
        self._starts.key.copy_(stream_key(self._seed, self._rank, epoch))
        self._columns.episode.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """All that later rows depend on, as copies; restoring it continues every env and its randomness exactly."""
        return {name: tensor.clone() for name, tensor in self._named_tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> Tensor:
        """Restore what `state_dict` gave, in place, and return the current observations.

        Raises:
            EnvError: an entry is missing or unknown, or has another shape or dtype; nothing is changed then.
        """
        copy_state(self.id, state, self._named_tensors())
        self.counters()
        return self._current_observations()

    def counters(self) -> dict[str, int]:
        """``faulty_steps``: transitions since the last call that ended for an unusable action or outcome."""
        # read only: steps may be adding to them on another stream
        before, self._counted = self._counted, int(self._columns.faults.sum())
        return {"faulty_steps": self._counted - before}

    def close(self) -> None:
        """Refuse further steps; the memory goes with the env itself."""
        self._started, self._result = False, None

    def _allocate(self) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(self.num_envs, *shape, dtype=dtype, device=self.device)

        low, high = (
            torch.tensor(bound, dtype=torch.float64, device=self.device)[:, None]
            for bound in (self._task.start_low, self._task.start_high)
        )
        self._starts = Starts(
            key=stream_key(self._seed, self._rank, epoch=0).to(self.device),
            columns=torch.arange(self.num_envs, device=self.device),
            variables=torch.arange(len(low), device=self.device),
            low=low,
            high=high,
        )
        self._columns = Columns(
            state=tuple(zeros(self._dtype) for _ in low),
            elapsed=zeros(torch.int32),
            episode=zeros(torch.int64),
            done=zeros(torch.bool),
            faults=zeros(torch.int32),
        )
        action_dtype = self._dtype if index_range(self._task.action_space) is None else torch.int64
        self._actions = zeros(action_dtype, *(self._task.action_space.shape or ()))

    def _check_observations(self) -> None:
        found = list(self._task.observe(self._columns.state).shape)
        expected = [self.num_envs, *(self.single_observation_space.shape or ())]
        _refuse(found != expected, f"{self.id}: observe gives {found}, its observation_space says {expected}")

    def _compiled(self, step: StepFunction) -> StepFunction:
        """Compile now, on throw-away columns, so that the first real step may already be captured."""
        compiled = torch.compile(step, dynamic=False, fullgraph=True)
        try:
            with torch.inference_mode(False), torch.no_grad():
                compiled(copy.deepcopy(self._columns), self._starts, self._actions)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"{self.id} steps eagerly, torch.compile failed: {reason}", RuntimeWarning, stacklevel=3)
            return step
        return compiled

    def _current_observations(self) -> Tensor:
        self._started, self._result = True, None
        return self._task.observe(self._columns.state)

    def _named_tensors(self) -> dict[str, Tensor]:
        state, *counts = self._columns
        variables = {f"state.{index}": tensor for index, tensor in enumerate(state)}
        return variables | dict(zip(Columns._fields[1:], counts, strict=True)) | {"key": self._starts.key}


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise EnvError(message)


def _cast(space: spaces.Box, dtype: str) -> spaces.Box:
    return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=np.dtype(dtype).type)
