"""Plain torch at its best: network and loss compiled, all optimizer steps of a PPO update in one CUDA graph.

It does nothing else: no step is withheld, nothing is reported.
"""

from __future__ import annotations

import torch
from torch import nn

from scripts.update_problems import FixedBatch, Problem
from scripts.update_variants import Update, set_precision
from trainer import losses
from trainer.config import PPOConfig
from trainer.policy import ActorCritic
from trainer.ppo_objective import Batch, Objective


def plain_update(problem: Problem, batch: FixedBatch, precision: str, config: PPOConfig) -> Update:
    """`trainer.ppo_objective.Objective` in torch, compiled, then torch's own clipping and fused Adam."""
    autocast_dtype = set_precision(precision)
    rollout, estimate = batch
    device = rollout.rewards.device
    policy = problem.policy(ActorCritic, autocast_dtype, str(device))
    flat = Batch.of(rollout)
    flat.values.copy_(rollout.values[:-1].flatten())
    flat.advantages.copy_(losses.standardize(estimate.advantages, estimate.advantage_moments).flatten())
    flat.value_targets.copy_(estimate.value_targets.flatten())
    solve = torch.compile(Objective(policy, config, "torch").__call__, dynamic=False)
    optimizer = torch.optim.Adam(
        policy.parameters(), config.learning_rate, eps=config.adam_eps, fused=True, capturable=True
    )  # fmt: skip
    count = torch.tensor(problem.rows / config.num_minibatches, device=device)

    def update() -> None:
        for _ in range(config.update_epochs):
            for indices in torch.randperm(problem.rows, device=device).chunk(config.num_minibatches):
                optimizer.zero_grad(set_to_none=True)
                solve(flat, indices, count)[0].backward()
                nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
                optimizer.step()

    before = [x.detach().clone() for x in policy.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()  # compiles, makes workspaces and the optimizer's state
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    with torch.no_grad():  # as if nothing had been done yet
        for x, start in zip(policy.parameters(), before, strict=True):
            x.copy_(start)
        for state in optimizer.state.values():
            for x in state.values():
                x.zero_()
    return Update(graph.replay, dict(policy.named_parameters()), keeps=(flat, count, update))
