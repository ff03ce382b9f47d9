"""Typed configuration: what every key means, what it may be, and what follows from it.

The dataclasses are Hydra's schema (`trainer.schema`): wrong types and misspelt keys are refused when it composes, and
impossible values by `trainer.validation`, before any env starts. A module of the trainer gets values or its own
dataclass, never the whole `Config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

#: Envs from which on EnvPool, under IMPALA, has four actors instead of two.
_MANY_ENVS = 1024


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line that begins with the key."""


@dataclass
class EnvConfig:
    """Which env, on which engine, and how it is stepped."""

    id: str = "Ant"  #: an id the engine knows; without a version the newest one is taken
    engine: str = "envpool"  #: envpool | gymnasium | mujoco_warp | torch | one's own (`envs.ENGINES`)
    module: str | None = None  #: a Python module to import first: it registers engines or tasks of one's own
    #: groups of envs: on a CPU they take turns under PPO; each has an actor under IMPALA, on any engine; 0: automatic
    pools: int = 0
    num_threads: int = 0  #: EnvPool: threads per pool, 0 shares the cores; gymnasium async: envs at a time, 0 all
    timeout: float = 300.0  #: seconds after which a step that does not return is an error
    action_map: str = "clip"  #: how raw actions enter the bounds: clip | rescale | squash | none
    max_episode_steps: int | None = None  #: overrides the env's own time limit
    physics: str = "rk4"  #: mujoco_warp: rk4 (parity with Gymnasium) | euler (faster, another task)
    reseed_interval: int = 0  #: start the envs anew every so many updates, seeded by the update; 0 never
    options: dict[str, Any] = field(default_factory=dict)  #: passed on to the engine as it is
    training_options: dict[str, Any] = field(default_factory=dict)  #: the same, but evaluation plays without them


@dataclass
class PolicyConfig:
    """Torso, recurrent core, and actor and critic heads; over vectors the heads are MLPs that share nothing."""

    hidden_sizes: list[int] = field(default_factory=lambda: [256, 128, 64])  #: of each head
    activation: str = "elu"  #: of the heads: elu | relu | tanh
    init_log_std: float = 0.0  #: continuous actions: the state-independent log standard deviation at the start
    min_log_std: float = -5.0  #: continuous actions: it is kept above this
    max_log_std: float = 2.0  #: and below this
    torso: str = "mlp"  #: mlp (vectors go straight to core and heads) | nature_cnn | impala_resnet (uint8 frames)
    core: str = "none"  #: none | lstm | gru: memory between torso and heads, forgotten where an episode ended
    core_size: int = 256  #: width of the core
    backend: str = "auto"  #: auto (triton where it can) | triton (both MLPs at once) | torch


@dataclass
class CreditConfig:
    """Which estimator turns rewards and values into advantages and value targets, and on which backend."""

    estimator: str = "gae"  #: gae | vtrace | td_lambda | discounted; for impala vtrace | retrace
    backend: str = "auto"  #: auto (triton on CUDA, else torch) | triton | torch
    torch_mode: str = "auto"  #: of backend torch: auto (compiled on CUDA, else scan) | loop | scan | compiled
    probe: bool = False  #: time the other backend on the same tensors and log what it would be worth; results not used
    probe_interval: int = 10  #: updates between two probes
    gamma: float = 0.99  #: discount per step
    gae_lambda: float = 0.95  #: gae: weight of longer returns
    td_lambda: float = 0.95  #: td_lambda: weight of longer returns
    vtrace_lambda: float = 1.0  #: vtrace: factor of the trace
    retrace_lambda: float = 1.0  #: retrace: factor of the trace
    rho_bar: float = 1.0  #: vtrace: bound of the ratio that weighs a step's own error
    c_bar: float = 1.0  #: vtrace, retrace: bound of the ratio in the trace
    pg_rho_bar: float = 1.0  #: vtrace: bound of the ratio that weighs the policy gradient


@dataclass
class PPOConfig:
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347)."""

    learning_rate: float = 3e-4  #: of Adam, at the start
    lr_schedule: str = "adaptive"  #: constant | linear (to 0 at total_steps) | adaptive (by KL, per minibatch)
    desired_kl: float = 0.008  #: adaptive: lr / 1.5 above twice this KL, lr * 1.5 below half of it
    min_learning_rate: float = 1e-5  #: adaptive: never below
    max_learning_rate: float = 1e-2  #: adaptive: never above
    update_epochs: int = 4  #: passes over a rollout
    num_minibatches: int = 2  #: per pass, one optimizer step each; a minibatch is the rollout's rows by this number
    clip_range: float = 0.2  #: the ratio's gain ends at 1 - this and 1 + this
    clip_schedule: str = "constant"  #: constant | linear (to 0 at total_steps)
    value_clip_range: float | None = 0.2  #: null leaves the value loss unclipped
    value_coef: float = 2.0  #: times 0.5 * (value - target)^2
    entropy_coef: float = 0.0  #: times the mean entropy, which is added to what is maximized
    entropy_schedule: str = "constant"  #: constant | linear (to 0 at total_steps)
    max_grad_norm: float = 1.0  #: longer gradients are scaled down to this
    target_kl: float | None = None  #: no further optimizer step in this update once a minibatch's KL exceeds it
    normalize_advantages: bool = True  #: over all valid rows of the rollout, population standard deviation
    recompute_advantages: str = "rollout"  #: credit is assigned once per rollout | anew before every epoch | minibatch
    adam_eps: float = 1e-5  #: beside the root
    max_skipped_updates: int = 10  #: the run fails after so many updates in a row that were not finite


@dataclass
class ImpalaConfig:
    """One actor per ``env.pools`` and an off-policy learner (Espeholt et al. 2018, arXiv 1802.01561)."""

    optimizer: str = "rmsprop"  #: rmsprop (as in the paper) | adam
    learning_rate: float = 6e-4  #: at the start
    lr_schedule: str = "linear"  #: constant | linear (to 0 at total_steps)
    rmsprop_decay: float = 0.99  #: of the running mean of squared gradients
    rmsprop_eps: float = 0.01  #: under the root
    adam_eps: float = 1e-5  #: beside the root
    rollouts_per_update: int = 0  #: actors whose rollouts make one batch, side by side; 0 all of them
    num_minibatches: int = 1  #: of a batch's rows, with a core of its envs' windows; one optimizer step each
    update_epochs: int = 1  #: passes over a batch
    clip_range: float = 0.2  #: of the ratio to the policy that credit was assigned by; matters from the second step on
    value_coef: float = 0.5  #: times 0.5 * (value - target)^2
    entropy_coef: float = 0.01  #: times the mean entropy, which is added to what is maximized
    max_grad_norm: float = 40.0  #: longer gradients are scaled down to this
    normalize_advantages: bool = False  #: to a weighted mean of 0 and an rms of 1 over all valid rows of the batch
    queue_size: int = 0  #: batches in memory: being filled, full, or read; 0: two for each group that fills them
    max_lag: int | None = None  #: updates between the policy that acted and the one that learns; null: as it comes
    max_lag_action: str = "drop"  #: what keeps max_lag: drop (older batches) | block (actors that would exceed it)
    batch_inference: bool = False  #: actors whose policies are due at the same time, of one version, take one step
    force_lag: int | None = None  #: test: act with the parameters of exactly so many updates ago, in one thread
    correction: bool = True  #: test: false takes all importance ratios for 1
    max_skipped_updates: int = 10  #: the run fails after so many updates in a row that were not finite


@dataclass
class LossConfig:
    """How the loss of a minibatch is computed."""

    backend: str = "auto"  #: auto (triton on CUDA where the policy's actions allow it, else torch) | triton | torch


@dataclass
class NormalizeConfig:
    """Running normalizers; their statistics are frozen while a rollout is collected."""

    observations: bool = True  #: subtract the running mean, divide by the running std
    observation_clip: float = 10.0  #: what comes out is clipped to [-c, c]
    reward_clip: float | None = None  #: learn from rewards clipped to [-c, c]; returns are logged as the env gave them
    rewards: bool = False  #: divide rewards by the running std of the discounted return
    values: bool = True  #: learn values in units of the running std of their targets (PopArt)


@dataclass
class TimingConfig:
    """What the clock sees."""

    #: normal | high: on CUDA time every update and step, and cut graphs at forward, backward and optimizer
    detail: str = "normal"


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

    mode: str = "offline"  #: offline (`wandb sync` uploads it later) | online | disabled
    project: str = "rollscan"  #: where the run is listed
    group: str | None = None  #: runs that belong together
    name: str | None = None  #: the run's; null takes the run folder's
    tags: list[str] = field(default_factory=list)  #: beside those that say algorithm, env, engine and backend


@dataclass
class Config:
    """One training run."""

    algo: str = "ppo"  #: ppo | impala
    num_envs: int = 4096  #: per rank
    rollout_length: int = 16  #: steps of each env per rollout
    total_steps: int = 10_000_000  #: valid env steps over all ranks; filler rows do not count
    seed: int = 1  #: of parameters, envs, actions and minibatches
    device: str = "auto"  #: auto (cuda where there is one) | cpu | cuda | cuda:N
    resume: str | None = None  #: a run folder to continue in place
    out: str | None = None  #: the run folder; default runs/<date>/<time>-<algo>-<env>-<seed>
    autocast: str = "none"  #: none | bfloat16: the networks' matrix products; losses and sums stay float32
    matmul_precision: str = "high"  #: float32 products and convolutions on CUDA: highest (ieee) | high (tf32)
    cuda_graphs: bool = True  #: on CUDA, replay policy, env and minibatch steps as graphs; a CPU has none
    compile: bool = False  #: torch.compile for the policy step and, under PPO, the loss
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    impala: ImpalaConfig = field(default_factory=ImpalaConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def steps_per_rollout(self) -> int:
        """Rows of one rollout on one rank, filler included."""
        return self.num_envs * self.rollout_length

    @property
    def num_actors(self) -> int:
        """IMPALA: actors, each with as many envs: ``env.pools``, or else two, or four where many envs step on EnvPool,
        whose threads rest while their actor's rows are copied; fewer where ``num_envs`` does not divide."""
        many = self.env.engine == "envpool" and self.num_envs >= _MANY_ENVS
        return self.env.pools or math.gcd(4 if many else 2, self.num_envs)

    @property
    def rollouts_per_update(self) -> int:
        """IMPALA: actors whose rollouts make one batch."""
        return self.impala.rollouts_per_update or self.num_actors

    @property
    def num_batch_groups(self) -> int:
        """IMPALA: groups of actors that fill batches in turn."""
        return self.num_actors // self.rollouts_per_update

    @property
    def envs_per_update(self) -> int:
        """IMPALA: columns of one batch on one rank."""
        return self.num_envs // self.num_batch_groups
