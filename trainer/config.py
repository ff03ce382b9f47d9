"""Typed configuration: what every key means, what it may be, and what follows from it.

The dataclasses are Hydra's schema (wrong types and misspelt keys are refused when it composes) and `validate` refuses
impossible values before any env starts. A module of the trainer gets values or its own dataclass, never the whole
`Config`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line that begins with the key."""


@dataclass
class EnvConfig:
    """Which env, on which engine, and how it is stepped."""

    id: str = "Ant"  #: an id the engine knows; without a version the newest one is taken
    engine: str = "envpool"  #: envpool | mujoco_warp | torch
    pools: int = 2  #: EnvPool: sync pools that step in turns, so that the policy works while others step
    num_threads: int = 0  #: EnvPool: threads per pool; 0 takes all cores this process may use
    timeout: float = 300.0  #: seconds after which a step that does not return is an error
    action_map: str = "clip"  #: how raw actions enter the bounds: clip | rescale | squash | none
    max_episode_steps: int | None = None  #: overrides the env's own time limit
    physics: str = "rk4"  #: mujoco_warp: rk4 (parity with Gymnasium) | euler (faster, another task)
    reseed_interval: int = 0  #: start the envs anew every so many updates, seeded by the update; 0 never
    options: dict[str, Any] = field(default_factory=dict)  #: passed on to the engine as it is


@dataclass
class PolicyConfig:
    """Separate actor and critic multi-layer perceptrons."""

    hidden_sizes: list[int] = field(default_factory=lambda: [256, 128, 64])
    activation: str = "elu"  #: elu | relu | tanh
    init_log_std: float = 0.0  #: continuous actions: the state-independent log standard deviation at the start
    min_log_std: float = -5.0
    max_log_std: float = 2.0


@dataclass
class CreditConfig:
    """Which estimator turns rewards and values into advantages and value targets, and on which backend."""

    estimator: str = "gae"  #: gae | vtrace | td_lambda | discounted
    backend: str = "auto"  #: auto (triton on CUDA, else torch) | triton | torch
    torch_mode: str = "auto"  #: auto | loop | scan | compiled
    gamma: float = 0.99
    gae_lambda: float = 0.95
    td_lambda: float = 0.95
    vtrace_lambda: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0


@dataclass
class PPOConfig:
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347)."""

    learning_rate: float = 3e-4
    lr_schedule: str = "adaptive"  #: constant | linear (to 0 at total_steps) | adaptive (by KL, per minibatch)
    desired_kl: float = 0.008  #: adaptive: lr / 1.5 above twice this KL, lr * 1.5 below half of it
    min_learning_rate: float = 1e-5
    max_learning_rate: float = 1e-2
    update_epochs: int = 4
    num_minibatches: int = 2
    clip_range: float = 0.2
    value_clip_range: float | None = 0.2  #: null leaves the value loss unclipped
    value_coef: float = 2.0  #: times 0.5 * (value - target)^2
    entropy_coef: float = 0.0
    max_grad_norm: float = 1.0
    target_kl: float | None = None  #: no further optimizer step in this update once a minibatch's KL exceeds it
    normalize_advantages: bool = True  #: over all valid rows of the rollout, population standard deviation
    adam_eps: float = 1e-5
    max_skipped_updates: int = 10  #: the run fails after so many updates in a row that were not finite


@dataclass
class NormalizeConfig:
    """Running normalizers; their statistics are frozen while a rollout is collected."""

    observations: bool = True
    observation_clip: float = 10.0
    rewards: bool = False  #: divide rewards by the running std of the discounted return
    values: bool = True  #: learn values in units of the running std of their targets (PopArt)


@dataclass
class CheckpointConfig:
    """When the run's state is saved; the newest checkpoint and the one before are kept."""

    interval_seconds: float = 300.0  #: wall time between checkpoints; one is always saved at the end and on a signal
    interval_updates: int = 0  #: also after every so many updates; 0 never


@dataclass
class LoggingConfig:
    """What a person sees while the run goes on."""

    console: str = "auto"  #: auto (rich in a terminal, else plain) | rich | plain | none
    plain_interval: float = 10.0  #: seconds between the plain console's lines
    episode_window: int = 100  #: the last so many ended episodes make `episode_return`


@dataclass
class WandbConfig:
    """Weights & Biases; absent or failing, it never stops a run."""

    mode: str = "offline"  #: offline | online | disabled
    project: str = "rollscan"
    group: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class Config:
    """One training run."""

    algo: str = "ppo"
    num_envs: int = 4096  #: per rank
    rollout_length: int = 16
    total_steps: int = 10_000_000  #: valid env steps over all ranks; filler rows do not count
    seed: int = 1
    device: str = "auto"  #: auto | cpu | cuda | cuda:N
    resume: str | None = None  #: a run folder to continue in place
    out: str | None = None  #: the run folder; default runs/<date>/<time>-<algo>-<env>-<seed>
    autocast: str = "none"  #: none | bfloat16: the networks' matrix products; losses and sums stay float32
    matmul_precision: str = "high"  #: float32 matrix products on CUDA: highest (ieee) | high (tf32)
    compile: bool = False  #: torch.compile for the policy step and the loss
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def steps_per_rollout(self) -> int:
        """Rows of one rollout on one rank, filler included."""
        return self.num_envs * self.rollout_length


_CHOICES = {
    "algo": ("ppo",),
    "autocast": ("none", "bfloat16"),
    "matmul_precision": ("highest", "high"),
    "env.engine": ("envpool", "mujoco_warp", "torch"),
    "env.action_map": ("clip", "rescale", "squash", "none"),
    "env.physics": ("rk4", "euler"),
    "policy.activation": ("elu", "relu", "tanh"),
    "credit.estimator": ("gae", "vtrace", "td_lambda", "discounted"),
    "credit.backend": ("auto", "triton", "torch"),
    "credit.torch_mode": ("auto", "loop", "scan", "compiled"),
    "ppo.lr_schedule": ("constant", "linear", "adaptive"),
    "logging.console": ("auto", "rich", "plain", "none"),
    "wandb.mode": ("offline", "online", "disabled"),
}
# key: (lowest, highest, whether the lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "num_envs": (1, 2**24, True),
    "rollout_length": (1, 2**24, True),
    "total_steps": (1, math.inf, True),
    "seed": (0, 2**31 - 1, True),
    "env.pools": (1, 1024, True),
    "env.num_threads": (0, 4096, True),
    "env.timeout": (0, math.inf, False),
    "env.max_episode_steps": (1, math.inf, True),
    "env.reseed_interval": (0, math.inf, True),
    "policy.min_log_std": (-20, 20, True),
    "policy.max_log_std": (-20, 20, True),
    "credit.gamma": (0, 1, True),
    "credit.gae_lambda": (0, 1, True),
    "credit.td_lambda": (0, 1, True),
    "credit.vtrace_lambda": (0, 1, True),
    "credit.rho_bar": (0, math.inf, False),
    "credit.c_bar": (0, math.inf, False),
    "credit.pg_rho_bar": (0, math.inf, False),
    "normalize.observation_clip": (0, math.inf, False),
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
    "checkpoint.interval_seconds": (0, math.inf, False),
    "checkpoint.interval_updates": (0, math.inf, True),
    "logging.plain_interval": (0, math.inf, True),
    "logging.episode_window": (1, 10**6, True),
}


def get(config: Config, key: str) -> Any:
    """The value under a dotted key, e.g. ``ppo.clip_range``."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_choice(config: Config, key: str, choices: tuple[str, ...]) -> None:
    value = get(config, key)
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}{hint}")


def _check_range(config: Config, key: str, low: float, high: float, low_allowed: bool) -> None:
    value = get(config, key)
    if value is None:  # optional keys
        return
    if not math.isfinite(value) or value > high or value < low or (value == low and not low_allowed):
        relation = "at least" if low_allowed else "greater than"
        limit = "" if math.isinf(high) else f" and at most {high:g}"
        raise ConfigError(f"{key}={value} must be finite, {relation} {low:g}{limit}")


def validate(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigError: one line that names the key, its value and what would be right.
    """
    for key, choices in _CHOICES.items():
        _check_choice(config, key, choices)
    for key, (low, high, low_allowed) in _RANGES.items():
        _check_range(config, key, low, high, low_allowed)
    if config.ppo.num_minibatches > config.steps_per_rollout:
        raise ConfigError(
            f"ppo.num_minibatches={config.ppo.num_minibatches} is more than the {config.steps_per_rollout} rows of a "
            f"rollout (num_envs={config.num_envs} * rollout_length={config.rollout_length})"
        )
    if not config.policy.hidden_sizes or min(config.policy.hidden_sizes) < 1:
        raise ConfigError(f"policy.hidden_sizes={config.policy.hidden_sizes} must be one or more positive widths")
    if config.policy.min_log_std > config.policy.init_log_std or config.policy.init_log_std > config.policy.max_log_std:
        raise ConfigError(
            f"policy.init_log_std={config.policy.init_log_std} must lie between policy.min_log_std="
            f"{config.policy.min_log_std} and policy.max_log_std={config.policy.max_log_std}"
        )
    if config.ppo.min_learning_rate > config.ppo.max_learning_rate:
        raise ConfigError(
            f"ppo.min_learning_rate={config.ppo.min_learning_rate} exceeds ppo.max_learning_rate="
            f"{config.ppo.max_learning_rate}"
        )
    if config.env.engine == "envpool" and config.env.pools > config.num_envs:
        raise ConfigError(f"env.pools={config.env.pools} is more than num_envs={config.num_envs}")
    _check_device_name(config.device)


def _check_device_name(device: str) -> None:
    kind, _, index = device.partition(":")
    if device not in ("auto", "cpu") and (kind != "cuda" or (":" in device and not index.isdigit())):
        raise ConfigError(f"device={device} is not one of auto, cpu, cuda, cuda:N")


def from_omegaconf(composed: DictConfig) -> Config:
    """The validated `Config` of what Hydra composed.

    Raises:
        ConfigError: a value is missing, of the wrong type, or impossible.
    """
    schema = OmegaConf.structured(Config)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema, composed))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    if not isinstance(config, Config):
        raise ConfigError(f"the configuration is a {type(config).__name__}, not a mapping of keys")
    validate(config)
    return config


def from_yaml(text: str) -> Config:
    """The validated `Config` of a run folder's ``config.yaml``."""
    loaded = OmegaConf.create(text)
    if not isinstance(loaded, DictConfig):
        raise ConfigError("config.yaml is not a mapping of keys")
    return from_omegaconf(loaded)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, the content of a run folder's ``config.yaml``."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain nested dictionaries."""
    container = OmegaConf.to_container(OmegaConf.structured(config))
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


def all_keys() -> list[str]:
    """Every dotted key there is, for suggestions."""
    keys = []
    for top in fields(Config):
        default = top.default_factory() if callable(top.default_factory) else None
        if default is not None and hasattr(default, "__dataclass_fields__"):
            keys += [f"{top.name}.{inner.name}" for inner in fields(default)]
        else:
            keys.append(top.name)
    return keys


def one_line(error: Exception, known: list[str] | None = None) -> str:
    """An OmegaConf or Hydra error as one line that names the key and, where it can, the cure.

    Args:
        error: what was raised.
        known: the keys there are; by default those of `Config`.
    """
    known = all_keys() if known is None else known
    key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    first = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(error).__name__)
    if not key:
        return first
    if isinstance(cause, ConfigKeyError):
        last = str(key).rpartition(".")[2]
        close = difflib.get_close_matches(str(key), known, n=1) or [
            name for name in known if difflib.get_close_matches(last, [name.rpartition(".")[2]], cutoff=0.75)
        ]
        hint = f"; did you mean {close[0]}?" if close else "; `python scripts/train.py --cfg job` prints them all"
        return f"{key}: there is no such key{hint}"
    return f"{key}: {first}"
