"""Steps the envs under the behaviour policy into a `Rollout`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from envs.actions import ActionMap
from envs.base import StepResult, VecEnv
from trainer.graphs import GraphedStep, Graphs, Part
from trainer.normalize import ObservationNormalizer, Scaling, ValueNormalizer
from trainer.policy import Action, ActorCritic
from trainer.rollout import Rollout


class _Steps(NamedTuple):
    """What fills the memory of one rollout; lists have a step for each pool."""

    choose: list[GraphedStep]
    send: list[GraphedStep]
    receive: list[list[GraphedStep]]
    finish: GraphedStep


class Collector:
    """Collects windows of ``T`` steps; episodes go on from one window to the next.

    The env's pools take turns: while one steps, the policy works on the next. Every step reads and writes tensors that
    stay where they are, the number of the row among them, so that one CUDA graph serves all rows: that of the policy
    always, unless it is shared, that of the env where the engine is capturable, that of recording where its results lie
    still.

    Args:
        shared: takes the policy's step, given as its first argument, for this collector and others together.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: ActorCritic,
        observation_normalizer: ObservationNormalizer | None,
        value_normalizer: ValueNormalizer | None,
        action_map: ActionMap,
        rollout_length: int,
        graphs: Graphs,
        compile_policy: bool = False,
        shared: Callable[..., Action] | None = None,
    ):
        self.env, self.policy, self.action_map = env, policy, action_map
        self.observation_normalizer, self.value_normalizer = observation_normalizer, value_normalizer
        env.clock = self._clock = graphs.clock
        self._observations = env.reset().clone()  #: what the policy sees next, as the env gave it
        self._ended = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)  #: the next row is filler
        self._actions = torch.zeros(
            env.num_envs, *policy.action_shape, dtype=policy.action_dtype, device=env.device
        )  #: what the env is sent
        self._state = policy.initial_state(env.num_envs)  #: the memory with which it sees them
        #: frozen while a rollout is collected
        self._scaling = Scaling(*map(torch.clone, observation_normalizer.scaling())) if observation_normalizer else None
        self._results: dict[int, StepResult] = {}  #: what came back last, by pool
        self._rows = torch.zeros(len(env.pools), 1, dtype=torch.int64, device=env.device)  #: each pool's row, t
        act: Callable[..., Action] = torch.compile(policy.act) if compile_policy else policy.act
        self._act = act if shared is None else partial(shared, act)
        self._is_shared = shared is not None
        self._graphs = graphs
        self._begin = graphs.step("the rollout's start", Part("normalize", self._freeze_scaling))
        self.asked = math.inf  #: when the envs were last sent actions, by `time.monotonic`; infinite once they answered
        self._steps: dict[int, tuple[Rollout, _Steps]] = {}  #: by the identity of a rollout, which is kept alive
        dtype = self._observations.dtype
        if observation_normalizer is not None:  # integers are normalized to floats, in the same memory
            dtype = torch.promote_types(dtype, torch.float32)
        #: what `collect` fills; another one that is set is filled by graphs of its own, kept for the next time
        self.rollout = Rollout.allocate(
            rollout_length,
            env.num_envs,
            tuple(self._observations.shape[1:]),
            dtype,
            policy.action_shape,
            policy.action_dtype,
            env.device,
            policy.state_size,
        )

    def _make_steps(self, rollout: Rollout) -> _Steps:
        step, env = self._graphs.step, self.env
        pools = [(p, rollout.narrow(columns)) for p, columns in enumerate(env.pools)]
        # the rows of a shared step, and the stream that takes it, are others every time
        policy = partial(step, capturable=not self._is_shared)
        engine = partial(step, f"env.engine={env.engine}", capturable=env.capturable)
        return _Steps(
            choose=[
                policy(f"the policy step of pool {p}", Part("inference", partial(self._choose_in, p, rows)))
                for p, rows in pools
            ],
            send=[engine(Part("env_step", partial(self._send_to, p))) for p, _ in pools],
            receive=[self._receive_steps(p, rows) for p, rows in pools],
            finish=step(
                "the rollout's end",
                Part("normalize", partial(self._normalize_observations, rollout)),
                Part("inference", partial(self._evaluate_last, rollout)),
            ),
        )

    def _receive_steps(self, pool: int, rows: Rollout) -> list[GraphedStep]:
        """One step; two, where what comes back can be recorded by a graph, but not fetched by it."""
        step, env = self._graphs.step, self.env
        name, capturable = f"env.engine={env.engine}", env.capturable
        receive = Part("transfer", partial(self._receive_from, pool))
        record = Part("transfer", partial(self._record_in, pool, rows))
        if capturable or not env.fixed_results:
            return [step(name, receive, record, capturable=capturable)]
        return [step(name, receive, capturable=False), step(f"the record of pool {pool}", record)]

    def restart(self) -> None:
        """Start every env anew."""
        self._observations.copy_(self.env.reset())
        self._ended.zero_()
        self._state.zero_()

    def state_dict(self) -> dict[str, Any]:
        """What the next window depends on beside the policy, and the env's own state where it can be had."""
        return {
            "engine": self.env.engine,
            "env": self.env.state_dict(),
            "ended": self._ended,
            "core_state": self._state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what `state_dict` gave; False if the envs cannot go on where they were, but must start anew."""
        if state.get("env") is None or state.get("engine", self.env.engine) != self.env.engine:
            return False
        self._observations.copy_(self.env.load_state_dict(state["env"]))
        self._ended.copy_(state["ended"])
        self._state.copy_(state["core_state"])
        return True

    def explain(self, times: dict[str, float]) -> tuple[dict[str, float], dict[str, Any]]:
        """One thread: every phase is on the critical path."""
        return times, {}

    def close(self) -> None:
        """Nothing to end: the env belongs to the trainer."""

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Fill the rollout: ``T`` steps of every env. The same memory is used every time.

        Its observations come back normalized, and the normalizer has learned from the raw ones.
        """
        if id(self.rollout) not in self._steps:
            self._steps[id(self.rollout)] = self.rollout, self._make_steps(self.rollout)
        _, steps = self._steps[id(self.rollout)]
        self._begin()
        self.rollout.core_state[0] = self._state
        for choose, send in zip(steps.choose, steps.send, strict=True):
            choose()
            send()
        for _ in self._clock.turns(self.rollout.length - 1):  # which do the same
            for receive, choose, send in zip(steps.receive, steps.choose, steps.send, strict=True):
                for step in receive:
                    step()
                choose()
                send()
        for step in itertools.chain.from_iterable(steps.receive):
            step()
        steps.finish()
        return self.rollout

    def _choose_in(self, pool: int, rollout: Rollout) -> None:
        """Choose a pool's actions for its row, record them, and bring them into the env's bounds."""
        columns, row = self.env.pools[pool], self._rows[pool]
        observations = self._observations[columns]
        action = self._act(self._normalized(observations), *self._memory(columns))
        _write(rollout.observations, row, observations)
        _write(rollout.actions, row, action.actions)
        _write(rollout.log_probs, row, action.log_probs)
        _write(rollout.values, row, action.values)
        # a filler row's action is ignored, but where the final observation is NaN it must not be NaN to be sent
        ended = self._ended[columns].view(-1, *(1,) * len(self.policy.action_shape))
        self._actions[columns] = self.action_map(torch.where(ended, 0, action.actions))
        if action.state is not None:
            self._state[columns] = action.state

    def _memory(self, columns: slice) -> tuple[Tensor, Tensor] | tuple[()]:
        """What enters a row beside its observations: the memory, and where the row does not end it."""
        return (self._state[columns], ~self._ended[columns]) if self.policy.state_size else ()

    def _send_to(self, pool: int) -> None:
        self.asked = time.monotonic()
        self.env.send(pool, self._actions[self.env.pools[pool]])

    def _receive_from(self, pool: int) -> None:
        self._results[pool] = self.env.recv(pool)
        self.asked = math.inf

    def _record_in(self, pool: int, rollout: Rollout) -> None:
        """Record what came back from a pool's row, and go on to its next."""
        columns, row, step = self.env.pools[pool], self._rows[pool], self._results[pool]
        _write(rollout.rewards, row, step.rewards)
        _write(rollout.terminated, row, step.terminated)
        _write(rollout.truncated, row, step.truncated)
        _write(rollout.valid, row, step.valid)
        self._observations[columns] = step.observations
        torch.logical_or(step.terminated, step.truncated, out=self._ended[columns])
        row += 1

    def _normalized(self, observations: Tensor) -> Tensor:
        normalizer = self.observation_normalizer
        return observations if normalizer is None else normalizer(observations, self._scaling)

    def _freeze_scaling(self) -> None:
        self._rows.zero_()
        if self.observation_normalizer is not None and self._scaling is not None:
            for frozen, present in zip(self._scaling, self.observation_normalizer.scaling(), strict=True):
                frozen.copy_(present)

    def _normalize_observations(self, rollout: Rollout) -> None:
        """The rollout's observations as the policy saw them; the normalizer learns from the raw ones."""
        rollout.observations[-1] = self._observations
        if self.observation_normalizer is None:
            return
        normalized = self._normalized(rollout.observations)
        self.observation_normalizer.update(rollout.observations[:-1], rollout.valid)
        rollout.observations.copy_(normalized)

    def _evaluate_last(self, rollout: Rollout) -> None:
        """The values after the last row, and all of them in units of the reward."""
        values = rollout.values
        values[-1] = self.policy.value(rollout.observations[-1], self._state)
        if self.value_normalizer is not None:
            values.copy_(self.value_normalizer.denormalize(values))


def _write(field: Tensor, row: Tensor, values: Tensor) -> None:
    """Write ``values`` into a field's row, whose number lies on the device."""
    field.index_copy_(0, row, values[None].to(field.dtype))
