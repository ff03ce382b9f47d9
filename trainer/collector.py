"""Steps the envs under the behaviour policy into a `Rollout`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from envs.actions import ActionMap
from envs.base import StepResult, VecEnv
from trainer.normalize import ObservationNormalizer, ValueNormalizer
from trainer.policy import Action, ActorCritic
from trainer.rollout import Rollout
from trainer.timing import PhaseClock


class Collector:
    """Collects windows of ``T`` steps; episodes go on from one window to the next.

    The env's pools take turns: while one steps, the policy works on the next.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: ActorCritic,
        observation_normalizer: ObservationNormalizer | None,
        value_normalizer: ValueNormalizer | None,
        action_map: ActionMap,
        rollout_length: int,
        clock: PhaseClock,
        compile_policy: bool = False,
    ):
        self.env, self.policy, self.action_map, self.clock = env, policy, action_map, clock
        self.observation_normalizer, self.value_normalizer = observation_normalizer, value_normalizer
        env.clock = clock
        self._observations = env.reset()  #: what the policy sees next, as the env gave it
        self._ended = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)  #: the next row is filler
        dtype = self._observations.dtype
        if observation_normalizer is not None:  # integers are normalized to floats, in the same memory
            dtype = torch.promote_types(dtype, torch.float32)
        self.rollout = Rollout.allocate(
            rollout_length,
            env.num_envs,
            tuple(self._observations.shape[1:]),
            dtype,
            policy.action_shape,
            policy.action_dtype,
            env.device,
        )
        self._act: Callable[[Tensor], Action] = torch.compile(policy.act) if compile_policy else policy.act

    def restart(self) -> None:
        """Start every env anew."""
        self._observations = self.env.reset()
        self._ended.zero_()

    def resume_from(self, observations: Tensor) -> None:
        """Go on from an env whose state was restored, with the observations that it returned."""
        self._observations = observations

    def close(self) -> None:
        """Nothing to end: the env belongs to the trainer."""

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Fill the rollout: ``T`` steps of every env. The same memory is used every time.

        Its observations come back normalized, and the normalizer has learned from the raw ones.
        """
        rollout = self.rollout
        rollout.observations[0].copy_(self._observations)
        for t in range(rollout.length):
            for pool, columns in enumerate(self.env.pools):
                if t > 0:
                    self._receive(pool, columns, t - 1)
                self._step(pool, columns, t)
        for pool, columns in enumerate(self.env.pools):
            self._receive(pool, columns, rollout.length - 1)
        self._observations = rollout.observations[-1].clone()
        with self.clock.phase("normalize"):
            self._normalize_in_place()
        with self.clock.phase("inference"):
            rollout.values[-1] = self._denormalized(self.policy.value(rollout.observations[-1]))
        return rollout

    def _step(self, pool: int, columns: slice, t: int) -> None:
        """Choose a pool's actions for row t, record them, and send them into the env's bounds."""
        rollout = self.rollout
        with self.clock.phase("inference"):
            action = self._act(self._normalized(rollout.observations[t, columns]))
            rollout.actions[t, columns] = action.actions
            rollout.log_probs[t, columns] = action.log_probs
            rollout.values[t, columns] = self._denormalized(action.values)
            # a filler row's action is ignored, but where the final observation is NaN it must not be NaN to be sent
            ended = self._ended[columns].view(-1, *(1,) * len(self.policy.action_shape))
            env_actions = self.action_map(torch.where(ended, 0, action.actions))
        self.env.send(pool, env_actions)

    def _receive(self, pool: int, columns: slice, t: int) -> None:
        """Write what came back from row t, and the observation of row t + 1."""
        step: StepResult = self.env.recv(pool)
        rollout = self.rollout
        with self.clock.phase("transfer"):
            rollout.observations[t + 1, columns] = step.observations
            rollout.rewards[t, columns] = step.rewards
            rollout.terminated[t, columns] = step.terminated
            rollout.truncated[t, columns] = step.truncated
            rollout.valid[t, columns] = step.valid
            torch.logical_or(step.terminated, step.truncated, out=self._ended[columns])

    def _normalized(self, observations: Tensor) -> Tensor:
        return observations if self.observation_normalizer is None else self.observation_normalizer(observations)

    def _denormalized(self, values: Tensor) -> Tensor:
        return values if self.value_normalizer is None else self.value_normalizer.denormalize(values)

    def _normalize_in_place(self) -> None:
        """The rollout's observations as the policy saw them; the normalizer learns from the raw ones."""
        if self.observation_normalizer is None:
            return
        rollout = self.rollout
        normalized = self.observation_normalizer(rollout.observations)
        self.observation_normalizer.update(rollout.observations[:-1], rollout.valid)
        rollout.observations.copy_(normalized)
