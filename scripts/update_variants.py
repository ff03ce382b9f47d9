"""Ways to do the same PPO update: our trainer under each of its switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.update_problems import FixedBatch, Problem
from trainer.config import PPOConfig
from trainer.graphs import Graphs
from trainer.policy import ActorCritic
from trainer.ppo import PPO
from trainer.twin_policy import MAX_WIDTH, TwinActorCritic

#: What `--precisions` may name: autocast of the networks, and torch's setting for float32 products.
PRECISIONS: dict[str, tuple[torch.dtype | None, str]] = {
    "fp32": (None, "highest"),
    "tf32": (None, "high"),
    "bf16": (torch.bfloat16, "high"),
}


class Variant(NamedTuple):
    """Switches of our trainer."""

    graphs: bool
    fused_loss: bool
    compiled: bool = False
    twin: bool = False

    def runs(self, problem: Problem, device: str) -> bool:
        """Whether there is such an update."""
        on_gpu = device == "cuda" or not (self.graphs or self.fused_loss or self.twin)
        return on_gpu and not (self.twin and max(problem.hidden_sizes) > MAX_WIDTH)


VARIANTS = {
    "eager": Variant(False, False),
    "graph": Variant(True, False),
    "graph, fused loss": Variant(True, True),
    "graph, fused loss, compiled": Variant(True, True, compiled=True),
    "graph, fused loss, twin networks": Variant(True, True, twin=True),
}


class Update(NamedTuple):
    """One update on a fixed batch, and the parameters that it trains, by name."""

    run: Callable[[], Any]
    parameters: dict[str, Tensor]
    keeps: Any = None  #: holds memory that ``run`` reads, as a CUDA graph does not


def set_precision(precision: str) -> torch.dtype | None:
    """Set how torch multiplies float32; returns the networks' dtype under autocast."""
    autocast_dtype, matmul_precision = PRECISIONS[precision]
    torch.set_float32_matmul_precision(matmul_precision)
    return autocast_dtype


def ours(problem: Problem, batch: FixedBatch, variant: Variant, precision: str, config: PPOConfig) -> Update:
    """`trainer.ppo.PPO` under the variant's switches."""
    autocast_dtype = set_precision(precision)
    device = str(batch.rollout.rewards.device)
    policy = problem.policy(TwinActorCritic if variant.twin else ActorCritic, autocast_dtype, device)
    ppo = PPO(
        policy, None, lambda *_: batch.estimate, config, Graphs(enabled=variant.graphs),
        "triton" if variant.fused_loss else "torch", variant.compiled,
    )  # fmt: skip
    return Update(lambda: ppo.update(batch.rollout, batch.rollout.rewards, 0.0), dict(policy.named_parameters()))
