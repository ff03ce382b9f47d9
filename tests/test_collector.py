"""The collector writes what a scripted env gave, under the policy that acted, whatever the pools and windows."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import tape
import torch
from fake_env import ModePolicy, Script, ScriptedEnv, make_collector, make_policy, random_script
from torch import Tensor

import envs
from envs.base import StepResult
from trainer import graphs
from trainer.graphs import Graphs
from trainer.normalize import ObservationNormalizer, ValueNormalizer
from trainer.rollout import Rollout

LENGTH, NUM_ENVS = 13, 5
FIELDS = ("observations", "actions", "log_probs", "values", "rewards", "terminated", "truncated", "valid")
BOX = gymnasium.spaces.Box(-0.3, 0.3, (2,))


@pytest.fixture
def script() -> Script:
    script = random_script(LENGTH, NUM_ENVS)
    assert script.terminated.any() and script.truncated.any() and not script.valid.all()
    return script


def fields(rollout: Rollout) -> dict[str, Tensor]:
    """Copies: the next window is written into the same memory."""
    return {name: getattr(rollout, name).clone() for name in FIELDS}


def experienced_normalizer() -> ObservationNormalizer:
    normalizer = ObservationNormalizer((3,), clip=10.0)
    rows = 2 + 3 * torch.randn(100, 3, generator=torch.Generator().manual_seed(8))
    normalizer.running.update(rows, torch.ones(100, dtype=torch.bool))
    return normalizer


def test_rows_hold_what_the_env_gave(script: Script) -> None:
    env = ScriptedEnv(script)
    rollout = make_collector(env, make_policy(env), LENGTH).collect()
    for name in Script._fields:
        assert torch.equal(getattr(rollout, name), getattr(script, name)), name


def test_values_and_log_probs_are_the_behaviour_policys(script: Script) -> None:
    env = ScriptedEnv(script)
    policy = make_policy(env)
    rollout = make_collector(env, policy, LENGTH).collect()
    observations = script.observations[:-1].flatten(0, 1)
    log_probs = policy.distribution(observations).log_prob(rollout.actions.flatten())
    torch.testing.assert_close(rollout.log_probs.flatten(), log_probs)
    torch.testing.assert_close(rollout.values[:-1].flatten(), policy.value(observations))


def test_the_value_one_row_after_an_end_is_that_of_the_final_observation(script: Script) -> None:
    env = ScriptedEnv(script)
    policy = make_policy(env)
    rollout = make_collector(env, policy, LENGTH).collect()
    fillers = script.bootstrapped_from_final
    finals = script.observations[:-1][fillers]
    assert fillers.any()
    torch.testing.assert_close(rollout.values[:-1][fillers], policy.value(finals))
    torch.testing.assert_close(rollout.last_value, policy.value(script.observations[-1]))


@pytest.mark.parametrize("num_pools", [1, 2])
def test_every_turn_of_the_clock_does_the_same(script: Script, num_pools: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few of them, timed, stand for all."""
    env = ScriptedEnv(script, BOX, num_pools)
    collector = make_collector(env, make_policy(env), LENGTH)
    calls: list[str] = []
    turns: list[list[str]] = []

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(env, name)
        return lambda *arguments: (calls.append(name), method(*arguments))[1]

    def count_turns(count: int) -> Iterator[int]:
        for number in range(count):
            calls.clear()
            yield number
            turns.append(list(calls))

    for name in ("send", "recv"):
        monkeypatch.setattr(env, name, noted(name))
    monkeypatch.setattr(env.clock, "turns", count_turns)
    collector.collect()
    assert turns == [["recv", "send"] * num_pools] * (LENGTH - 1)


def test_windows_chain_into_one_long_rollout(script: Script) -> None:
    whole_env, env = ScriptedEnv(script), ScriptedEnv(script)
    whole = make_collector(whole_env, make_policy(whole_env, kind=ModePolicy), LENGTH).collect()
    collector = make_collector(env, make_policy(env, kind=ModePolicy), 4)
    for start in (0, 4, 8):
        part = collector.collect()
        for name in FIELDS:
            got, expected = getattr(part, name), getattr(whole, name)
            assert torch.equal(got, expected[start : start + len(got)]), (name, start)


def test_memories_in_turn_hold_the_windows_that_one_memory_holds(script: Script) -> None:
    one_env, env = ScriptedEnv(script), ScriptedEnv(script)
    one = make_collector(one_env, make_policy(one_env, kind=ModePolicy), 4)
    several = make_collector(env, make_policy(env, kind=ModePolicy), 4)
    memories = [several.rollout.for_envs(NUM_ENVS), several.rollout.for_envs(NUM_ENVS)]
    for window in range(3):
        several.rollout = memories[window % 2]
        got, expected = several.collect(), one.collect()
        assert got is memories[window % 2]
        for name in FIELDS:
            assert torch.equal(getattr(got, name), getattr(expected, name)), (name, window)


@pytest.mark.parametrize("num_pools", [2, 3, NUM_ENVS])
def test_several_pools_equal_one(script: Script, num_pools: int) -> None:
    def two_windows(pools: int) -> tuple[list[dict[str, Tensor]], Tensor]:
        env = ScriptedEnv(script, BOX, pools)
        normalizer = experienced_normalizer()
        collector = make_collector(env, make_policy(env, kind=ModePolicy), 6, normalizer, ValueNormalizer())
        return [fields(collector.collect()) for _ in range(2)], env.actions

    (expected, expected_actions), (got, got_actions) = two_windows(1), two_windows(num_pools)
    torch.testing.assert_close(got_actions, expected_actions)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


class StillEnv(ScriptedEnv):
    """Returns the same tensors at every step."""

    fixed_results = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places: dict[int, StepResult] = {}

    def recv(self, pool: int) -> StepResult:
        result = super().recv(pool)
        places = self._places.setdefault(pool, StepResult(*map(torch.empty_like, result)))
        for place, values in zip(places, result, strict=True):
            place.copy_(values)
        return places


@pytest.mark.parametrize("num_pools", [1, 2])
def test_results_that_lie_still_are_recorded_by_a_graph(
    script: Script, num_pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    monkeypatch.setattr(graphs, "capture", lambda steps, *rest: captured.append(len(steps)) or tape.capture(steps))
    env = StillEnv(script, None, num_pools)
    collector = make_collector(env, make_policy(env), LENGTH, graphs=Graphs(enabled=True))
    for name, got in fields(collector.collect()).items():
        if name in Script._fields:
            assert torch.equal(got, getattr(script, name)[: len(got)]), name
    assert captured == [1] * 2 * num_pools  # a pool's record and its policy step


@pytest.mark.gpu
@pytest.mark.parametrize("num_pools", [1, 2])
def test_rows_of_envpool_that_graphs_record_are_those_of_an_eager_run(num_pools: int) -> None:
    def windows(graphed: bool) -> list[dict[str, Tensor]]:
        options = {"num_threads": 1, "pools": num_pools, "max_episode_steps": 9}
        with closing(envs.make("CartPole-v1", "envpool", 5, device="cuda", **options)) as env:
            policy = make_policy(env, kind=ModePolicy).cuda()
            collector = make_collector(env, policy, LENGTH, graphs=Graphs(enabled=graphed))
            return [fields(collector.collect()) for _ in range(5)]

    expected = windows(False)
    assert not all(window["valid"].all() for window in expected)
    for replayed, eager in zip(windows(True), expected, strict=True):
        for name in FIELDS:
            torch.testing.assert_close(replayed[name], eager[name], rtol=0 if name in Script._fields else 1e-5, atol=0)


def test_raw_actions_are_stored_and_bounded_ones_are_sent(script: Script) -> None:
    env = ScriptedEnv(script, BOX)
    policy = make_policy(env)
    rollout = make_collector(env, policy, LENGTH).collect()
    assert rollout.actions.abs().max() > 0.3
    valid = script.valid[:LENGTH]
    assert torch.equal(env.actions[valid], rollout.actions[valid].clamp(-0.3, 0.3))
    raw = policy.distribution(script.observations[:-1].flatten(0, 1)).log_prob(rollout.actions.flatten(0, 1))
    torch.testing.assert_close(rollout.log_probs.flatten(), raw)


def test_discrete_actions_reach_the_env_with_the_spaces_start(script: Script) -> None:
    env = ScriptedEnv(script, gymnasium.spaces.Discrete(3, start=5))
    rollout = make_collector(env, make_policy(env), LENGTH).collect()
    valid = script.valid[:LENGTH]
    assert torch.equal(env.actions[valid], rollout.actions[valid] + 5)


@pytest.mark.parametrize("num_pools", [1, 2])
def test_a_nan_final_observation_sends_a_finite_action_in_its_filler_row_also_over_windows(num_pools: int) -> None:
    script = random_script(2 * LENGTH, NUM_ENVS)
    filler = ~script.valid
    script.observations[:-1][filler] = torch.nan  # what the policy sees in a filler row is the final observation
    env = ScriptedEnv(script, BOX, num_pools)
    collector = make_collector(env, make_policy(env), LENGTH)
    for _ in range(2):
        collector.collect()
    assert filler[LENGTH:].any() and filler[:LENGTH].any()
    assert torch.isfinite(env.actions).all()
    assert (env.actions[filler] == 0).all()


def test_observations_are_normalized_with_the_statistics_before_the_rollout(script: Script) -> None:
    env, normalizer, frozen = ScriptedEnv(script), experienced_normalizer(), experienced_normalizer()
    policy = make_policy(env)
    rollout = make_collector(env, policy, LENGTH, normalizer).collect()
    expected = frozen(script.observations)
    assert torch.equal(rollout.observations, expected)
    torch.testing.assert_close(rollout.values, policy.value(expected.flatten(0, 1)).view(LENGTH + 1, NUM_ENVS))


def test_the_normalizer_learns_from_exactly_the_valid_rows_of_each_window(script: Script) -> None:
    env, normalizer = ScriptedEnv(script), ObservationNormalizer((3,), clip=10.0)
    collector = make_collector(env, make_policy(env), 4, normalizer)
    for rows in (4, 8, 12):
        collector.collect()
        seen = script.observations[:rows][script.valid[:rows]].double().numpy()
        assert normalizer.running.count == len(seen)
        np.testing.assert_allclose(normalizer.running.mean.numpy(), seen.mean(0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(normalizer.running.variance().numpy(), seen.var(0), rtol=1e-9)


def test_integer_observations_are_normalized_to_floats(script: Script) -> None:
    integers = (40 * script.observations).to(torch.uint8)
    env, normalizer, frozen = (
        ScriptedEnv(script._replace(observations=integers)),
        experienced_normalizer(),
        experienced_normalizer(),
    )
    collector = make_collector(env, make_policy(env), 6, normalizer)
    collector.collect()
    torch.testing.assert_close(collector.rollout.observations, frozen(integers[:7]))
    assert torch.equal(normalizer.running.count, frozen.running.count + script.valid[:6].sum())


def test_values_are_stored_in_units_of_the_reward(script: Script) -> None:
    env, value_normalizer = ScriptedEnv(script), ValueNormalizer()
    policy = make_policy(env)
    value_normalizer.running.update(torch.tensor([90.0, 110.0]), torch.ones(2, dtype=torch.bool))
    rollout = make_collector(env, policy, LENGTH, value_normalizer=value_normalizer).collect()
    in_critics_units = policy.value(script.observations.flatten(0, 1)).view(LENGTH + 1, NUM_ENVS)
    torch.testing.assert_close(rollout.values, 100 + 10 * in_critics_units)


def test_restarting_begins_at_the_envs_first_observation(script: Script) -> None:
    env = ScriptedEnv(script)
    collector = make_collector(env, make_policy(env), 4)
    collector.collect()
    collector.restart()
    assert torch.equal(collector.collect().observations, script.observations[:5])


def test_resuming_goes_on_from_the_observations_that_the_env_returned(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ScriptedEnv(script)
    collector = make_collector(env, make_policy(env), 4)
    restored = torch.full((NUM_ENVS, 3), 7.0)
    monkeypatch.setattr(env, "load_state_dict", lambda state: state["observations"])
    assert collector.load_state_dict({**collector.state_dict(), "env": {"observations": restored}})
    assert torch.equal(collector.collect().observations[0], restored)
