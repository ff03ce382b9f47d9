"""A learner over a scripted rollout, for tests of IMPALA's update."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import torch
from fake_env import CPU, Script, ScriptedEnv, make_collector, make_policy
from torch import Tensor

from trainer.config import CreditConfig, ImpalaConfig
from trainer.graphs import Graphs
from trainer.impala import Impala
from trainer.normalize import ObservationNormalizer, ValueNormalizer
from trainer.off_policy import make_estimator
from trainer.policy import ActorCritic
from trainer.q_policy import QActorCritic
from trainer.timing import PhaseClock

DISCRETE = gymnasium.spaces.Discrete(3)
BOX = gymnasium.spaces.Box(-1, 1, (2,))
SETTINGS: dict[str, Any] = {
    "optimizer": "adam",
    "learning_rate": 1e-2,
    "lr_schedule": "constant",
    "entropy_coef": 0.02,
    "max_grad_norm": 1e9,
}


def make_learner(
    policy: ActorCritic,
    credit: CreditConfig,
    value_normalizer: ValueNormalizer | None = None,
    observation_normalizer: ObservationNormalizer | None = None,
    loss_backend: Literal["torch", "triton"] = "torch",
    **settings: Any,
) -> Impala:
    config = ImpalaConfig(**{**SETTINGS, **settings})
    denormalize = value_normalizer.denormalize if value_normalizer else torch.Tensor.float
    estimator = make_estimator(policy, denormalize, credit, "torch", config.correction)
    return Impala(
        policy, observation_normalizer, value_normalizer, estimator, config, Graphs(PhaseClock(CPU)), loss_backend
    )


class LearnerCase:
    """A policy, a rollout that an older policy collected, and a learner; all from one seed."""

    def __init__(
        self,
        script: Script,
        space: gymnasium.Space[Any] = DISCRETE,
        credit: CreditConfig | None = None,
        value_normalizer: ValueNormalizer | None = None,
        observation_normalizer: ObservationNormalizer | None = None,
        drift: float = 0.3,
        core: str = "none",
        **settings: Any,
    ) -> None:
        self.credit = credit or CreditConfig(estimator="vtrace", gamma=0.9)
        env = ScriptedEnv(script, space)
        kind = QActorCritic if self.credit.estimator == "retrace" else ActorCritic
        self.policy = make_policy(env, kind=kind, core=core)
        self.rollout = make_collector(env, self.policy, len(script.rewards)).collect()
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += drift * torch.randn_like(parameter)
        self.value_normalizer, self.observation_normalizer = value_normalizer, observation_normalizer
        self.learner = make_learner(self.policy, self.credit, value_normalizer, observation_normalizer, **settings)

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.policy.named_parameters()}

    def update(self, progress: float = 0.0) -> dict[str, float]:
        torch.manual_seed(3)
        statistics = self.learner.update(self.rollout, self.rollout.rewards, progress)
        return {name: float(value) for name, value in statistics.items()}


def independent_policy(case: LearnerCase) -> torch.distributions.Distribution:
    """The present policy over rows 0 .. T-1, from torch's own distributions."""
    outputs = case.policy.actor(case.rollout.observations[:-1].flatten(2))
    if case.policy.log_std is None:
        return torch.distributions.Categorical(logits=outputs)
    return torch.distributions.Independent(torch.distributions.Normal(outputs, case.policy.log_std.exp()), 1)


def gradient_of(case: LearnerCase, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a loss in the case's parameters."""
    names, parameters = zip(*case.policy.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, gradients, strict=True)}


class KeptGradients(torch.optim.Optimizer):
    """Notes every gradient, and descends it."""

    def __init__(self, policy: ActorCritic, lr: float) -> None:
        super().__init__(policy.parameters(), {"lr": lr})
        self._policy, self._lr = policy, lr
        self.kept: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = {}
        for name, parameter in self._policy.named_parameters():
            gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            parameter -= self._lr * gradients[name]
        self.kept.append(gradients)
