"""An actor-critic whose two networks are evaluated side by side by fused kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kernels import twin_mlp
from kernels.twin_mlp import Activation, Linear, Precision
from trainer.config import PolicyConfig
from trainer.policy import ActorCritic, Outputs

#: Wider hidden layers are bound by their products, at which the vendor's library is better.
MAX_WIDTH = 512


class TwinActorCritic(ActorCritic):
    """`ActorCritic` over vectors, without a core: `outputs` launches each layer once for both networks.

    State dictionaries are interchangeable, results differ by rounding. Without autocast products follow
    ``torch.set_float32_matmul_precision``: tf32, or under ``highest`` all 24 bits.
    """

    def outputs(self, observations: Tensor, state: Tensor | None = None, valid: Tensor | None = None) -> Outputs:
        """Actor and critic over the same observations."""
        features, _ = self._features(observations, state, valid)
        twin = twin_mlp(
            features.flatten(0, -2), _linears(self.actor), _linears(self.critic),
            activation=cast(Activation, self.activation), precision=self._precision(),
        )  # fmt: skip
        batch = features.shape[:-1]
        return Outputs(twin.first.view(*batch, -1), self._bounded_log_std(), twin.second.view(batch), None)

    def _precision(self) -> Precision:
        if self._autocast_dtype is not None:
            return "bfloat16"
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def twin_obstacle(config: PolicyConfig, device: torch.device) -> str | None:
    """Why `TwinActorCritic` cannot stand for `ActorCritic`, or should not; None where it can."""
    if device.type != "cuda":
        return f"needs device=cuda, but this run is on {device.type}"
    if config.torso != "mlp" or config.core != "none":
        return f"takes vectors without a core, not policy.torso={config.torso} policy.core={config.core}"
    if max(config.hidden_sizes, default=0) > MAX_WIDTH:
        return f"takes hidden layers of up to {MAX_WIDTH}, not policy.hidden_sizes={config.hidden_sizes}"
    return None


def _linears(network: nn.Sequential) -> list[Linear]:
    return [(layer.weight, layer.bias) for layer in network if isinstance(layer, nn.Linear)]
