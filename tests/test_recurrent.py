"""Recurrent cores: what they remember, where they forget, and that PPO and IMPALA see the memory that acted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import torch
from fake_env import CPU, PPOCase, Script, ScriptedEnv, make_collector, make_policy, random_script
from impala_cases import LearnerCase
from small_runs import differences, rows, run_until, small_config
from torch import Tensor, nn

from trainer import checkpoint
from trainer.config import ConfigError, CreditConfig
from trainer.evaluate import evaluate, load_checkpoint
from trainer.recurrent import CORES, Core
from trainer.run_folder import RunFolder
from trainer.schema import compose_config, compose_for_resume
from trainer.session import train

KINDS = tuple(CORES)
LENGTH, NUM_ENVS, INPUTS, SIZE = 13, 5, 3, 5


@pytest.fixture
def script() -> Script:
    return random_script(LENGTH, NUM_ENVS, seed=2)


def make_core(kind: str) -> Core:
    torch.manual_seed(0)
    core = CORES[kind](INPUTS, SIZE)
    for parameter in core.parameters():
        nn.init.normal_(parameter, std=0.7)
    return core


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_without_ends_equals_torchs_own_layer(kind: str, length: int) -> None:
    core = make_core(kind)
    layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](INPUTS, SIZE)
    layer.load_state_dict({f"{name}_l0": tensor for name, tensor in core.cell.state_dict().items()})
    features, state = random(length, NUM_ENVS, INPUTS), random(NUM_ENVS, core.state_size, seed=2)
    parts = [part[None].contiguous() for part in state.split(SIZE, dim=1)]
    expected, last = layer(features, tuple(parts) if kind == "lstm" else parts[0])
    outputs, found = core(features, state, None)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(found, torch.cat([part[0] for part in last], dim=1) if kind == "lstm" else last[0])


@pytest.mark.parametrize("kind", KINDS)
def test_memory_reaches_the_filler_row_and_not_the_one_after_it(kind: str) -> None:
    core, features, state = make_core(kind), random(6, 2, INPUTS), random(2, make_core(kind).state_size, seed=2)
    valid = torch.ones(6, 2, dtype=torch.bool)
    valid[2, 0] = valid[5, 1] = False
    outputs, last = core(features, state, valid)
    unbroken, _ = core(features, state, None)
    anew, _ = core(features[3:], torch.zeros_like(state), None)
    assert torch.equal(outputs[:3, 0], unbroken[:3, 0]) and torch.equal(outputs[:, 1], unbroken[:, 1])
    torch.testing.assert_close(outputs[3:, 0], anew[:, 0])
    assert last[0].any() and not last[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_a_filler_row_reaches_neither_later_rows_nor_gradients(kind: str) -> None:
    core, features = make_core(kind), random(4, 2, INPUTS)
    features[1, 0] = math.nan
    valid = torch.ones(4, 2, dtype=torch.bool)
    valid[1, 0] = False
    outputs, last = core(features, torch.zeros(2, core.state_size), valid)
    assert outputs[1, 0].isnan().all() and outputs[2:].isfinite().all() and last.isfinite().all()


@pytest.mark.parametrize("num_pools", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_evaluated_as_a_sequence_gives_what_acted(kind: str, num_pools: int, script: Script) -> None:
    env = ScriptedEnv(script, num_pools=num_pools)
    policy = make_policy(env, core=kind)
    collector = make_collector(env, policy, 4)
    for _ in range(3):  # windows end in the middle of episodes
        rollout = collector.collect()
        state = rollout.core_state[0]
        distribution = policy.distribution(rollout.observations[:-1], state, rollout.valid)
        values = policy.value(rollout.observations, state, rollout.valid)
        torch.testing.assert_close(distribution.log_prob(rollout.actions), rollout.log_probs)
        torch.testing.assert_close(values, rollout.values)
        torch.testing.assert_close(policy.outputs(rollout.observations, state, rollout.valid).values, values)
    assert state.any()


def test_values_depend_on_all_of_the_episode_and_on_nothing_before_it(script: Script) -> None:
    env = ScriptedEnv(script)
    policy = make_policy(env, core="lstm")
    rollout = make_collector(env, policy, LENGTH).collect()
    for n in range(NUM_ENVS):
        state = policy.initial_state(1)
        for t in range(LENGTH):
            action = policy.act(script.observations[t, n, None], state)
            torch.testing.assert_close(rollout.values[t, n], action.values[0])
            assert action.state is not None
            state = action.state if script.valid[t, n] else policy.initial_state(1)


def test_restarting_forgets(script: Script) -> None:
    env = ScriptedEnv(script)
    collector = make_collector(env, make_policy(env, core="gru"), 4)
    collector.collect()
    collector.restart()
    assert not collector.collect().core_state.any()


@pytest.mark.parametrize("num_minibatches", [1, 2, 5])
def test_ppo_takes_whole_windows_of_envs_each_once_an_epoch(num_minibatches: int, script: Script) -> None:
    case = PPOCase(script, core="lstm", num_minibatches=num_minibatches, update_epochs=3)
    case.rollout.valid.fill_(True)
    case.number_rows()
    case.update()
    assert len(case.batches) == 3 * num_minibatches
    for epoch in range(3):
        batches = case.batches[epoch * num_minibatches : (epoch + 1) * num_minibatches]
        columns = torch.cat([batch[..., 0] for batch in batches], dim=1)
        assert torch.equal(columns[:, columns[0].argsort()], 1.0 + torch.arange(LENGTH * NUM_ENVS).view(LENGTH, -1))


@pytest.mark.parametrize("space", [gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.MultiDiscrete([2, 3])])
def test_ppos_first_step_begins_at_a_ratio_of_one(space: gymnasium.Space, script: Script) -> None:
    case = PPOCase(script, space, core="gru", num_minibatches=1, update_epochs=1)
    metrics = case.update()
    assert metrics["loss/approx_kl"] < 1e-10 and metrics["loss/clip_fraction"] == 0
    assert metrics["skipped_minibatches"] == 0


@pytest.mark.parametrize("anew", ["rollout", "epoch"])
def test_what_filler_rows_hold_changes_no_bit_of_a_recurrent_update(anew: str, script: Script) -> None:
    zeros, poisoned = (
        PPOCase(script, core="lstm", num_minibatches=2, entropy_coef=0.01, recompute_advantages=anew) for _ in range(2)
    )
    filler = ~script.valid
    for case, value in ((zeros, 0.0), (poisoned, math.nan)):
        unread = filler & ~script.bootstrapped_from_final
        case.rollout.observations[:-1][unread] = value
        for tensor in (case.rollout.actions, case.rollout.log_probs, case.rollout.rewards):
            tensor[filler] = value
    assert poisoned.update() == zeros.update()
    assert differences(poisoned.state(), zeros.state()) == []


@pytest.mark.parametrize("estimator", ["vtrace", "retrace"])
def test_impala_without_lag_begins_at_a_ratio_of_one(estimator: str, script: Script) -> None:
    case = LearnerCase(script, credit=CreditConfig(estimator=estimator), drift=0.0, core="lstm", num_minibatches=1)
    metrics = case.learner.update(case.rollout, case.rollout.rewards, 0.0)
    assert metrics["loss/approx_kl"] < 1e-10 and metrics["skipped_minibatches"] == 0


RUN = ("env=TMaze", "device=cpu", "wandb.mode=disabled", "logging.console=none", "policy.core_size=8")


def test_a_resumed_run_keeps_the_memory_bit_for_bit(tmp_path: Path) -> None:
    small = (*RUN, "num_envs=6", "rollout_length=5", "ppo.num_minibatches=2", "total_steps=100000")
    assert run_until(6, compose_config([*small, "out=straight"]), tmp_path) == 143
    assert run_until(3, compose_config([*small, "out=broken"]), tmp_path) == 143
    run = RunFolder.existing(tmp_path / "broken")
    assert run_until(6, compose_for_resume(run.config.read_text(), []), tmp_path, run) == 143
    straight, broken = (
        checkpoint.load_newest(tmp_path / name / "checkpoints", print) for name in ("straight", "broken")
    )
    assert straight["source"]["core_state"].any()
    for name in ("modules", "algorithm", "source", "episodes"):
        assert differences(straight[name], broken[name]) == [], name


@pytest.mark.parametrize(("core", "solved"), [("lstm", True), ("none", False)])
def test_the_t_maze_is_solved_with_memory_and_not_without(core: str, solved: bool, tmp_path: Path) -> None:
    config = compose_config(
        [*RUN, f"policy.core={core}", "policy.core_size=32", "ppo.learning_rate=3e-3", "total_steps=80000", "out=run"]
    )
    assert train(config, tmp_path) == 0
    last = rows(tmp_path / "run")[-1]["episode_return"]
    played = evaluate(*load_checkpoint(tmp_path / "run"), episodes=64, seed=5, deterministic=True, device=CPU).returns
    for mean in (last, statistics.fmean(played)):
        assert mean > 0.9 if solved else mean < 0.5


def test_impala_carries_memory_through_the_t_maze(tmp_path: Path) -> None:
    small = ("algo=impala", "env.pools=2", "num_envs=8", "rollout_length=5", "total_steps=800", "out=run")
    assert train(compose_config([*RUN, *small]), tmp_path) == 0
    assert all(math.isfinite(row["loss/total"]) for row in rows(tmp_path / "run"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("policy.core=rnn",), r"policy\.core=rnn is not one of none, lstm, gru"),
        (("policy.core_size=0",), r"policy\.core_size=0 must be"),
        (
            ("policy.core=lstm", "num_envs=4", "ppo.num_minibatches=8"),
            r"num_minibatches=8 is more than num_envs=4: with",
        ),
    ],
)
def test_impossible_cores_are_refused_by_their_key(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(*overrides)


def test_a_policy_with_a_core_asks_for_its_memory(script: Script) -> None:
    with pytest.raises(ValueError, match="initial_state"):
        make_policy(ScriptedEnv(script), core="lstm").act(script.observations[0])


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Without tf32, which a run of another test may have left on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("kind", KINDS)
def test_a_core_on_the_gpu_equals_one_on_the_cpu(kind: str) -> None:
    core, valid = make_core(kind), random(9, NUM_ENVS) > -1
    features, state = random(9, NUM_ENVS, INPUTS), random(NUM_ENVS, core.state_size, seed=2)
    expected = core(features, state, valid)
    got = core.cuda()(features.cuda(), state.cuda(), valid.cuda())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.to(CPU), b, rtol=1e-4, atol=1e-5)
