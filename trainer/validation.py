"""What the configuration's values may be: checked once, before any env starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import envs
from envs.actions import MODES
from trainer.config import Config, ConfigError
from trainer.keys import KEYS, get, meant
from trainer.networks import ACTIVATIONS, PIXEL_TORSOS
from trainer.recurrent import CORES

_CHOICES: dict[str, Sequence[str]] = {
    "algo": ("ppo", "impala"),
    "autocast": ("none", "bfloat16"),
    "matmul_precision": ("highest", "high"),
    "env.physics": ("rk4", "euler"),
    "policy.activation": tuple(ACTIVATIONS),
    "policy.torso": ("mlp", *PIXEL_TORSOS),
    "policy.core": ("none", *CORES),
    "policy.backend": ("auto", "triton", "torch"),
    "credit.estimator": ("gae", "vtrace", "td_lambda", "discounted", "retrace"),
    "credit.backend": ("auto", "triton", "torch"),
    "credit.torch_mode": ("auto", "loop", "scan", "compiled"),
    "ppo.lr_schedule": ("constant", "linear", "adaptive"),
    "ppo.clip_schedule": ("constant", "linear"),
    "ppo.entropy_schedule": ("constant", "linear"),
    "ppo.recompute_advantages": ("rollout", "epoch", "minibatch"),
    "loss.backend": ("auto", "triton", "torch"),
    "timing.detail": ("normal", "high"),
    "impala.optimizer": ("rmsprop", "adam"),
    "impala.lr_schedule": ("constant", "linear"),
    "impala.max_lag_action": ("drop", "block"),
    "logging.console": ("auto", "rich", "plain", "none"),
    "wandb.mode": ("offline", "online", "disabled"),
}
#: Arguments of `envs.make` that have keys of their own.
_SET_ELSEWHERE = {
    **{name: name for name in ("num_envs", "device", "seed")},
    **{name: f"env.{name}" for name in ("id", "engine", "pools", "num_threads", "timeout", "physics")},
    "max_episode_steps": "env.max_episode_steps",
    **dict.fromkeys(("rank", "world_size"), "it through torchrun"),
}
#: Where a range has no end of its own: numbers that int32 and float32 hold, products of two as well.
_LARGEST = {"int": 2**31 - 1, "float": 1e9}
_WIDEST = 2**16  #: outputs of a layer
# key: (lowest, highest, whether the lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "num_envs": (1, 2**24, True),
    "rollout_length": (1, 2**24, True),
    "total_steps": (1, 2**62, True),
    "seed": (0, 2**31 - 1, True),
    "env.pools": (0, 1024, True),
    "env.num_threads": (0, 4096, True),
    "env.timeout": (0, math.inf, False),
    "env.max_episode_steps": (1, math.inf, True),
    "env.reseed_interval": (0, math.inf, True),
    "policy.core_size": (1, _WIDEST, True),
    "policy.init_log_std": (-20, 20, True),
    "policy.min_log_std": (-20, 20, True),
    "policy.max_log_std": (-20, 20, True),
    "credit.probe_interval": (1, math.inf, True),
    "credit.gamma": (0, 1, True),
    "credit.gae_lambda": (0, 1, True),
    "credit.td_lambda": (0, 1, True),
    "credit.vtrace_lambda": (0, 1, True),
    "credit.retrace_lambda": (0, 1, True),
    "credit.rho_bar": (0, math.inf, False),
    "credit.c_bar": (0, math.inf, False),
    "credit.pg_rho_bar": (0, math.inf, False),
    "normalize.observation_clip": (0, math.inf, False),
    "normalize.reward_clip": (0, math.inf, False),
    "ppo.learning_rate": (0, math.inf, True),
    "ppo.desired_kl": (0, math.inf, False),
    "ppo.min_learning_rate": (0, math.inf, False),
    "ppo.max_learning_rate": (0, math.inf, False),
    "ppo.update_epochs": (1, 1000, True),
    "ppo.num_minibatches": (1, math.inf, True),
    "ppo.clip_range": (0, math.inf, False),
    "ppo.value_clip_range": (0, math.inf, False),
    "ppo.value_coef": (0, math.inf, True),
    "ppo.entropy_coef": (0, math.inf, True),
    "ppo.max_grad_norm": (0, math.inf, False),
    "ppo.target_kl": (0, math.inf, False),
    "ppo.adam_eps": (0, math.inf, False),
    "ppo.max_skipped_updates": (1, math.inf, True),
    "impala.learning_rate": (0, math.inf, True),
    "impala.rmsprop_decay": (0, 1, True),
    "impala.rmsprop_eps": (0, math.inf, False),
    "impala.adam_eps": (0, math.inf, False),
    "impala.rollouts_per_update": (0, 1024, True),
    "impala.num_minibatches": (1, math.inf, True),
    "impala.update_epochs": (1, 1000, True),
    "impala.clip_range": (0, math.inf, False),
    "impala.value_coef": (0, math.inf, True),
    "impala.entropy_coef": (0, math.inf, True),
    "impala.max_grad_norm": (0, math.inf, False),
    "impala.queue_size": (0, 1024, True),
    "impala.max_lag": (0, math.inf, True),
    "impala.force_lag": (0, 1024, True),
    "impala.max_skipped_updates": (1, math.inf, True),
    "checkpoint.interval_seconds": (0, math.inf, False),
    "checkpoint.interval_updates": (0, math.inf, True),
    "logging.plain_interval": (0, math.inf, True),
    "logging.episode_window": (1, 10**6, True),
}


def _check_choice(config: Config, key: str, choices: Sequence[str]) -> None:
    value = get(config, key)
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}{meant(str(value), choices)}")


def _check_range(config: Config, key: str, low: float, high: float, low_allowed: bool) -> None:
    value = get(config, key)
    if value is None:  # optional keys
        return
    largest = _LARGEST[KEYS[key].type.partition(" | ")[0]] if math.isinf(high) else high
    if not math.isfinite(value) or value > largest or value < low or (value == low and not low_allowed):
        relation = "at least" if low_allowed else "greater than"
        limit = f" and at most {largest:.0e}" if isinstance(largest, float) else f" and at most {largest}"
        raise ConfigError(f"{key}={value} must be {'' if math.isfinite(value) else 'finite, '}{relation} {low}{limit}")


def allowed(key: str) -> str:
    """What the value of a key may be, in a few words: its choices, or its type and range."""
    choices = _choices().get(key)
    if choices:
        return ", ".join(choices)
    kind, _, optional = KEYS[key].type.partition(" | ")
    low, high, low_allowed = _RANGES.get(key, (-math.inf, math.inf, True))
    if low > -math.inf:
        kind += f" {'from' if low_allowed else 'above'} {low}" + ("" if math.isinf(high) else f" to {high}")
    return f"{kind}, or null" if optional else kind


def _choices() -> dict[str, Sequence[str]]:
    """The values that a key may have; engines may be one's own."""
    return {**_CHOICES, "env.engine": tuple(envs.ENGINES), "env.action_map": MODES}


def validate(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigError: one line that names the key, its value and what would be right.
    """
    for key, choices in _choices().items():
        _check_choice(config, key, choices)
    for key, (low, high, low_allowed) in _RANGES.items():
        _check_range(config, key, low, high, low_allowed)
    _check_algorithm(config)
    _check_policy(config)
    if "pools" in envs.ENGINES[config.env.engine].settings and config.env.pools > config.num_envs:
        raise ConfigError(f"env.pools={config.env.pools} is more than num_envs={config.num_envs}")
    for key in ("env.options", "env.training_options"):
        for option in get(config, key):
            if option in _SET_ELSEWHERE:
                raise ConfigError(f"{key}.{option} is not an engine's own option: set {_SET_ELSEWHERE[option]}")
    check_device_name(config.device)


#: The estimators that each algorithm can learn from.
_ESTIMATORS = {"ppo": ("gae", "vtrace", "td_lambda", "discounted"), "impala": ("vtrace", "retrace")}


def _check_algorithm(config: Config) -> None:
    if config.credit.estimator not in _ESTIMATORS[config.algo]:
        raise ConfigError(
            f"credit.estimator={config.credit.estimator} is not for algo={config.algo}, which takes "
            f"{' or '.join(_ESTIMATORS[config.algo])}"
        )
    if config.credit.probe and config.credit.estimator == "retrace":
        raise ConfigError("credit.probe=true compares estimators of state values; credit.estimator=retrace has none")
    if config.algo == "ppo":
        _check_ppo(config)
    if config.algo == "impala":
        _check_actors(config)
        _check_lag(config)


def _check_ppo(config: Config) -> None:
    ppo = config.ppo
    if ppo.num_minibatches > config.steps_per_rollout:
        raise ConfigError(
            f"ppo.num_minibatches={ppo.num_minibatches} is more than the {config.steps_per_rollout} rows of a "
            f"rollout (num_envs={config.num_envs} * rollout_length={config.rollout_length})"
        )
    if ppo.lr_schedule == "adaptive" and not ppo.min_learning_rate <= ppo.learning_rate <= ppo.max_learning_rate:
        raise ConfigError(
            f"ppo.learning_rate={ppo.learning_rate} must lie between ppo.min_learning_rate={ppo.min_learning_rate} and "
            f"ppo.max_learning_rate={ppo.max_learning_rate}, where ppo.lr_schedule=adaptive keeps it"
        )


def _check_actors(config: Config) -> None:
    impala, pools = config.impala, config.num_actors
    if config.num_envs % pools:
        raise ConfigError(
            f"num_envs={config.num_envs} does not divide into env.pools={pools} actors of equal size; env.pools=0 fits"
        )
    if pools % config.rollouts_per_update:
        raise ConfigError(
            f"impala.rollouts_per_update={impala.rollouts_per_update} does not divide the {pools} actors (env.pools)"
        )
    units, kind = config.envs_per_update, "envs"
    if config.policy.core == "none":
        units, kind = units * config.rollout_length, "rows"
    if impala.num_minibatches > units:
        raise ConfigError(
            f"impala.num_minibatches={impala.num_minibatches} is more than the {units} {kind} of a batch; set fewer"
        )
    if config.env.reseed_interval:
        raise ConfigError(
            f"env.reseed_interval={config.env.reseed_interval} needs actors that wait; set it to 0 or algo=ppo"
        )
    if impala.batch_inference and pools == 1:
        raise ConfigError(
            f"impala.batch_inference=true has nothing to batch with one actor (env.pools={config.env.pools}, "
            f"num_envs={config.num_envs}); set env.pools to 2 or more"
        )
    drops = impala.max_lag is not None and impala.max_lag_action == "drop"
    if config.normalize.rewards and (config.num_batch_groups > 1 or drops):
        raise ConfigError(
            "normalize.rewards=true follows every env's return without a gap; with algo=impala set "
            "impala.rollouts_per_update=0 and impala.max_lag=null, or max_lag_action=block"
        )


def _check_lag(config: Config) -> None:
    impala, groups = config.impala, config.num_batch_groups
    if impala.batch_inference and impala.force_lag is not None:
        raise ConfigError(
            f"impala.batch_inference=true batches actors in threads, and impala.force_lag={impala.force_lag} lets them "
            f"act one after another; set batch_inference=false or force_lag=null"
        )
    if impala.max_lag is None:
        if impala.max_lag_action == "block":
            raise ConfigError("impala.max_lag_action=block bounds nothing where impala.max_lag=null; set max_lag")
        return
    if impala.force_lag is not None and impala.force_lag > impala.max_lag:
        raise ConfigError(
            f"impala.force_lag={impala.force_lag} can never keep impala.max_lag={impala.max_lag}; set either to null"
        )
    least = min(groups, (impala.queue_size or 2 * groups) - 1)  # actors without memory to fill do wait
    if impala.force_lag is None and impala.max_lag_action == "drop" and impala.max_lag < least:
        raise ConfigError(
            f"impala.max_lag={impala.max_lag} with impala.max_lag_action=drop: actors that do not wait are {least} "
            f"updates behind or more; set max_lag to at least {least}, or max_lag_action=block"
        )


def _check_policy(config: Config) -> None:
    policy = config.policy
    learns_before_heads = policy.torso != "mlp" or policy.core != "none"
    fit = all(1 <= width <= _WIDEST for width in policy.hidden_sizes)
    if not fit or not (policy.hidden_sizes or learns_before_heads):
        why = "" if learns_before_heads else f" where policy.torso={policy.torso} and policy.core={policy.core}"
        raise ConfigError(
            f"policy.hidden_sizes={policy.hidden_sizes} must be one or more widths from 1 to {_WIDEST}{why}"
        )
    if not policy.min_log_std <= policy.init_log_std <= policy.max_log_std:
        raise ConfigError(
            f"policy.init_log_std={policy.init_log_std} must lie between policy.min_log_std={policy.min_log_std} and "
            f"policy.max_log_std={policy.max_log_std}"
        )
    if policy.core != "none" and config.algo == "ppo" and config.ppo.num_minibatches > config.num_envs:
        raise ConfigError(
            f"ppo.num_minibatches={config.ppo.num_minibatches} is more than num_envs={config.num_envs}: with "
            f"policy.core={policy.core} a minibatch is made of whole windows of envs"
        )
    if policy.torso != "mlp" and config.normalize.observations:
        raise ConfigError(
            f"normalize.observations=true: policy.torso={policy.torso} scales its frames itself; set "
            f"normalize.observations=false"
        )


def check_device_name(device: str) -> None:
    """Refuse what names no device.

    Raises:
        ConfigError: says what does.
    """
    kind, _, index = device.partition(":")
    if device not in ("auto", "cpu") and (kind != "cuda" or (":" in device and not index.isdigit())):
        raise ConfigError(f"device={device} is not one of auto, cpu, cuda, cuda:N")
