"""One credit call per rollout: the configured estimator, as advantages and value targets for any algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from kernels.operations import Backend
from trainer.config import ConfigError, CreditConfig
from trainer.normalize import moments
from trainer.rollout import Rollout


class Estimate(NamedTuple):
    """What credit assignment gives to an update."""

    advantages: Tensor  #: ``[T, N]`` float32, 0 in filler rows
    value_targets: Tensor  #: ``[T, N]`` float32, 0 in filler rows
    advantage_moments: Tensor  #: ``[3]``: count, mean and M2 of the valid advantages on this rank


#: Credit of a rollout and its rewards ``[T, N]``, with a configuration's settings.
Estimator = Callable[[Rollout, Tensor], Estimate]


def resolve_backend(config: CreditConfig, device: torch.device) -> Backend:
    """The backend that ``auto`` means on this device.

    Raises:
        ConfigError: ``triton`` was asked for where it cannot run.
    """
    if config.backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if config.backend == "triton" and device.type != "cuda":
        raise ConfigError(
            f"credit.backend=triton needs device=cuda, but this run is on {device.type}; use credit.backend=auto"
        )
    return "triton" if config.backend == "triton" else "torch"


def estimate(rollout: Rollout, rewards: Tensor, config: CreditConfig, backend: Backend) -> Estimate:
    """Advantages and value targets of a rollout, by ``config.estimator``.

    Args:
        rollout: its values, flags and log-probs are read in place.
        rewards: ``[T, N]``, the rollout's own or normalized ones.
        config: which estimator, with its coefficients.
        backend: ``triton`` or ``torch``.
    """
    values, last_value = rollout.values[:-1], rollout.last_value
    ends = (rollout.terminated, rollout.truncated)
    common: dict[str, Any] = {
        "valid": rollout.valid, "gamma": config.gamma, "backend": backend, "torch_mode": config.torch_mode,
    }  # fmt: skip
    if config.estimator == "gae":
        credit = kernels.gae(rewards, values, last_value, *ends, gae_lambda=config.gae_lambda, moments=True, **common)
        return Estimate(credit.advantages, credit.value_targets, credit.moments)
    if config.estimator == "vtrace":  # on-policy here: behaviour and target policy are the same
        trace = kernels.vtrace(
            rollout.log_probs, rollout.log_probs, rewards, values, last_value, *ends,
            vtrace_lambda=config.vtrace_lambda, rho_bar=config.rho_bar, c_bar=config.c_bar,
            pg_rho_bar=config.pg_rho_bar, moments=True, **common,
        )  # fmt: skip
        return Estimate(trace.pg_advantages, trace.value_targets, trace.moments)
    if config.estimator == "td_lambda":
        targets = kernels.td_lambda(rewards, values, last_value, *ends, td_lambda=config.td_lambda, **common)
    else:
        # V of the true successor: the final observation is the policy's input one row later
        successors = rollout.values[1:]
        targets = kernels.discounted_returns(rewards, last_value, *ends, bootstrap_values=successors, **common)
    advantages = torch.where(rollout.valid, targets - values, 0.0)
    return Estimate(advantages, targets, moments(advantages.flatten(), rollout.valid.flatten()))
