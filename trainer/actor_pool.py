"""The source of an asynchronous run's rollouts: actors in threads, a queue, and what an update's time went to."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from envs.base import EnvError
from envs.group import EnvGroup
from trainer import distributed
from trainer.actors import WAIT, Actor, VersionRule, WindowNote
from trainer.algorithm import Parts
from trainer.config import Config
from trainer.gate import Closed, Gate
from trainer.graphs import WARM_UP_CALLS
from trainer.normalize import ObservationNormalizer, Scaling
from trainer.policy_versions import PolicyVersions, tensors_of
from trainer.rollout import Rollout
from trainer.rollout_queue import RolloutQueue
from trainer.shared_inference import SharedInference


class ActorPool:
    """One actor per member of an env group, each in a thread of its own.

    ``pools / rollouts_per_update`` groups of actors fill batches in turn. Version ``v`` of the policy is published by
    the ``v``-th `collect`, counted from 0; a window's lag is the newest version less the one that acted.

    With ``impala.force_lag=k`` there are no threads: `collect` lets its actors act one after another, with the
    parameters of exactly ``k`` updates ago, so that a run is repeatable. So it is, with the newest parameters, before
    all CUDA graphs stand: while one is captured, nobody else may draw random numbers or replay another.
    """

    def __init__(self, config: Config, env: EnvGroup, parts: Parts):
        impala, groups, per_group = config.impala, config.num_batch_groups, config.rollouts_per_update
        self._clock, self._episodes, self._pools = parts.graphs.clock, parts.episodes, env.pools
        self._timeout = config.env.timeout
        self._first_number = distributed.rank() * env.num_envs  #: messages count envs over all ranks
        self._inference = SharedInference() if impala.batch_inference else None
        self._actors = [
            Actor(
                i, i // per_group, i % per_group, groups, member, parts, config.rollout_length, config.compile,
                self._inference,
            )
            for i, member in enumerate(env.members)
        ]  # fmt: skip
        self._gate = Gate()
        memory = [
            _batch_memory(self._actors[0].collector.rollout, config.envs_per_update, parts.observation_normalizer)
            for _ in range(impala.queue_size or 2 * groups)
        ]
        self._queue: RolloutQueue[WindowNote] = RolloutQueue(self._gate, memory, per_group)
        self._is_forced = impala.force_lag is not None
        #: batches before there are threads: every group has captured its graphs of every memory that it fills
        self.preludes = (WARM_UP_CALLS + 1) * math.lcm(groups, len(memory)) if parts.graphs.enabled else 0
        self._versions = PolicyVersions(
            self._gate, tensors_of(parts.policy, parts.observation_normalizer), depth=2 + (impala.force_lag or 0)
        )
        blocked_lag = impala.max_lag if impala.max_lag_action == "block" else None
        self._rule = VersionRule(impala.force_lag if self._is_forced else blocked_lag, exactly=self._is_forced)
        self._dropped_lag = impala.max_lag if impala.max_lag_action == "drop" else None
        self._groups, self._threads = groups, list[threading.Thread]()
        self._notes: dict[int, WindowNote] = {}  #: the newest of each actor
        self._last_note: WindowNote | None = None
        self._lags: list[int] = []  #: of the windows in the newest batch
        self._lag_counts: Counter[int] = Counter()
        self._dropped = 0
        self._is_seeded = False
        if parts.device.type == "cuda":
            torch.cuda.synchronize(parts.device)  # other streams shall find what this one has built

    def collect(self) -> Rollout:
        """The next batch; good until the next call.

        Raises:
            Exception: what an actor raised, with the traceback of its thread.
        """
        try:
            if not self._is_seeded:
                self._seed()
            with self._clock.phase("transfer"):
                self._versions.publish()
            rollout = self._take()
            while self._dropped_lag is not None and max(self._lags) > self._dropped_lag:
                self._dropped += len(self._lags)
                self._episodes.record(self._episodes.follow(rollout))  # returns must go on without a gap
                rollout = self._take()
        except Closed as closed:
            raise (self._gate.error or closed) from None
        self._lag_counts.update(self._lags)
        return rollout

    def _take(self) -> Rollout:
        self._queue.release()
        with self._clock.phase(WAIT):
            if self._is_forced or self._versions.newest < self.preludes:
                self._collect_here()
            elif not self._threads:
                self._start()
            batch = self._queue.take(self._find_stuck)
        self._lags = [self._versions.newest - note.version for note in batch.notes]
        self._notes.update((note.actor, note) for note in batch.notes)
        self._last_note = batch.notes[-1]
        notes = sorted(batch.notes, key=lambda note: note.actor)
        columns = slice(self._pools[notes[0].actor].start, self._pools[notes[-1].actor].stop)
        return replace(batch.rollout, columns=columns)

    def _find_stuck(self) -> None:
        """Raise an `EnvError` where an actor's env does not answer and its engine does not say so itself."""
        for actor, columns in zip(self._actors, self._pools, strict=True):
            if self._is_stuck(actor):
                first, last = self._first_number + columns.start, self._first_number + columns.stop - 1
                raise EnvError(
                    f"envs {first} to {last}: no answer for env.timeout={self._timeout} s, one of them is stuck"
                )

    def _is_stuck(self, actor: Actor) -> bool:
        return not actor.collector.env.limits_steps and time.monotonic() - actor.collector.asked > self._timeout

    def _seed(self) -> None:
        """Draw the actors' seeds from the run's own generator: a resumed run goes on with other numbers."""
        for actor, seed in zip(self._actors, torch.randint(2**62, (len(self._actors),)).tolist(), strict=True):
            actor.generator.manual_seed(seed)
        self._is_seeded = True

    def _collect_here(self) -> None:
        """Let the actors whose turn it is collect in this thread."""
        turn = self._versions.newest % self._groups
        for actor in self._actors:
            if actor.group == turn:
                actor.collect(self._queue, self._versions, self._rule)

    def _start(self) -> None:
        arguments = (self._gate, self._queue, self._versions, self._rule)
        self._threads = [
            threading.Thread(target=actor.run, args=arguments, name=f"actor {actor.number}", daemon=True)
            for actor in self._actors
        ]
        for thread in self._threads:
            thread.start()

    def explain(self, times: dict[str, float]) -> tuple[dict[str, float], dict[str, Any]]:
        """What the learner waited for is what the last actor to submit did meanwhile: its phases, in their ratio."""
        times, note = dict(times), self._last_note
        waited = times.pop(WAIT, 0.0)
        if note is None:
            return times, {}
        work = {name: value for name, value in note.times.items() if name not in (WAIT, "total")}
        for name, value in work.items():
            times[name] = times.get(name, 0.0) + waited * value / sum(work.values())
        return times, {
            "learner/idle": waited / times["total"],
            **self._actor_metrics(),
            **self._batch_metrics(),
            **self._lag_metrics(),
        }

    def _actor_metrics(self) -> dict[str, Any]:
        notes = sorted(self._notes.values(), key=lambda note: note.actor)
        return {
            "actor/idle": fmean(note.times.get(WAIT, 0.0) / note.times["total"] for note in notes),
            **{f"actor/{n.actor}/{name}_ms": value for n in notes for name, value in n.times.items() if value},
        }

    def _batch_metrics(self) -> dict[str, Any]:
        """Of the run: how many policy steps were taken for 1, 2, 3, ... actors at once, and for how many on average."""
        counts = self._inference.histogram() if self._inference else []
        if not counts:
            return {}
        acted = sum(actors * steps for actors, steps in enumerate(counts, start=1))
        return {"actor/batched": acted / sum(counts), "actor/batch_histogram": counts}

    def _lag_metrics(self) -> dict[str, Any]:
        """Of the newest batch; the histogram is of the run: how many windows were 0, 1, 2, ... updates old."""
        counts = self._lag_counts
        return {
            "lag/min": min(self._lags),
            "lag/mean": fmean(self._lags),
            "lag/max": max(self._lags),
            "lag/histogram": [counts[lag] for lag in range(max(counts) + 1)],
            "lag/dropped_rollouts": self._dropped,
        }

    def restart(self) -> None:
        """Start every env anew, with other random numbers; only while no thread collects."""
        self._is_seeded = False
        for actor in self._actors:
            actor.restart()

    def state_dict(self) -> dict[str, Any]:
        """What was counted, and what the next windows depend on beside the policy, unless actors go on in threads."""
        counted = {"lag_counts": dict(self._lag_counts), "dropped": self._dropped}
        if not self._is_forced:
            return counted
        return {
            **counted,
            "device": self._actors[0].generator.device.type,
            "versions": self._versions.history(),
            "actors": [
                {**actor.collector.state_dict(), "generator": actor.generator.get_state()} for actor in self._actors
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what `state_dict` gave; False if the envs cannot go on where they were, but must start anew."""
        self._lag_counts, self._dropped = Counter(state.get("lag_counts")), state.get("dropped", 0)
        if not self._is_forced or state.get("device") != self._actors[0].generator.device.type:
            return False
        if len(state["actors"]) != len(self._actors):  # env.pools was changed
            return False
        self._versions.recall(state["versions"])
        self._is_seeded = True
        for actor, saved in zip(self._actors, state["actors"], strict=True):
            actor.generator.set_state(saved["generator"].cpu())
        return all(
            actor.collector.load_state_dict(saved) for actor, saved in zip(self._actors, state["actors"], strict=True)
        )

    def close(self) -> None:
        """End the threads, each after the window that it collects; calling it twice is fine."""
        self._gate.close()
        for actor, thread in zip(self._actors, self._threads, strict=False):  # threads may not have begun
            thread.join(0 if self._is_stuck(actor) else self._timeout)


def _batch_memory(rollout: Rollout, num_envs: int, normalizer: ObservationNormalizer | None) -> Rollout:
    """A rollout like this one for the envs of a batch; with a normalizer, also with each env's scaling."""
    memory = rollout.for_envs(num_envs)
    if normalizer is None:
        return memory
    scaling = Scaling(*(tensor.repeat(num_envs, *(1,) * tensor.dim()) for tensor in normalizer.scaling()))
    return replace(memory, scaling=scaling)
