"""A scripted env with known transitions, and the trainer's parts around it, for tests of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np
import torch
from torch import Tensor

from envs.actions import ActionMap
from envs.base import StepResult, VecEnv
from trainer.collector import Collector
from trainer.config import CreditConfig, PolicyConfig, PPOConfig
from trainer.estimator import Estimate, Estimator, estimate
from trainer.graphs import Graphs
from trainer.normalize import ObservationNormalizer, ValueNormalizer, moments
from trainer.policy import Action, ActorCritic, Outputs
from trainer.ppo import PPO
from trainer.rollout import Rollout

CPU = torch.device("cpu")
OBSERVATION_SIZE = 3
Policy = TypeVar("Policy", bound=ActorCritic)


class Script(NamedTuple):
    """What the env will give, row by row, whatever it is sent."""

    observations: Tensor  #: ``[S + 1, N, D]``
    rewards: Tensor  #: ``[S, N]``
    terminated: Tensor
    truncated: Tensor
    valid: Tensor

    @property
    def bootstrapped_from_final(self) -> Tensor:
        """The filler rows after a truncation: their value is V(final observation)."""
        before = torch.cat([torch.zeros_like(self.truncated[:1]), self.truncated[:-1]])
        return before & ~self.valid


def random_script(length: int, num_envs: int, seed: int = 0, end_rate: float = 0.25) -> Script:
    """Episodes of random lengths that terminate or are truncated, each followed by its filler row."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.zeros(3, length, num_envs, dtype=torch.bool)
    terminated, truncated, valid = flags
    ended = torch.zeros(num_envs, dtype=torch.bool)
    for t in range(length):
        valid[t] = ~ended
        ended = ~ended & (torch.rand(num_envs, generator=generator) < end_rate)
        terminated[t] = ended & (torch.rand(num_envs, generator=generator) < 0.5)
        truncated[t] = ended & ~terminated[t]
    rewards = torch.randn(length, num_envs, generator=generator)
    observations = torch.randn(length + 1, num_envs, OBSERVATION_SIZE, generator=generator)
    return Script(observations, torch.where(valid, rewards, 0.0), terminated, truncated, valid)


class ScriptedEnv(VecEnv):
    """Plays a script in one or more pools, records the actions, and spoils a result once its pool's next one is out."""

    id, engine, device = "Scripted-v0", "scripted", CPU

    def __init__(self, script: Script, action_space: gymnasium.Space | None = None, num_pools: int = 1) -> None:
        self.script = script
        self.num_envs = script.rewards.shape[1]
        shape = tuple(script.observations.shape[2:])
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape)
        self.single_action_space = action_space or gymnasium.spaces.Discrete(3)
        bounds = torch.arange(self.num_envs).tensor_split(num_pools)
        self.pools = tuple(slice(int(columns[0]), int(columns[-1]) + 1) for columns in bounds)
        self._time = [0] * num_pools
        self._last: list[StepResult | None] = [None] * num_pools
        self.sent: list[list[Tensor]] = [[] for _ in range(num_pools)]

    @classmethod
    def known_ids(cls) -> Sequence[str]:
        return (cls.id,)

    @property
    def actions(self) -> Tensor:
        """``[rows, N, *action_shape]``, all that was sent."""
        return torch.cat([torch.stack(rows) for rows in self.sent], dim=1)

    def reset(self) -> Tensor:
        self._time = [0] * len(self.pools)
        return self.script.observations[0].clone()

    def send(self, pool: int, actions: Tensor) -> None:
        self.sent[pool].append(actions.clone())

    def recv(self, pool: int) -> StepResult:
        t, columns, script = self._time[pool], self.pools[pool], self.script
        self._time[pool] += 1
        last = self._last[pool]
        if last is not None:
            last.observations.zero_()
            last.rewards.fill_(torch.nan)
        rows = (script.observations[t + 1], script.rewards[t], script.terminated[t], script.truncated[t])
        result = StepResult(*(row[columns].clone() for row in (*rows, script.valid[t])))
        self._last[pool] = result
        return result

    def reseed(self, epoch: int) -> None:
        pass

    def close(self) -> None:
        pass


class ModePolicy(ActorCritic):
    """Acts without randomness, so that the order of its calls does not matter."""

    def act(
        self,
        observations: Tensor,
        state: Tensor | None = None,
        valid: Tensor | None = None,
        deterministic: bool = True,
    ) -> Action:
        return super().act(observations, state, valid, deterministic)


def make_policy(env: VecEnv, seed: int = 0, kind: type[Policy] = ActorCritic, core: str = "none") -> Policy:
    torch.manual_seed(seed)
    config = PolicyConfig(hidden_sizes=[8], activation="tanh", core=core, core_size=5)
    return kind(env.single_observation_space, env.single_action_space, config)


def make_collector(
    env: VecEnv,
    policy: ActorCritic,
    rollout_length: int,
    observation_normalizer: ObservationNormalizer | None = None,
    value_normalizer: ValueNormalizer | None = None,
    graphs: Graphs | None = None,
) -> Collector:
    action_map = ActionMap(env.single_action_space, "clip")
    normalizers = (observation_normalizer, value_normalizer)
    return Collector(env, policy, *normalizers, action_map, rollout_length, graphs or Graphs())


def collect(script: Script, policy: ActorCritic | None = None) -> Rollout:
    """One rollout over the whole script."""
    env = ScriptedEnv(script)
    return make_collector(env, policy or make_policy(env), len(script.rewards)).collect()


class WatchedPolicy(ActorCritic):
    """Notes the rows of each minibatch, and the parameters with which they were evaluated."""

    def __init__(self, *spaces_and_config: Any) -> None:
        super().__init__(*spaces_and_config)
        self.watchers: list[Callable[[Tensor], None]] = []

    def outputs(self, observations: Tensor, *rest: Tensor | None) -> Outputs:
        for watch in self.watchers:
            watch(observations)
        return super().outputs(observations, *rest)


class PPOCase:
    """A policy, a rollout of it, and PPO with settings; all from one seed."""

    def __init__(
        self,
        script: Script,
        space: gymnasium.Space | None = None,
        value_normalizer: bool = False,
        core: str = "none",
        **options: Any,
    ) -> None:
        env = ScriptedEnv(script, space or gymnasium.spaces.Box(-1, 1, (2,)))
        self.policy = make_policy(env, kind=WatchedPolicy, core=core)
        self.rollout = make_collector(env, self.policy, len(script.rewards)).collect()
        self.value_normalizer = ValueNormalizer() if value_normalizer else None
        config = PPOConfig(**{"learning_rate": 1e-2, "lr_schedule": "constant", **options})
        self.ppo = PPO(
            self.policy, self.value_normalizer, lambda *rollout: self.assign_credit(*rollout), config, Graphs()
        )
        self.estimate = estimate(self.rollout, self.rollout.rewards, CreditConfig(), "torch")
        self.assign_credit: Estimator = lambda *_: self.estimate
        self.batches: list[Tensor] = []
        self.snapshots: list[dict[str, Tensor]] = []
        self.policy.watchers.append(self._note)

    def _note(self, observations: Tensor) -> None:
        self.batches.append(observations.clone())
        self.snapshots.append(self.state())

    def state(self) -> dict[str, Tensor]:
        """Parameters and the optimizer's moments and step count, copied."""
        tensors = {**dict(self.policy.named_parameters()), **self.ppo.optimizer.state_dict()}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def update(self, seed: int = 0, progress: float = 0.0) -> dict[str, float]:
        torch.manual_seed(seed)
        return {name: float(x) for name, x in self.ppo.update(self.rollout, self.rollout.rewards, progress).items()}

    def number_rows(self) -> None:
        """Give every row an observation of its own: its number, from 1; filler becomes 0."""
        numbers = 1.0 + torch.arange(self.rollout.valid.numel())
        self.rollout.observations[:-1] = numbers.view(*self.rollout.valid.shape, 1)

    def set_advantages(self, advantages: Tensor) -> None:
        flat = moments(advantages.flatten(), self.rollout.valid.flatten())
        self.estimate = Estimate(advantages, self.estimate.value_targets, flat)
