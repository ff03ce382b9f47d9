"""MuJoCo Warp worlds of one task: the physics and the kernels around it, as launches that a graph can hold."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gymnasium
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from mujoco import MjModel, mjtIntegrator, mjtSolver  # pyright: ignore[reportAttributeAccessIssue]  # has no stubs
from torch import Tensor

from envs import warp_kernels as kernels
from envs.warp_contacts import align_contacts
from envs.warp_rows import Field, Task
from envs.warp_starts import Starts

_CONTACT_FAULTS = mjw.OverflowType.BROADPHASE | mjw.OverflowType.NARROWPHASE | mjw.OverflowType.CCD
_CONSTRAINT_FAULTS = mjw.OverflowType.NEFC | mjw.OverflowType.NJMAX_NNZ
#: Held while kernels run on a CPU: there the tiles of all threads lie in the same static memory.
_CPU = threading.Lock()


def load_model(task: Task, physics: str) -> MjModel:
    """The model file of the installed Gymnasium package; MuJoCo Warp lacks PGS, so Humanoid is solved by Newton."""
    path = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / task.model
    model = MjModel.from_xml_path(str(path))
    if physics == "euler":
        model.opt.integrator = mjtIntegrator.mjINT_EULER
    if model.opt.solver == mjtSolver.mjSOL_PGS:
        model.opt.solver = mjtSolver.mjSOL_NEWTON
    return model


class WarpSimulation:
    """``num_envs`` worlds of a task and the tensors through which they are driven; torch and Warp share their memory.

    ``actions`` ``[num_envs, action]`` go in; ``observations`` ``[num_envs, entry]``, ``rewards`` and flags come out.
    """

    def __init__(
        self,
        task: Task,
        model: MjModel,
        num_envs: int,
        device: torch.device,
        *,
        key: Tensor,
        max_episode_steps: int,
    ) -> None:
        self._task, self._num_envs, self._device = task, num_envs, wp.device_from_torch(device)
        self._model = mjw.put_model(model)
        self._model.opt.warn_overflow = 0  # counted instead of printed
        self._model.opt.run_qacc_smooth = False  # nothing reads it, and Newton starts from the last acceleration
        self._model.block_dim.update_gradient_cholesky = 32  # instead of 64: one warp factors these small matrices
        self._data = mjw.make_data(model, nworld=num_envs, nconmax=task.contacts, njmax=task.constraints)
        self._model.callback.contactfilter = align_contacts

        zeros = functools.partial(torch.zeros, device=device)
        self._signals = _signals(self._data)
        self._rules = _rules(task, self._signals, task.frame_skip * model.opt.timestep, max_episode_steps)
        self.actions = zeros(num_envs, model.nu)
        self.observations = zeros(num_envs, self._rules.entries.shape[0])
        self.rewards, self.measure = zeros(num_envs), zeros(num_envs)
        flags = {name: zeros(num_envs, dtype=torch.bool) for name in ("done", "valid", "terminated", "truncated")}
        self.done, self.valid, self.terminated, self.truncated = flags.values()
        self.elapsed = zeros(num_envs, dtype=torch.int32)
        self.episode = zeros(num_envs, dtype=torch.int64)
        #: since the start: broken worlds, transitions short of contacts and of constraints; the lowest world that broke
        self.faults = zeros(4, dtype=torch.int64)
        self.key = key.to(device, copy=True)
        self.qpos, self.qvel = wp.to_torch(self._data.qpos), wp.to_torch(self._data.qvel)
        self.warmstart = wp.to_torch(self._data.qacc_warmstart)
        self._actions = wp.from_torch(self.actions)
        self._worlds = kernels.struct_of(
            kernels.Worlds,
            **{name: wp.from_torch(tensor) for name, tensor in flags.items()},
            broken=wp.zeros(num_envs, dtype=bool),
            elapsed=wp.from_torch(self.elapsed),
            episode=wp.from_torch(self.episode),
            measure=wp.from_torch(self.measure),
            observations=wp.from_torch(self.observations),
            rewards=wp.from_torch(self.rewards),
            faults=wp.from_torch(self.faults),
        )
        self._starts = kernels.struct_of(
            Starts,
            key=wp.from_torch(self.key, dtype=wp.uint64),
            qpos=wp.array(model.qpos0, dtype=float),
            position_scale=task.reset_noise_scale,
            velocity_scale=task.reset_noise_scale if task.reset_velocity_scale is None else task.reset_velocity_scale,
            velocity_normal=task.reset_velocity_normal,
            goal_radius=task.goal_radius,
        )
        self._outer_captures: list[Any] = []
        self._graph = self._capture()
        self.episode.zero_()
        self.done.fill_(True)  # until the first reset every row is filler
        self.faults.copy_(torch.tensor([0, 0, 0, num_envs]))

    def launch_step(self) -> None:
        """One step of every world, on torch's current stream; while that stream is captured, as a part of its graph."""
        if self._device.is_cpu:
            with _CPU:
                return wp.capture_launch(self._graph)
        stream = wp.stream_from_torch(self.actions.device)
        if not stream.is_capturing:
            return wp.capture_launch(self._graph, stream)
        capture = wp.ScopedCapture(stream=stream, external=True, capture_mode=wp.CaptureMode.GLOBAL)
        with wp.ScopedStream(stream, sync_enter=False), _no_garbage_collection(), capture:
            self._control_step()
        self._outer_captures.append(capture.graph)  # holds what the outer graph uses
        return None

    def reset(self) -> None:
        """Begin a new episode in every world, on torch's current stream."""
        self.done.fill_(True)
        if self._device.is_cpu:
            alone, scope = _CPU, wp.ScopedDevice(self._device)
        else:
            stream = wp.stream_from_torch(self.actions.device)
            alone, scope = contextlib.nullcontext(), wp.ScopedStream(stream, sync_enter=False)
        with alone, scope:
            self._launch_begin()
            self._launch_end()

    def state(self) -> dict[str, Tensor]:
        """The tensors that decide all further steps, in place; what else the simulation holds is computed from them."""
        names = "qpos", "qvel", "warmstart", "done", "elapsed", "episode", "measure", "observations", "key"
        return {name: getattr(self, name) for name in names}

    def _capture(self) -> wp.Graph:
        """The control step as a graph, after one step outside it: that compiles the kernels."""
        if self._device.is_cuda:
            torch.cuda.synchronize(self.actions.device)
        self._control_step()
        with _no_garbage_collection(), wp.ScopedCapture() as capture:
            self._control_step()
        wp.synchronize_device()
        return cast(wp.Graph, capture.graph)

    def _control_step(self) -> None:
        """Those worlds that are done are reset in place; the others act and are scored."""
        self._launch_begin()
        for _ in range(self._task.frame_skip):
            mjw.step(self._model, self._data)
        if self._task.reads_contact_forces:
            mjw.rne_postconstraint(self._model, self._data)
        self._observe(of_valid=True)
        self._launch_end()

    def _launch_begin(self) -> None:
        data = self._data
        inputs = [self._actions, self._worlds, self._starts, self._signals, data.ctrl, data.qacc_warmstart]
        wp.launch(kernels.begin_step, dim=self._num_envs, inputs=inputs)

    def _launch_end(self) -> None:
        data = self._data
        inputs = [self._actions, self._rules, self._worlds, self._starts, self._signals]
        wp.launch(kernels.end_step, dim=self._num_envs, inputs=[*inputs, data.qacc_warmstart, data.overflow])
        if self._task.reads_kinematics_at_reset:
            mjw.kinematics(self._model, data)
            mjw.com_pos(self._model, data)
            mjw.com_vel(self._model, data)
        wp.launch(kernels.begin_episode, dim=self._num_envs, inputs=[self._rules, self._worlds, self._signals])
        self._observe(of_valid=False)

    def _observe(self, of_valid: bool) -> None:
        inputs = [self._rules, self._worlds, self._signals, of_valid]
        wp.launch(kernels.observe, dim=self.observations.shape, inputs=inputs)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection could free device memory, which is not allowed while a graph is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _signals(data: mjw.Data) -> Any:
    """The simulation's own memory, vectors and matrices seen as flat rows."""
    flat = {}
    for name in map(str.lower, Field.__members__):
        tensor = wp.to_torch(getattr(data, name))
        flat[name] = wp.from_torch(tensor.view(len(tensor), tensor[0].numel()), dtype=wp.float32)
    return kernels.struct_of(kernels.Signals, **flat)


def _rules(task: Task, signals: Any, dt: float, max_episode_steps: int) -> Any:
    """The row with its runs of signals written out, one line per observation entry, health check and penalty."""

    def run(field: Field, start: int, stop: int | None) -> range:
        return range(start, getattr(signals, field.name.lower()).shape[1] if stop is None else stop)

    entries, clips, healthy, ranges = [], [], [], []
    for part in task.observation:
        for index in run(part.field, part.start, part.stop):
            minus = -1 if part.minus is None else part.minus + index - part.start
            entries.append((part.field, index, minus, part.transform))
            clips.append(part.clip)
    for check in task.healthy:
        for index in run(check.field, check.start, check.stop):
            healthy.append((check.field, index))
            ranges.append((check.low, check.high))
    measure = task.measure
    return kernels.struct_of(
        kernels.Rules,
        entries=wp.array(entries, dtype=wp.vec4i),
        clips=wp.array(clips, dtype=float),
        healthy=_pairs(healthy, wp.vec2i),
        healthy_ranges=_pairs(ranges, wp.vec2),
        penalties=_pairs([(penalty.field, penalty.index) for penalty in task.penalties], wp.vec2i),
        penalty_terms=_pairs([(penalty.weight, penalty.target) for penalty in task.penalties], wp.vec2),
        measure=wp.vec3i(measure.field, measure.start, -1 if measure.minus is None else measure.minus),
        measure_at_reset=-1 if measure.at_reset is None else measure.at_reset,
        rate=task.forward_reward_weight / dt,
        now=task.measure_weight,
        before=task.measure_before_weight,
        max_episode_steps=max_episode_steps,
        contact_faults=int(_CONTACT_FAULTS),
        constraint_faults=int(_CONSTRAINT_FAULTS),
        ctrl_cost_weight=task.ctrl_cost_weight,
        contact_cost_weight=task.contact_cost_weight,
        contact_force_limit=task.contact_force_limit,
        contact_cost_max=task.contact_cost_max,
        healthy_reward=task.healthy_reward,
        healthy_reward_at_end=task.healthy_reward_at_end,
        terminate_when_unhealthy=task.terminate_when_unhealthy,
    )


def _pairs(values: list[tuple[Any, Any]], dtype: Any) -> wp.array:
    return wp.array(np.array(values, dtype=wp.dtype_to_numpy(dtype._wp_scalar_type_)).reshape(-1, 2), dtype=dtype)
