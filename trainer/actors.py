"""Actors: each steps its own envs under its own copy of the policy, and never waits for the learner's update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from envs.base import VecEnv
from trainer.algorithm import Parts
from trainer.collector import Collector
from trainer.gate import Closed, Gate
from trainer.graphs import Graphs
from trainer.networks import Torso
from trainer.normalize import ObservationNormalizer, Scaling
from trainer.policy import Action
from trainer.policy_versions import PolicyVersions, tensors_of
from trainer.rollout_queue import RolloutQueue
from trainer.shared_inference import Request, SharedInference
from trainer.timing import make_clock

#: The actor's phase in which it waits for memory or for a version of the policy.
WAIT = "wait"


@dataclass(frozen=True)
class WindowNote:
    """What an actor says of a window that it submits."""

    actor: int
    version: int  #: of the policy that acted, in updates
    times: dict[str, float]  #: milliseconds per phase of the actor's turn, `WAIT` and ``total`` among them


@dataclass(frozen=True)
class VersionRule:
    """Which version of the policy collects the window that the learner takes as its ``number``-th batch."""

    max_lag: int | None  #: wait for a version at most so many updates older than the batch's
    exactly: bool = False  #: take that version, though there be a newer one

    def oldest(self, number: int) -> int:
        """The oldest version that may act, if there is one so old."""
        return 0 if self.max_lag is None else number - self.max_lag


class _NormalizedTorso(Torso):
    """A torso that sees raw observations: rollouts keep them, for the learner's statistics are made of them."""

    def __init__(self, normalizer: ObservationNormalizer, torso: Torso):
        super().__init__()
        self.normalizer, self.torso, self.features = normalizer, torso, torso.features
        self._scaling = Scaling(*map(torch.clone, normalizer.scaling()))

    def freeze(self, noted: Scaling) -> None:
        """Scale by the statistics of now until the next call, and note them for every env, ``[N, *shape]``."""
        for frozen, of_envs, present in zip(self._scaling, noted, self.normalizer.scaling(), strict=True):
            frozen.copy_(present)
            of_envs.copy_(present)

    def forward(self, observations: Tensor) -> Tensor:
        return self.torso(self.normalizer(observations, self._scaling))


class Actor:
    """One actor: its envs, its copy of the policy, its random numbers, its clock; on CUDA its stream and graphs.

    Its policy and the statistics of its observation normalizer are one version, read at the border of two windows and
    frozen in between. Its numbers come from a generator of its own: replayed graphs on several streams would share the
    offsets of one, and what an actor draws would depend on who else draws.

    Args:
        number: among the run's actors.
        group: which actors it fills batches with: batches ``group``, ``group + groups``, ``group + 2 * groups``, ...
        part: which columns of these batches it fills.
        groups: how many groups there are.
        env: its own envs.
        parts: the run's, of which policy and normalizer are copied.
        rollout_length: T.
        compile_policy: run the policy step through ``torch.compile``.
        inference: where it meets other actors' policy steps; None: it acts alone.
    """

    def __init__(
        self,
        number: int,
        group: int,
        part: int,
        groups: int,
        env: VecEnv,
        parts: Parts,
        rollout_length: int,
        compile_policy: bool,
        inference: SharedInference | None,
    ):
        self.number, self.group, self._part, self._groups = number, group, part, groups
        self._next_batch, self._version = group, 0
        policy, normalizer = copy.deepcopy((parts.policy, parts.observation_normalizer))
        self._tensors = tensors_of(policy, normalizer)
        self._torso = None if normalizer is None else _NormalizedTorso(normalizer, policy.torso)
        policy.torso = self._torso or policy.torso
        self.generator = policy.generator = torch.Generator(parts.device)
        self._clock = make_clock(parts.device, parts.graphs.detail)
        run = parts.graphs
        graphs = Graphs(self._clock, run.enabled, run.detail, run.notice, (self.generator,))
        # its kernels go before the learner's: they are short, and envs wait for them
        self._stream = torch.cuda.Stream(parts.device, priority=-1) if parts.device.type == "cuda" else None
        with torch.cuda.stream(self._stream):
            self.collector = Collector(
                env, policy, None, None, parts.action_map, rollout_length, graphs, compile_policy,
                inference and partial(self._act_together, inference),
            )  # fmt: skip

    def run(self, gate: Gate, queue: RolloutQueue[WindowNote], versions: PolicyVersions, rule: VersionRule) -> None:
        """Collect window after window until the gate is closed; an error closes it."""
        try:
            while True:
                self.collect(queue, versions, rule)
        except Closed:
            return
        except BaseException as error:
            gate.close(error)

    def collect(self, queue: RolloutQueue[WindowNote], versions: PolicyVersions, rule: VersionRule) -> None:
        """Collect one window into the next batch of this actor's group.

        Raises:
            Closed: the run is ending.
        """
        with torch.cuda.stream(self._stream):
            self._clock.start()
            with self._clock.phase(WAIT):
                rollout = self.collector.rollout = queue.acquire(self._next_batch, self._part)
                self._version = versions.read(self._tensors, rule.oldest(self._next_batch), rule.exactly)
                if self._torso is not None and rollout.scaling is not None:
                    self._torso.freeze(rollout.scaling)
            self.collector.collect()
            self._clock.lap()
            queue.submit(self._next_batch, WindowNote(self.number, self._version, self._clock.read()))
        self._next_batch += self._groups

    def _act_together(self, inference: SharedInference, act: Callable[..., Action], *inputs: Tensor) -> Action:
        return inference.act(Request(act, self._version, inputs, self._stream))

    def restart(self) -> None:
        """Start every env anew."""
        with torch.cuda.stream(self._stream):
            self.collector.restart()
