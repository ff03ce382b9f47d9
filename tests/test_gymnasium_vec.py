"""The Gymnasium engine: rows of `gymnasium.make`, spaces, options, and what an env of one's own may do wrong."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import gymnasium_toys as toys
import numpy as np
import pytest
import torch
from torch import Tensor

import envs
from envs.base import EnvError, VecEnv
from envs.seeding import first_seed
from trainer.builder import make_env
from trainer.config import EnvConfig

Make = Callable[..., VecEnv]
MODES = ("sync", "async")


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def build(id: str, num_envs: int, mode: str = "sync", **options: Any) -> VecEnv:
        made.append(envs.make(id, "gymnasium", num_envs, vectorization_mode=mode, **options))
        return made[-1]

    yield build
    for env in made:
        env.close()
    assert not multiprocessing.active_children()


def counter_actions(count: int, num_envs: int) -> Tensor:
    choices = torch.rand(count, num_envs, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([3, 5])
    return choices.long() + torch.tensor([1, -2])


def rollout(env: VecEnv, actions: Tensor) -> list[Tensor]:
    """The first observations, then observations, rewards and flags ``[count, num_envs, ...]``."""
    first = env.reset().clone()
    results = [[field.clone() for field in env.step(batch)] for batch in actions]
    return [first, *(torch.stack(field) for field in zip(*results, strict=True))]


def test_rows_are_those_of_single_envs_with_seeds_of_their_own(make: Make) -> None:
    env = make("CartPole-v1", 3, seed=5, rank=1, world_size=2, max_episode_steps=12)
    actions = torch.randint(2, (40, 3), generator=torch.Generator().manual_seed(1))
    first, *rows = rollout(env, actions)
    for n in range(3):
        single = gymnasium.make("CartPole-v1", max_episode_steps=12)
        start, _ = single.reset(seed=first_seed(3, seed=5, rank=1, world_size=2) + n)
        assert np.array_equal(first[n], start)
        ended = False
        for t, action in enumerate(actions[:, n].tolist()):
            valid = not ended
            row: Any = (single.reset()[0], 0.0, False, False) if ended else single.step(action)[:4]
            observation, reward, terminated, truncated = row
            ended = terminated or truncated
            expected = (observation, reward, terminated, truncated and not terminated, valid)
            found = [field[t, n].numpy() for field in rows]
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_modes_and_pools_change_no_bit(make: Make) -> None:
    actions = counter_actions(11, 5)
    expected = rollout(make("Counter", 5, seed=3), actions)
    for mode, pools, at_a_time in (("sync", 3, 0), ("async", 0, 0), ("async", 1, 2)):
        found = rollout(make("Counter", 5, mode, seed=3, pools=pools, num_threads=at_a_time), actions)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode, pools", [("sync", 1), ("async", 2)])
def test_only_envs_in_processes_step_in_two_pools_by_themselves(mode: str, pools: int, make: Make) -> None:
    assert len(make("CartPole", 3, mode).pools) == pools


def test_named_parts_of_any_number_type_become_one_float32_vector(make: Make) -> None:
    env = make("Counter", 2)
    first, observations, rewards, terminated, truncated, valid = rollout(env, counter_actions(5, 2))
    assert env.single_observation_space.shape == (3,) and observations.dtype == torch.float32
    assert torch.equal(observations[:, 0, 1], torch.tensor([1.0, 2, 3, 4, 0]))
    assert torch.equal(observations[:, :, 2], -observations[:, :, 1])
    assert torch.equal(observations[:4, :, 0], first[None, :, 0].expand(4, 2))
    assert torch.equal(rewards[:4], counter_actions(5, 2)[:4].sum(-1).float()) and not rewards[4].any()
    assert terminated[3].all() and not truncated.any(), "an end by itself on the last step of the limit is terminated"
    assert torch.equal(valid[:, 0], torch.tensor([True] * 4 + [False]))


@pytest.mark.parametrize("mode", MODES)
def test_frames_stay_uint8_and_discrete_actions_keep_their_start(mode: str, make: Make) -> None:
    env = make("toys/Frames", 3, mode)
    _, observations, *_ = rollout(env, torch.tensor([[1, 2, 1], [2, 2, 1]]))
    assert env.id == "toys/Frames-v0" and observations.dtype == torch.uint8
    assert observations[:, :, 0, 0, 0].tolist() == [[1, 2, 1], [2, 2, 1]]
    with pytest.raises(EnvError, match=r"env 2 got action 0: it must be in 1 \.\. 2"):
        env.step(torch.tensor([1, 2, 0]))


def test_wrappers_of_the_registration_and_options_of_the_constructor_apply(make: Make) -> None:
    actions = counter_actions(3, 2)
    plain, doubled = make("Counter", 2), make("DoubledCounter", 2, reward=-3.0)
    assert torch.equal(rollout(doubled, actions)[2], -6 * rollout(plain, actions)[2])


def test_the_bounds_of_actions_are_within_those_of_the_env(make: Make) -> None:
    env = make("Strict", 2)
    env.reset()
    space = env.single_action_space
    assert isinstance(space, gymnasium.spaces.Box) and np.allclose(space.high, 0.3) and np.allclose(space.low, -0.1)
    assert env.step(torch.from_numpy(np.stack([space.low, space.high]))).valid.all()


@pytest.mark.parametrize("mode", MODES)
def test_sent_actions_may_be_overwritten_at_once(mode: str, make: Make) -> None:
    env = make("toys/Frames", 2, mode, pools=1)
    env.reset()
    actions = torch.tensor([1, 2])
    env.send(0, actions)
    actions.fill_(-1)
    assert env.recv(0).observations[:, 0, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_send_and_recv_take_turns(mode: str, make: Make) -> None:
    env = make("toys/Frames", 2, mode, pools=2)
    env.reset()
    with pytest.raises(EnvError, match=r"envs 1 \.\. 1 of toys/Frames-v0: recv without a send"):
        env.recv(1)
    env.send(1, torch.tensor([1]))
    with pytest.raises(EnvError, match=r"envs 1 \.\. 1 of toys/Frames-v0: send before the recv"):
        env.send(1, torch.tensor([1]))
    env.reset()  # drops the step under way
    assert env.step(torch.tensor([1, 2])).valid.all()


@pytest.mark.parametrize(
    "id, options, message",
    [
        ("CartPole", {"polle": 1}, r"env\.options\.polle: CartPole-v1 has no such option"),
        ("CartPole", {"mode": "thread"}, r"env\.options\.vectorization_mode=thread: it must be sync or"),
        ("CartPole", {"timeout": 0.0}, r"env\.timeout=0\.0: it must be above 0 seconds"),
        ("CartPole", {"num_threads": -1}, r"env\.num_threads=-1: it must be 0 \(automatic\) or more"),
        ("CartPole", {"pools": 3}, r"env\.pools=3: it must be 0 \(automatic\) or in 1 \.\. num_envs=2"),
        ("CartPole", {"pools": -1}, r"env\.pools=-1: it must be 0"),
        (
            "CartPole",
            {"max_episode_steps": 0},
            r"env\.id=CartPole-v1: Gymnasium cannot make it: \w+: .*\(\w+\.py:\d+\)",
        ),
        ("Counter", {"fault": "constructor"}, r"cannot make it: FileNotFoundError: no map \(gymnasium_toys\.py:\d+\)$"),
        ("WholeNumbers", {}, r"actions of Box\(0, 3, .*; only Discrete, MultiDiscrete and Box of floats"),
        ("FrozenLake", {}, r"observations of Discrete; only Box and Dict are supported"),
        ("NoSuchEnv", {}, r"env\.id=NoSuchEnv is unknown to env\.engine=gymnasium"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(id: str, options: dict[str, Any], message: str, make: Make) -> None:
    with pytest.raises(EnvError, match=message) as caught:
        make(
            id, 2, **({"mode": options.pop("vectorization_mode")} if "vectorization_mode" in options else {}), **options
        )
    assert "\n" not in str(caught.value)


def break_down(env: VecEnv) -> None:
    env.reset()
    for batch in counter_actions(toys.BOOM_AT, env.num_envs):
        env.step(batch)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium shows the trace
@pytest.mark.parametrize(
    "mode, fault, message",
    [
        ("sync", "raise", r"env 3 of Counter-v0: ValueError: boom \(gymnasium_toys\.py:\d+\)$"),
        ("async", "raise", r"env 3 of Counter-v0: ValueError: boom \(gymnasium_toys\.py:\d+\)$"),
        ("async", "exit", r"envs 2 \.\. 3 of Counter-v0: a process ended: that of env 3 with exit code 9$"),
        ("sync", "sys.exit", r"env 3 of Counter-v0: SystemExit: 0 \(gymnasium_toys\.py:\d+\)$"),
        ("sync", "four values", r"env 0 of Counter-v0: ValueError: not enough values to unpack"),
        ("async", "four values", r"env \d of Counter-v0: (ValueError: not enough|TypeError: .* missing)"),
        ("sync", "narrow part", r"env 0 .*: an observation, steps: is \[1, 1\] int64, .* says \[2, 1\] int64$"),
        ("async", "narrow part", r"env \d .*: an observation, steps: is \[1, 1\] int64, .* says \[2, 1\] int64$"),
        ("async", "hang", r"env 3 of Counter-v0: no answer for env\.timeout=0\.5 s, it is stuck$"),
    ],
)
def test_an_env_that_fails_is_named_and_leaves_no_process(mode: str, fault: str, message: str, make: Make) -> None:
    env = make("Counter", 4, mode, timeout=0.5, pools=2, fault=fault, only=3)
    started = time.monotonic()
    with pytest.raises(EnvError, match=message):
        break_down(env)
    env.close()
    assert time.monotonic() - started < 5
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_envs_are_named_by_their_numbers_over_all_ranks(mode: str, make: Make) -> None:
    env = make("Counter", 2, mode, rank=1, world_size=2, fault="raise", only=3)
    with pytest.raises(EnvError, match=r"^env 3 of Counter-v0: ValueError: boom"):
        break_down(env)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", r"envs 0 \.\. 3 of Counter-v0: a process ended: that of env 1 with exit code 9$"),
        ("hang", r"env(s [0-3, ]+| 1) of Counter-v0: no answer for env\.timeout=2\.0 s, .*stuck$"),
    ],
)
def test_an_env_that_fails_in_its_turn_is_told_of_though_others_wait_for_theirs(
    fault: str, message: str, make: Make
) -> None:
    env = make("Counter", 4, "async", timeout=2.0, pools=1, num_threads=1, fault=fault, only=1)
    started = time.monotonic()
    with pytest.raises(EnvError, match=message):
        break_down(env)
    env.close()
    assert time.monotonic() - started < 30


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_an_observation_of_another_shape_or_kind_than_declared_is_refused(mode: str, make: Make) -> None:
    for options, got in (({"height": 4}, r"\[2, 4, 3\] uint8"), ({"dtype": "float32"}, r"\[2, 3, 3\] float32")):
        env = make("toys/Frames", 2, mode, **options)
        env.reset()
        with pytest.raises(EnvError, match=rf"env \d of toys/Frames-v0: an observation is {got}, .* \[2, 3, 3\] uint8"):
            env.step(torch.tensor([1, 1]))


def test_signals_to_all_processes_are_left_to_the_run(make: Make) -> None:
    env = make("toys/Frames", 2, "async")
    env.reset()
    for process in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(process.pid or 0, number)
    assert env.step(torch.tensor([1, 2])).valid.all()


@pytest.mark.filterwarnings("ignore:.*pending call to `step`")
def test_an_env_that_nobody_closed_leaves_no_process() -> None:
    env = envs.make("toys/Frames", "gymnasium", 2, vectorization_mode="async")
    env.reset()
    env.send(0, torch.tensor([1]))
    assert len(multiprocessing.active_children()) == 2
    del env
    gc.collect()
    assert not multiprocessing.active_children()


def test_the_settings_of_a_run_reach_the_engine() -> None:
    config = EnvConfig(
        id="Counter", engine="gymnasium", pools=2, timeout=7.0, max_episode_steps=2, options={"reward": 0.5}
    )
    env = make_env(config, 3, torch.device("cpu"), seed=1)
    _, _, rewards, _, truncated, _ = rollout(env, counter_actions(2, 3))
    assert len(env.pools) == 2 and truncated[1].all()
    assert torch.equal(rewards, 0.5 * counter_actions(2, 3).sum(-1))
    env.close()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_cuda_results_equal_cpu_results_and_lie_still(mode: str, make: Make) -> None:
    on_cpu, on_cuda = make("Counter", 5, mode, pools=2), make("Counter", 5, mode, pools=2, device="cuda")
    assert torch.equal(on_cpu.reset(), on_cuda.reset().cpu())
    places = set()
    for batch in counter_actions(9, 5):
        for pool, columns in enumerate(on_cpu.pools):
            on_cpu.send(pool, batch[columns])
            on_cuda.send(pool, batch[columns].cuda())
            found, expected = on_cuda.recv(pool), on_cpu.recv(pool)
            places.add((pool, *(field.data_ptr() for field in found)))
            for one, other in zip(found, expected, strict=True):
                assert one.device.type == "cuda" and torch.equal(one.cpu(), other)
    assert on_cuda.fixed_results and len(places) == 2
