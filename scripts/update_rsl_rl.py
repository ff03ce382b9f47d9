"""The same PPO update by rsl_rl (https://github.com/leggedrobotics/rsl_rl), where it can be imported."""

from __future__ import annotations

import importlib

import torch

from scripts.update_problems import FixedBatch, Problem
from scripts.update_variants import Update, set_precision
from trainer import losses
from trainer.config import PPOConfig
from trainer.policy import ActorCritic


def has_rsl_rl() -> bool:
    """Whether rsl_rl and what it needs can be imported."""
    try:
        importlib.import_module("rsl_rl.algorithms")
    except ImportError:
        return False
    return True


def rsl_rl_update(problem: Problem, batch: FixedBatch, precision: str, config: PPOConfig) -> Update:
    """`rsl_rl.algorithms.PPO` on the same rows, parameters and settings.

    It clips the gradients of actor and critic apart, which is the same update where nothing is clipped.
    """
    from rsl_rl.algorithms import PPO as RslPPO  # pyright: ignore[reportMissingImports]
    from rsl_rl.models import MLPModel  # pyright: ignore[reportMissingImports]
    from rsl_rl.storage import RolloutStorage  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    autocast_dtype = set_precision(precision)
    rollout, estimate = batch
    device = str(rollout.rewards.device)
    observations = TensorDict({"policy": rollout.observations[0]}, [problem.envs], device)
    common = {
        "obs": observations, "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "hidden_dims": list(problem.hidden_sizes), "activation": "elu",
    }  # fmt: skip
    gaussian = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    actor = MLPModel(obs_set="actor", output_dim=problem.actions, distribution_cfg=gaussian, **common).to(device)
    critic = MLPModel(obs_set="critic", output_dim=1, **common).to(device)
    policy = problem.policy(ActorCritic, None, device)
    actor.mlp.load_state_dict(policy.actor.state_dict())
    critic.mlp.load_state_dict(policy.critic.state_dict())

    storage = RolloutStorage("rl", problem.envs, problem.steps, observations, [problem.actions], device)
    storage.observations["policy"].copy_(rollout.observations[:-1])
    storage.actions.copy_(rollout.actions)
    storage.values.copy_(rollout.values[:-1, :, None])
    storage.actions_log_prob.copy_(rollout.log_probs[:, :, None])
    storage.returns.copy_(estimate.value_targets[:, :, None])
    storage.advantages.copy_(losses.standardize(estimate.advantages, estimate.advantage_moments)[:, :, None])
    with torch.no_grad():
        means = policy.distribution(rollout.observations[:-1].flatten(0, 1)).mode().view_as(rollout.actions)
    storage.distribution_params = (means, torch.ones_like(means))
    ppo = RslPPO(
        actor, critic, storage, config.update_epochs, config.num_minibatches, config.clip_range,
        value_loss_coef=config.value_coef / 2, entropy_coef=config.entropy_coef, learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm, schedule="fixed", use_mixed_precision=autocast_dtype is not None,
        device=device,
    )  # fmt: skip
    ppo.optimizer.param_groups[0]["eps"] = config.adam_eps
    networks = {"actor": actor.mlp, "critic": critic.mlp}
    named = {f"{name}.{key}": x for name, network in networks.items() for key, x in network.named_parameters()}
    return Update(ppo.update, {**named, "log_std": next(actor.distribution.parameters())})
