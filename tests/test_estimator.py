"""Each estimator on a collected rollout against the float64 reference, and one learning run on two backends."""

from typing import Any

import pytest
import torch
from fake_env import CPU, Script, collect, random_script
from torch import Tensor

from kernels import reference
from kernels.operations import Backend
from trainer import estimator, losses
from trainer.config import Config, ConfigError, CreditConfig, EnvConfig, NormalizeConfig, PolicyConfig, PPOConfig
from trainer.console import make_console
from trainer.loop import Trainer
from trainer.rollout import Rollout

ESTIMATORS = ("gae", "vtrace", "td_lambda", "discounted")
VTRACE: dict[str, float] = {"vtrace_lambda": 0.7, "rho_bar": 0.9, "c_bar": 0.8, "pg_rho_bar": 0.6}
COEFFICIENTS: dict[str, Any] = {"gamma": 0.97, "gae_lambda": 0.9, "td_lambda": 0.8, **VTRACE}


@pytest.fixture(scope="module")
def script() -> Script:
    script = random_script(31, 7, seed=4)
    ongoing = script.valid[-1] & ~script.terminated[-1] & ~script.truncated[-1]
    kinds = (script.terminated, script.truncated, ~script.valid, ongoing)
    assert all(kind.any() for kind in kinds)  # all four kinds of end
    return script


def expected_estimate(rollout: Rollout, kind: str) -> tuple[Tensor, Tensor]:
    """Advantages and value targets by the float64 sums, coefficients spelt out."""
    ends = (rollout.terminated, rollout.truncated)
    values, last_value = rollout.values[:-1], rollout.last_value
    common: dict[str, Any] = {"valid": rollout.valid, "gamma": 0.97}
    if kind == "gae":
        credit = reference.gae(rollout.rewards, values, last_value, *ends, gae_lambda=0.9, **common)
        return credit.advantages, credit.value_targets
    if kind == "vtrace":
        log_probs = rollout.log_probs
        trace = reference.vtrace(log_probs, log_probs, rollout.rewards, values, last_value, *ends, **VTRACE, **common)
        return trace.pg_advantages, trace.value_targets
    if kind == "td_lambda":
        targets = reference.td_lambda(rollout.rewards, values, last_value, *ends, td_lambda=0.8, **common)
    else:
        successors = torch.cat([values[1:], last_value[None]])
        targets = reference.discounted_returns(
            rollout.rewards, last_value, *ends, bootstrap_values=successors, **common
        )
    return torch.where(rollout.valid, targets - values, 0.0), targets


@pytest.mark.parametrize(
    ("backend", "torch_mode", "device"),
    [
        ("torch", "loop", "cpu"),
        ("torch", "scan", "cpu"),
        pytest.param("triton", "auto", "cuda", marks=pytest.mark.gpu),
        pytest.param("torch", "compiled", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimates_equal_the_reference(
    script: Script, kind: str, backend: Backend, torch_mode: str, device: str
) -> None:
    tensors = {name: field for name, field in vars(collect(script)).items() if isinstance(field, Tensor)}
    rollout = Rollout(**{name: tensor.to(device) for name, tensor in tensors.items()})
    config = CreditConfig(estimator=kind, torch_mode=torch_mode, **COEFFICIENTS)
    result = estimator.estimate(rollout, rollout.rewards, config, backend)
    advantages, targets = expected_estimate(collect(script), kind)
    # float32 sums of at most 31 terms of size 1
    torch.testing.assert_close(result.advantages.double().cpu(), advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.value_targets.double().cpu(), targets, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_moments_are_those_of_the_valid_advantages(script: Script, kind: str) -> None:
    rollout = collect(script)
    result = estimator.estimate(rollout, rollout.rewards, CreditConfig(estimator=kind, **COEFFICIENTS), "torch")
    kept = result.advantages[script.valid].double()
    expected = torch.stack([torch.tensor(float(len(kept))), kept.mean(), (kept - kept.mean()).square().sum()])
    torch.testing.assert_close(result.advantage_moments.double(), expected.double(), rtol=1e-5, atol=1e-5)
    standardized = losses.standardize(result.advantages, result.advantage_moments)[script.valid]
    assert abs(float(standardized.mean())) < 1e-5
    assert float(standardized.std(correction=0)) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_what_a_filler_row_holds_reaches_no_estimate(script: Script, kind: str) -> None:
    config = CreditConfig(estimator=kind, **COEFFICIENTS)
    clean, poisoned = collect(script), collect(script)
    assert torch.equal(clean.log_probs, poisoned.log_probs)  # one seed: the same rollout
    for name in ("rewards", "log_probs", "observations"):
        getattr(poisoned, name)[: len(script.valid)][~script.valid] = torch.nan
    unread = ~script.valid & ~script.bootstrapped_from_final
    poisoned.values[:-1][unread] = torch.nan
    expected = estimator.estimate(clean, clean.rewards, config, "torch")
    for got, want in zip(estimator.estimate(poisoned, poisoned.rewards, config, "torch"), expected, strict=True):
        assert torch.equal(got, want)


def test_normalized_rewards_are_estimated_in_place_of_the_rollouts_own(script: Script) -> None:
    rollout = collect(script)
    config = CreditConfig(gamma=1.0, gae_lambda=1.0)
    rewards = 3 * rollout.rewards
    result = estimator.estimate(rollout, rewards, config, "torch")
    rollout.rewards.mul_(3)
    expected = estimator.estimate(rollout, rollout.rewards, config, "torch")
    assert torch.equal(result.advantages, expected.advantages)


def test_auto_takes_triton_on_cuda_and_torch_elsewhere() -> None:
    cuda = torch.device("cuda")
    assert estimator.resolve_backend(CreditConfig(backend="auto"), CPU) == "torch"
    assert estimator.resolve_backend(CreditConfig(backend="auto"), cuda) == "triton"
    assert estimator.resolve_backend(CreditConfig(backend="torch"), cuda) == "torch"
    assert estimator.resolve_backend(CreditConfig(backend="triton"), cuda) == "triton"


def test_triton_without_cuda_is_refused_and_says_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match=r"credit.backend=triton needs device=cuda.*cpu; use credit.backend=auto"):
        estimator.resolve_backend(CreditConfig(backend="triton"), CPU)


def first_updates(count: int, device: str, credit: CreditConfig) -> list[dict[str, Any]]:
    """The metrics of the first updates of CartPole from one seed."""
    config = Config(
        num_envs=64, rollout_length=32, total_steps=10**6, device=device, matmul_precision="highest", credit=credit,
        env=EnvConfig(id="CartPole-v1", engine="torch"), policy=PolicyConfig([64, 64], "tanh"),
        ppo=PPOConfig(lr_schedule="constant"), normalize=NormalizeConfig(),
    )  # fmt: skip
    config.logging.console = "none"
    trainer = Trainer(config, make_console(config.logging, "test"))
    trainer.clock.lap()
    return [trainer.train_one_update() for _ in range(count)]


def assert_same_learning(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Advantages of size 1 differ by float32 roundings, 1e-7. Adam divides a gradient by its own size, so 40 steps may
    multiply that a hundredfold; no sampled action flips, so the counters are equal."""
    compared = ("loss/policy", "loss/value", "loss/entropy", "loss/approx_kl", "grad_norm", "explained_variance")
    for a, b in zip(first, second, strict=True):
        assert (a["env_steps"], a["episodes"]) == (b["env_steps"], b["episodes"])
        assert a["episode_return"] == b["episode_return"]
        assert [a[name] for name in compared] == pytest.approx([b[name] for name in compared], rel=1e-5, abs=1e-5)


def test_the_same_seed_learns_the_same_with_a_loop_and_with_a_scan() -> None:
    runs = [first_updates(5, "cpu", CreditConfig(backend="torch", torch_mode=mode)) for mode in ("loop", "scan")]
    assert_same_learning(*runs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_same_seed_learns_the_same_with_triton_and_with_torch(kind: str) -> None:
    runs = [
        first_updates(5, "cuda", CreditConfig(estimator=kind, backend=backend, torch_mode="scan"))
        for backend in ("triton", "torch")
    ]
    assert [run[0]["credit_backend"] for run in runs] == ["triton", "torch"]
    assert_same_learning(*runs)
