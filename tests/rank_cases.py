"""What each of two ranks does for the tests of `trainer.distributed`: agreements, episode statistics, updates."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fake_env import CPU, Script, ScriptedEnv, make_collector, make_policy, random_script
from impala_cases import make_learner

from trainer import distributed, losses
from trainer.config import CreditConfig, PPOConfig
from trainer.episodes import EpisodeTracker
from trainer.estimator import estimate
from trainer.graphs import Graphs
from trainer.normalize import ObservationNormalizer, RunningMoments, ValueNormalizer, moments
from trainer.policy import ActorCritic
from trainer.ppo import PPO
from trainer.rollout import Rollout

RANKS = 2
Result = dict[str, Any]


def columns(script: Script, rank: int) -> Script:
    """The script's envs of one rank: 3 and 5 of 8, so that ranks have unlike numbers of rows."""
    return Script(*(tensor.split([3, 5], dim=1)[rank] for tensor in script))


def collected(script: Script) -> tuple[ActorCritic, Rollout]:
    env = ScriptedEnv(script)
    policy = make_policy(env)
    rollout = make_collector(env, policy, len(script.rewards)).collect()
    rollout.actions.copy_((10 * script.observations[:-1, :, 0].abs()).long() % 3)  # the same however envs are split
    observations = rollout.observations[:-1].flatten(0, 1)
    log_probs = policy.distribution(observations).log_prob(rollout.actions.flatten())
    rollout.log_probs.copy_(log_probs.detach().view_as(rollout.log_probs))
    return policy, rollout


def update(
    policy: ActorCritic, rollout: Rollout, normalizer: ValueNormalizer | None = None, seed: int = 0, **options: Any
) -> Result:
    """One update; all metrics, and the parameters and number of steps afterwards."""
    config = PPOConfig(**{"learning_rate": 1e-2, "lr_schedule": "constant", **options})
    estimator = partial(estimate, config=CreditConfig(), backend="torch")
    ppo = PPO(policy, normalizer, estimator, config, Graphs())
    torch.manual_seed(seed)
    metrics = ppo.update(rollout, rollout.rewards, 0.0)
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "parameters": torch.nn.utils.parameters_to_vector(policy.parameters()).detach(),
        "steps": float(ppo.optimizer.moments.steps),
    }


SCRIPT = random_script(9, 8, seed=2)


TARGETS, NOISE = 100 + torch.arange(8.0), 0.3 * torch.tensor([1.0, -1.0]).repeat(4)


def primitives(rank: int) -> Result:
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    untouched = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((2, 3), 1.0 + rank)
    report = torch.tensor([10.0, 20.0]) * (rank + 1)
    distributed.sum_gradients_([parameter, untouched], report)
    distributed.broadcast_parameters_([parameter])
    return {
        "rank": (distributed.rank(), distributed.world_size()),
        "sum": distributed.sum_(torch.tensor([1.0, 10.0]) * (rank + 1)).tolist(),
        "gradient": parameter.grad,
        "report": report.tolist(),
        "parameter": parameter.detach(),
        "any": [distributed.any_rank(flag, CPU) for flag in (False, rank == 1, True)],
        "explained": losses.explained_variance(TARGETS + NOISE, TARGETS, torch.full((8,), rank == 0)),
    }


def merged_moments(rank: int) -> Result:
    script = columns(SCRIPT, rank)
    rows, valid = script.observations[:-1].flatten(0, 1) + 1e4, script.valid.flatten()
    running = RunningMoments((3,))
    for part, mask in zip(rows.tensor_split(3), valid.tensor_split(3), strict=True):
        running.update(part, mask)
    return {
        "merged": distributed.merge_moments(moments(rows, valid)),
        "running": torch.stack([running.count.expand(3), running.mean, running.m2]),
    }


def episodes(rollout: Rollout) -> Result:
    """Twice the same window, as of one update and the next."""
    tracker = EpisodeTracker(rollout.valid.shape[1], 1000, "torch", CPU)
    for _ in range(2):
        tracker.record(tracker.follow(rollout))
        statistics = tracker.statistics()
    return statistics._asdict()


def on_policy(policy: ActorCritic, rollout: Rollout) -> Result:
    return update(policy, rollout, ValueNormalizer(), num_minibatches=1, update_epochs=3, lr_schedule="adaptive")


def whole_batch(rank: int) -> Result:
    return on_policy(*collected(columns(SCRIPT, rank)))


def off_policy(policy: ActorCritic, rollout: Rollout) -> Result:
    """Two updates of IMPALA with everything that ranks merge: gradients, advantage moments, both normalizers."""
    normalizers = ValueNormalizer(), ObservationNormalizer((3,), clip=10.0)
    learner = make_learner(
        policy, CreditConfig(estimator="vtrace"), *normalizers, update_epochs=2, normalize_advantages=True
    )
    for _ in range(2):
        metrics = learner.update(rollout, rollout.rewards, 0.0)
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "parameters": torch.nn.utils.parameters_to_vector(policy.parameters()).detach(),
        "steps": float(learner.optimizer.state_dict()["state"][0]["step"]),
    }


def with_kls(kls: tuple[float, float]) -> Callable[[int], Result]:
    """Every row of a rank has the same log-ratio at first, of the KL that is asked for."""

    def run(rank: int) -> Result:
        policy, rollout = collected(random_script(6, 4, seed=rank, end_rate=0.0))
        log_ratio = torch.tensor(kls[rank]).mul(2).sqrt()
        for _ in range(20):  # Newton: exp(x) - 1 - x = kl
            log_ratio -= (log_ratio.expm1() - log_ratio - kls[rank]) / log_ratio.expm1()
        rollout.log_probs -= log_ratio
        return update(policy, rollout, target_kl=0.04, update_epochs=4, num_minibatches=2, seed=rank)

    return run


def drifting(rank: int) -> Result:
    """Updates large enough to pass the threshold halfway."""
    policy, rollout = collected(random_script(6, 4, seed=rank, end_rate=0.0))
    return update(policy, rollout, target_kl=0.01, learning_rate=3e-2, update_epochs=4, num_minibatches=2, seed=rank)


def nan_on(broken: int) -> Callable[[int], Result]:
    """One log-prob of one rank is NaN, in its second minibatch."""

    def run(rank: int) -> Result:
        policy, rollout = collected(random_script(6, 4, seed=rank, end_rate=0.0))
        torch.manual_seed(rank)  # as the update does, to know its first order
        row = torch.randperm(24).tensor_split(2)[1][0]
        if rank == broken:
            rollout.log_probs.view(-1)[row] = torch.nan
        return update(policy, rollout, update_epochs=4, num_minibatches=2, seed=rank)

    return run


SCENARIOS: dict[str, Callable[[int], Result]] = {
    "primitives": primitives,
    "moments": merged_moments,
    "episodes": lambda rank: episodes(collected(columns(SCRIPT, rank))[1]),
    "whole batch": whole_batch,
    "off policy": lambda rank: off_policy(*collected(columns(SCRIPT, rank))),
    "kls": with_kls((0.01, 0.09)),
    "kls swapped": with_kls((0.09, 0.01)),
    "kls below": with_kls((0.01, 0.03)),
    "drift": drifting,
    "nan 0": nan_on(0),
    "nan 1": nan_on(1),
}


def work(rank: int, port: int, folder: str) -> None:
    os.environ.update(WORLD_SIZE=str(RANKS), RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.initialize("cpu")
    torch.save({name: run(rank) for name, run in SCENARIOS.items()}, Path(folder) / f"{rank}.pt")
    distributed.shutdown()
