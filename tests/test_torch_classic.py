"""The torch engine against Gymnasium, the transition contract and itself."""

import functools
import math
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from envs.base import EnvError, StepResult
from envs.counter_rng import stream_key, uniform
from envs.torch_classic import TorchVecEnv

TASKS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
FLOAT32_ROUNDING = 2.0**-24
# wider than any task's own range, so that clips, walls, wraps and ends all occur
STATE_RANGES = {
    "CartPole-v1": (3.0, 3.0, 0.4, 3.0),
    "Pendulum-v1": (12.0, 8.0),
    "Acrobot-v1": (math.pi, math.pi, 4 * math.pi, 9 * math.pi),
    "MountainCar-v0": (1.2, 0.07),
    "MountainCarContinuous-v0": (1.2, 0.07),
}


def make(id: str, num_envs: int, **options) -> TorchVecEnv:
    return TorchVecEnv(id, num_envs, device="cpu", **options)


def gymnasium_env(id: str, **options) -> Any:
    env = gymnasium.make(id, disable_env_checker=True, **options)
    env.reset(seed=0)
    return env


def random_actions(env: TorchVecEnv, generator: torch.Generator, steps: int = 1) -> Tensor:
    """Actions ``[steps, num_envs, *shape]``, the continuous ones beyond the bounds."""
    space = env.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return torch.randint(0, int(space.n), (steps, env.num_envs), generator=generator)
    return 3 * torch.rand(steps, env.num_envs, *(space.shape or ()), generator=generator) - 1.5


def states(env: TorchVecEnv) -> np.ndarray:
    """The task's variables ``[num_envs, D]``."""
    saved = env.state_dict()
    return torch.stack([value for name, value in saved.items() if name.startswith("state.")], dim=1).numpy()


def with_states(env: TorchVecEnv, values: np.ndarray, elapsed: int = 0) -> Tensor:
    saved = env.state_dict()
    for index in range(values.shape[1]):
        saved[f"state.{index}"] = torch.as_tensor(values[:, index], dtype=saved["state.0"].dtype)
    return env.load_state_dict(saved | {"elapsed": torch.full_like(saved["elapsed"], elapsed)})


def gymnasium_step(env: Any, state: np.ndarray, action: Tensor):
    """One step from ``state``, with continuous actions in float64 lest numpy rounds the arithmetic to float32."""
    env.unwrapped.state = state.copy()
    observation, reward, terminated, truncated, _ = env.step(
        action.numpy().astype(np.float64) if action.ndim else int(action)
    )
    return np.array(env.unwrapped.state, dtype=np.float64), observation, float(reward), terminated, truncated


def assert_row_equal(id: str, state: np.ndarray, result: StepResult, row: int, expected) -> None:
    next_state, observation, reward, terminated, truncated = expected
    if id == "MountainCarContinuous-v0":  # Gymnasium stores this state in float32
        np.testing.assert_array_equal(state[row].astype(np.float32), next_state)
    else:
        np.testing.assert_allclose(state[row], next_state, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.observations[row].numpy(), observation, rtol=FLOAT32_ROUNDING, atol=1e-12)
    assert float(result.rewards[row]) == pytest.approx(reward, rel=0, abs=1e-12)
    assert bool(result.terminated[row]) == terminated
    assert bool(result.truncated[row]) == (truncated and not terminated)


def assert_same(first: StepResult, second: StepResult) -> None:
    for name, a, b in zip(StepResult._fields, first, second, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("id", TASKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_spaces_equal_gymnasium(id: str, dtype: str) -> None:
    env, reference = make(id, 1, dtype=dtype), gymnasium_env(id)
    space: Any = env.single_observation_space
    assert env.single_action_space == reference.action_space
    np.testing.assert_array_equal(space.low, reference.observation_space.low)
    np.testing.assert_array_equal(space.high, reference.observation_space.high)
    assert space.dtype == env.reset().numpy().dtype == np.dtype(dtype)


@pytest.mark.parametrize("id", TASKS)
def test_one_step_from_anywhere_equals_gymnasium(id: str) -> None:
    count, generator = 2000, torch.Generator().manual_seed(3)
    env, reference = make(id, count, dtype="float64"), gymnasium_env(id, max_episode_steps=10**6)
    env.reset()
    start = np.random.default_rng(5).uniform(-1, 1, (count, len(STATE_RANGES[id]))) * STATE_RANGES[id]
    with_states(env, start)
    actions = random_actions(env, generator)[0]
    result = env.step(actions)
    after = states(env)
    for row in range(count):
        reference.reset()
        assert_row_equal(id, after, result, row, gymnasium_step(reference, start[row], actions[row]))
    assert 0 < int(result.terminated.sum()) < count or id == "Pendulum-v1"


@pytest.mark.parametrize("id", TASKS)
def test_long_trajectories_equal_gymnasium_step_for_step_with_filler_after_every_end(id: str) -> None:
    env, generator = make(id, 3, dtype="float64", max_episode_steps=83, seed=4), torch.Generator().manual_seed(1)
    references = [gymnasium_env(id, max_episode_steps=83) for _ in range(3)]
    env.reset()
    before, ended = states(env), [False] * 3
    for actions in random_actions(env, generator, steps=500):
        result = env.step(actions)
        after = states(env)
        for row, reference in enumerate(references):
            assert bool(result.valid[row]) != ended[row]
            if ended[row]:
                assert result.rewards[row] == 0
                assert not result.terminated[row]
                assert not result.truncated[row]
                reference.reset()
            else:
                assert_row_equal(id, after, result, row, gymnasium_step(reference, before[row], actions[row]))
            ended[row] = bool(result.terminated[row] | result.truncated[row])
        before = after
    assert int(env.state_dict()["episode"].min()) > 5


@pytest.mark.parametrize("id", TASKS)
def test_the_default_time_limit_is_gymnasiums(id: str) -> None:
    limit = gymnasium_env(id).spec.max_episode_steps
    env = make(id, 1)
    env.reset()
    with_states(env, states(env), elapsed=limit - 2)
    actions = torch.zeros_like(random_actions(env, torch.Generator())[0])
    assert [bool(env.step(actions).truncated) for _ in range(3)] == [False, True, False]


def test_a_row_that_ends_both_ways_is_terminated_only() -> None:
    env = make("CartPole-v1", 2, max_episode_steps=7)
    env.reset()
    with_states(env, np.array([[2.39, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), elapsed=6)
    result = env.step(torch.ones(2, dtype=torch.int64))
    assert result.terminated.tolist() == [True, False]
    assert result.truncated.tolist() == [False, True]
    assert result.rewards.tolist() == [1.0, 1.0]


def test_the_step_that_ends_an_episode_returns_the_final_observation_and_the_next_one_a_start() -> None:
    env = make("CartPole-v1", 1)
    env.reset()
    with_states(env, np.array([[2.39, 3.0, 0.0, 0.0]]))
    push = torch.ones(1, dtype=torch.int64)
    assert env.step(push).observations[0, 0] > 2.4
    assert env.step(push).observations.abs().max() <= 0.05


def test_filler_rows_ignore_their_action() -> None:
    env = make("Pendulum-v1", 2, max_episode_steps=1)
    env.reset()
    env.step(torch.zeros(2, 1))
    result = env.step(torch.full((2, 1), math.nan))
    assert not result.valid.any()
    assert not result.terminated.any()
    assert env.counters() == {"faulty_steps": 0}


@pytest.mark.parametrize("id", TASKS)
def test_float32_stays_within_rounding_of_float64(id: str) -> None:
    double, single = make(id, 64, dtype=torch.float64), make(id, 64)
    torch.testing.assert_close(single.reset(), double.reset().float(), rtol=1e-6, atol=1e-6)
    actions = random_actions(double, torch.Generator().manual_seed(0))[0]
    torch.testing.assert_close(
        single.step(actions).observations, double.step(actions).observations.float(), rtol=1e-5, atol=1e-5
    )


def starts(seed: int, rank: int = 0, epoch: int = 0, num_envs: int = 4, resets: int = 3) -> Tensor:
    """First observations ``[resets * num_envs, 4]``."""
    env = make("CartPole-v1", num_envs, seed=seed, rank=rank, world_size=4)
    env.reseed(epoch)
    return torch.cat([env.reset() for _ in range(resets)])


def test_starts_are_a_function_of_seed_rank_and_epoch() -> None:
    assert torch.equal(starts(5, 1, 2), starts(5, 1, 2))


def test_no_start_is_shared_between_envs_episodes_ranks_seeds_and_epochs() -> None:
    every = [starts(seed, rank, epoch) for seed in (0, 1, 43, 2**32, 2**80) for rank in range(4) for epoch in (0, 1, 7)]
    values = torch.cat(every).flatten()
    assert len(values.unique()) > 0.999 * len(values)  # float32 holds few enough numbers that a pair may meet
    assert len(torch.cat(every).unique(dim=0)) == len(torch.cat(every))


def test_starts_do_not_depend_on_the_number_of_envs_or_on_the_actions() -> None:
    assert torch.equal(starts(1, num_envs=3, resets=1), starts(1, num_envs=7, resets=1)[:3])
    episodes = []
    for action in (0, 1):
        env = make("CartPole-v1", 1, seed=9)
        env.reset()
        rows = [env.step(torch.tensor([action])) for _ in range(60)]
        episodes.append(torch.stack([row.observations[0] for row in rows if not row.valid][:3]))
    assert torch.equal(*episodes)


@pytest.mark.parametrize("num_envs, resets", [(20000, 1), (20, 1000)])
def test_starts_are_uniform_in_gymnasiums_box_over_envs_and_over_episodes(num_envs: int, resets: int) -> None:
    env = make("Pendulum-v1", num_envs, seed=2)
    draws = []
    for _ in range(resets):
        env.reset()
        draws.append(states(env))
    fractions: np.ndarray = np.concatenate(draws) / [2 * math.pi, 2.0] + 0.5
    count = len(fractions)
    distance = np.abs(np.sort(fractions, axis=0) - (np.arange(count)[:, None] + 0.5) / count).max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, level 0.001
    assert abs(np.corrcoef(fractions[:, 0], fractions[:, 1])[0, 1]) < 4 / math.sqrt(count)


def test_the_generator_is_splitmix64() -> None:
    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    key = stream_key(7, rank=1, epoch=2)
    first, second = (int(word) % 2**64 for word in key)
    numbers = uniform(key, torch.tensor([0, 70000]), torch.tensor([1, 2**31 + 5]), torch.arange(3))
    for column, (env, episode) in enumerate([(0, 1), (70000, 2**31 + 5)]):
        for lane in range(3):
            stream = mix((first + (env << 32) + episode) % 2**64)
            word = mix((stream + lane * 0x9E3779B97F4A7C15) % 2**64 ^ second)
            assert float(numbers[lane, column]) == (word >> 11) * 2.0**-53


@pytest.mark.parametrize("id", TASKS)
def test_a_restored_state_continues_bit_for_bit(id: str) -> None:
    env, generator = make(id, 5, seed=3, max_episode_steps=11), torch.Generator().manual_seed(0)
    env.reset()
    before, after = random_actions(env, generator, 17), random_actions(env, generator, 40)
    last = [env.step(actions) for actions in before][-1]
    saved = env.state_dict()
    straight = [env.step(actions) for actions in after]

    restored = make(id, 5, seed=8, max_episode_steps=11)
    assert torch.equal(restored.load_state_dict(saved), last.observations)
    for actions, expected in zip(after, straight, strict=True):
        assert_same(restored.step(actions), expected)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    env = make("CartPole-v1", 3)
    env.reset()
    saved = env.state_dict()
    missing = {name: value for name, value in saved.items() if name != "key"}
    for wrong in (make("CartPole-v1", 2).state_dict(), missing, saved | {"elapsed": saved["elapsed"].long()}):
        with pytest.raises(EnvError, match="expected"):
            env.load_state_dict(wrong)
    assert all(torch.equal(value, saved[name]) for name, value in env.state_dict().items())


@pytest.mark.parametrize(
    "id, actions, faulty",
    [
        ("Pendulum-v1", [[0.5], [math.nan], [math.inf]], [False, True, True]),
        ("MountainCarContinuous-v0", [[0.5], [-math.inf], [1e30]], [False, True, True]),  # 1e30 squared is no float32
        ("CartPole-v1", [1, 2, -1], [False, True, True]),
        ("Acrobot-v1", [2, 3, 2**40], [False, True, True]),
    ],
)
def test_an_unusable_action_ends_its_env_alone_and_is_counted(id: str, actions: list, faulty: list[bool]) -> None:
    env, undisturbed = make(id, 3, seed=1), make(id, 3, seed=1)
    start = env.reset()
    undisturbed.reset()
    good = torch.tensor([actions[0]] * 3)
    result, expected = env.step(torch.tensor(actions)), undisturbed.step(good)
    assert result.terminated.tolist() == faulty
    assert result.rewards.tolist() == [float(expected.rewards[0]), 0.0, 0.0]
    assert torch.equal(result.observations[1:], start[1:])
    assert env.counters() == {"faulty_steps": 2}
    assert env.counters() == {"faulty_steps": 0}
    for _ in range(5):
        assert_same(StepResult(*(x[:1] for x in env.step(good))), StepResult(*(x[:1] for x in undisturbed.step(good))))


@pytest.mark.parametrize(
    "actions, message",
    [
        (torch.zeros(3), "actions are"),
        (torch.zeros(2, 1), "actions are"),
        (torch.zeros(3, 2), "actions are"),
        (torch.zeros(3, 1, dtype=torch.int64), "actions are"),
        (torch.zeros(3, 1, device="meta"), "actions are on meta"),
    ],
)
def test_actions_of_a_wrong_form_are_refused_and_the_env_stays_usable(actions: Tensor, message: str) -> None:
    env = make("Pendulum-v1", 3)
    start = env.reset()
    with pytest.raises(EnvError, match=message):
        env.step(actions)
    assert torch.equal(env.load_state_dict(env.state_dict()), start)
    assert env.step(torch.zeros(3, 1)).valid.all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"id": "Ant-v5"}, "env.id=Ant-v5"),
        ({"num_envs": 0}, "num_envs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"dtype": "float16"}, "env.dtype=float16"),
        ({"max_episode_steps": 0}, "env.max_episode_steps=0"),
        ({"pools": 2}, "no option pools"),
        ({"device": "nonsense"}, "device=nonsense"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        TorchVecEnv(**({"id": "CartPole-v1", "num_envs": 2, "device": "cpu"} | options))


def test_calls_out_of_order_are_refused() -> None:
    env, actions = make("CartPole-v1", 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(EnvError, match="before its first reset"):
        env.send(0, actions)
    env.reset()
    with pytest.raises(EnvError, match="no step"):
        env.recv(0)
    with pytest.raises(EnvError, match="pool=1"):
        env.send(1, actions)
    env.close()
    env.close()
    with pytest.raises(EnvError, match="before its first reset"):
        env.step(actions)


def test_actions_that_carry_gradients_or_strides_step_alike() -> None:
    env, other = make("Pendulum-v1", 3), make("Pendulum-v1", 3)
    env.reset()
    other.reset()
    wide = torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_()
    result = env.step(wide[:, :1])
    assert not result.rewards.requires_grad
    with torch.inference_mode():
        assert_same(other.step(wide[:, :1].clone()), result)
    assert_same(other.step(wide[:, :1]), env.step(wide[:, :1]))


def test_the_compiled_step_equals_the_eager_one() -> None:
    env = make("Pendulum-v1", 33, max_episode_steps=5, seed=6)
    compiled = make("Pendulum-v1", 33, max_episode_steps=5, seed=6, compile=True)
    assert torch.equal(env.reset(), compiled.reset())
    for actions in random_actions(env, torch.Generator().manual_seed(2), steps=13):
        expected, result = env.step(actions), compiled.step(actions)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_many_compiled_envs_live_in_one_process_without_recompiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    one_each = torch._dynamo.config.patch(recompile_limit=1)
    with one_each, warnings.catch_warnings(action="error", category=RuntimeWarning):
        envs = [make("MountainCar-v0", num_envs, compile=True) for num_envs in (1, 2, 3)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for env in envs:
            env.reset()
            assert env.step(torch.zeros(env.num_envs, dtype=torch.int64)).valid.all()


def test_without_a_compiler_a_warning_says_so_and_the_env_steps_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments, **options):
        raise RuntimeError("no working compiler was found\ndetails")

    monkeypatch.setattr(torch, "compile", lambda step, **options: broken)
    with pytest.warns(RuntimeWarning, match="CartPole-v1 steps eagerly, .*no working compiler was found$"):
        env = make("CartPole-v1", 2, compile=True)
    env.reset()
    with warnings.catch_warnings(action="error"):
        assert env.step(torch.zeros(2, dtype=torch.int64)).valid.all()


@pytest.mark.gpu
@pytest.mark.parametrize("id", TASKS)
def test_a_captured_step_replays_new_starts_and_follows_a_reseed(id: str) -> None:
    options = {"seed": 1, "max_episode_steps": 3, "dtype": torch.float64}
    eager = TorchVecEnv(id, 65, device="cuda", compile=False, **options)
    env = TorchVecEnv(id, 65, device="cuda", **options)
    host = torch.Generator().manual_seed(0)
    static = random_actions(env, host)[0].cuda()
    eager.reset()
    env.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = env.step(static)
    fillers = []
    for step, actions in enumerate(random_actions(env, host, steps=24)):
        if step == 12:
            for each in (eager, env):
                each.reseed(5)
                each.reset()
        static.copy_(actions)
        graph.replay()
        expected = eager.step(actions.cuda())
        torch.testing.assert_close(tuple(captured), tuple(expected), rtol=1e-9, atol=1e-9)
        fillers += [captured.observations[0].clone()] if not captured.valid[0] else []
    assert len(torch.stack(fillers).unique(dim=0)) == len(fillers) >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("id", TASKS)
def test_a_step_never_synchronizes_with_the_host_and_equals_the_cpu(id: str) -> None:
    env, reference = TorchVecEnv(id, 65, device="cuda", dtype="float64"), make(id, 65, dtype="float64")
    torch.testing.assert_close(env.reset().cpu(), reference.reset(), rtol=1e-12, atol=1e-12)
    actions = random_actions(reference, torch.Generator().manual_seed(0))[0]
    on_device = actions.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = env.step(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(tuple(x.cpu() for x in result), tuple(reference.step(actions)), rtol=1e-9, atol=1e-9)
