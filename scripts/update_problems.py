"""The fixed batches of `bench_update`: a policy, a rollout that it collected from noise, and the credit of it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from trainer.config import PolicyConfig, PPOConfig
from trainer.estimator import Estimate
from trainer.normalize import moments
from trainer.policy import ActorCritic
from trainer.rollout import Rollout


class Problem(NamedTuple):
    """One batch and the networks that are trained on it."""

    steps: int
    envs: int
    observations: int
    actions: int
    is_discrete: bool
    hidden_sizes: tuple[int, ...]
    update_epochs: int
    num_minibatches: int

    @property
    def rows(self) -> int:
        """Of the batch."""
        return self.steps * self.envs

    @property
    def optimizer_steps(self) -> int:
        """Of one update."""
        return self.update_epochs * self.num_minibatches

    def ppo(self) -> PPOConfig:
        """Settings that any PPO has: constant learning rate, clipped value loss, entropy bonus."""
        return PPOConfig(
            lr_schedule="constant", value_coef=2.0, entropy_coef=0.01, update_epochs=self.update_epochs,
            num_minibatches=self.num_minibatches,
        )  # fmt: skip

    def policy(self, kind: type[ActorCritic], autocast_dtype: torch.dtype | None, device: str) -> ActorCritic:
        """Networks of the same initial parameters for every call."""
        torch.manual_seed(0)
        box = gymnasium.spaces.Box(-np.inf, np.inf, (self.observations,), np.float32)
        continuous = gymnasium.spaces.Box(-1.0, 1.0, (self.actions,), np.float32)
        choices = gymnasium.spaces.Discrete(self.actions) if self.is_discrete else continuous
        return kind(box, choices, PolicyConfig(hidden_sizes=list(self.hidden_sizes)), autocast_dtype).to(device)

    def parameters(self) -> int:
        """Weights and biases of both networks."""
        return sum(x * y + y for outputs in (self.actions, 1) for x, y in self.layers(outputs))

    def layers(self, outputs: int) -> list[tuple[int, int]]:
        """Inputs and outputs of one network's layers."""
        sizes = [self.observations, *self.hidden_sizes, outputs]
        return list(itertools.pairwise(sizes))


#: `ant`: the common setting for 4096 Ants. `small`: 65536 rows, one epoch. `wide`: bound by its matrix products.
PROBLEMS = {
    "ant": Problem(16, 4096, 60, 8, False, (256, 128, 64), 4, 2),
    "small": Problem(32, 2048, 4, 2, True, (64, 64), 1, 4),
    "wide": Problem(128, 4096, 60, 8, False, (1024, 1024), 4, 4),
}


class FixedBatch(NamedTuple):
    """A rollout and what credit assignment made of it; every row counts."""

    rollout: Rollout
    estimate: Estimate


def fixed_batch(problem: Problem, device: str) -> FixedBatch:
    """Noise for observations, actions and log-probs of the initial policy, advantages and targets near its values."""
    policy = problem.policy(ActorCritic, None, device)
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    steps, envs = problem.steps, problem.envs
    rollout = Rollout.allocate(
        steps, envs, (problem.observations,), torch.float32, policy.action_shape, policy.action_dtype,
        torch.device(device),
    )  # fmt: skip
    rollout.observations.copy_(noise(steps + 1, envs, problem.observations))
    rollout.valid.fill_(True)
    with torch.no_grad():
        for step in range(steps):
            act = policy.act(rollout.observations[step])
            rollout.actions[step], rollout.log_probs[step], rollout.values[step] = (
                act.actions,
                act.log_probs,
                act.values,
            )
        rollout.log_probs += 0.05 * noise(steps, envs)  # so that some ratios leave the clip range
        rollout.values[-1] = policy.value(rollout.observations[-1])
    advantages = noise(steps, envs)
    targets = rollout.values[:-1] + advantages + 0.5  # a critic that lags: its gradients are more than noise
    return FixedBatch(rollout, Estimate(advantages, targets, moments(advantages.flatten(), rollout.valid.flatten())))
