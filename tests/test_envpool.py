"""The EnvPool engine: what C++ would not survive, pools in turns, staging, threads and time."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import envs
from envs import envpool_worker, staging
from envs.base import EnvError, VecEnv
from envs.staging import Field, HostCopy, StagingRing

Make = Callable[..., VecEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def build(id: str, num_envs: int, **options: Any) -> VecEnv:
        made.append(envs.make(id, "envpool", num_envs, **{"num_threads": 1, **options}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def random_actions(env: VecEnv, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if isinstance(env.single_action_space, gymnasium.spaces.Discrete):
        choices = int(env.single_action_space.n)
        return list(torch.randint(choices, (count, env.num_envs), generator=generator))
    shape = (count, env.num_envs, *(env.single_action_space.shape or ()))
    return list(torch.rand(shape, generator=generator) * 2 - 1)


def rollout(env: VecEnv, count: int) -> list[Tensor]:
    """The first observations, then observations, rewards and flags ``[count, num_envs, ...]`` under random actions."""
    first = env.reset()
    results = [env.step(batch) for batch in random_actions(env, count)]
    return [first, *(torch.stack(field) for field in zip(*results, strict=True))]


@pytest.mark.parametrize("id", ["CartPole-v1", "Hopper-v5"])
def test_pools_and_threads_change_no_bit(id: str, make: Make) -> None:
    expected = rollout(make(id, 7, pools=1, num_threads=1), 60)
    assert not expected[-1].all()  # some episodes ended
    for pools, num_threads in ((1, 3), (2, 1), (3, 2), (7, 1)):
        found = rollout(make(id, 7, pools=pools, num_threads=num_threads), 60)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_envs, pools", [(1, (slice(0, 1),)), (3, (slice(0, 1), slice(1, 3)))])
def test_envs_lie_in_two_pools_unless_there_is_one_alone(make: Make, num_envs: int, pools: tuple[slice, ...]) -> None:
    assert make("CartPole", num_envs).pools == pools


def test_pools_that_do_not_divide_differ_by_one_env(make: Make) -> None:
    assert make("CartPole", 7, pools=3).pools == (slice(0, 2), slice(2, 4), slice(4, 7))


def test_cartpole_equals_gymnasium_step_for_step(make: Make) -> None:
    env = make("CartPole-v1", 3)
    starts = env.reset().double().numpy()
    actions = random_actions(env, 40)
    results = [env.step(batch) for batch in actions]
    for column, start in enumerate(starts):
        reference = gymnasium.make("CartPole-v1")
        reference.reset(seed=0)
        reference.unwrapped.state = start  # type: ignore[attr-defined]
        for batch, result in zip(actions, results, strict=True):
            observation, reward, terminated, truncated, _ = reference.step(int(batch[column]))
            # float32 starts against float64: the difference grows with the pole's own instability
            np.testing.assert_allclose(result.observations[column], observation, rtol=1e-4, atol=1e-5)
            assert result.rewards[column] == reward
            assert (bool(result.terminated[column]), bool(result.truncated[column])) == (terminated, truncated)
            if terminated:
                break


def test_images_stay_uint8(make: Make) -> None:
    env = make("Pong", 2, pools=1)
    assert env.id == "Pong-v5" and env.single_observation_space.dtype == np.uint8
    first = env.reset()
    result = env.step(random_actions(env, 1)[0])
    for observations in (first, result.observations):
        assert observations.dtype == torch.uint8
        assert observations.shape == (2, *(env.single_observation_space.shape or ()))


def test_observations_lie_within_their_space_where_the_engine_gives_placeholders_for_bounds(make: Make) -> None:
    env = make("HumanoidStand-v1", 2, seed=1)
    observations = env.reset().numpy()
    assert (observations < 0).any()
    assert all(env.single_observation_space.contains(row) for row in observations)


def test_results_are_fresh_memory(make: Make) -> None:
    env = make("CartPole-v1", 4)
    held = [env.reset(), *(env.step(batch).observations for batch in random_actions(env, 5))]
    copies = [tensor.clone() for tensor in held]
    rollout(env, 5)
    assert all(torch.equal(one, copy) for one, copy in zip(held, copies, strict=True))


def test_sent_actions_may_be_overwritten_at_once(make: Make) -> None:
    env, twin = make("Hopper-v5", 4, pools=1, seed=1), make("Hopper-v5", 4, pools=1, seed=1)
    env.reset(), twin.reset()
    actions = random_actions(env, 1)[0]
    expected = twin.step(actions)
    env.send(0, actions)
    actions.fill_(math.nan)
    assert torch.equal(env.recv(0).observations, expected.observations)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_names_its_env_and_reaches_nothing(bad: float, make: Make) -> None:
    env, twin = make("Hopper-v5", 5, seed=1), make("Hopper-v5", 5, seed=1)
    env.reset(), twin.reset()
    actions = random_actions(env, 1)[0]
    broken = actions.clone()
    broken[3, 1] = bad
    with pytest.raises(EnvError, match=rf"env 3 got action \[.*{bad}.*\]: every value must be finite"):
        env.send(1, broken[env.pools[1]])
    assert torch.equal(env.step(actions).observations, twin.step(actions).observations)


@pytest.mark.parametrize("bad", [-1, 2, 2**31, -(2**40)])
def test_a_discrete_action_out_of_range_names_its_env(bad: int, make: Make) -> None:
    env = make("CartPole-v1", 5)
    env.reset()
    with pytest.raises(EnvError, match=rf"env 4 got action {bad}: it must be in 0 \.\. 1"):
        env.send(1, torch.tensor([0, 1, bad]))
    assert env.step(torch.zeros(5, dtype=torch.int64)).valid.all()


def test_send_and_recv_take_turns(make: Make) -> None:
    env = make("CartPole-v1", 2)
    env.reset()
    with pytest.raises(EnvError, match="recv without a send"):
        env.recv(1)
    env.send(1, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(EnvError, match=r"envs 1 \.\. 1 of CartPole-v1: send before the recv"):
        env.send(1, torch.zeros(1, dtype=torch.int64))
    env.reset()  # drops the step under way
    assert env.step(torch.zeros(2, dtype=torch.int64)).valid.all()


def test_the_clock_sees_waiting_and_copies_apart(make: Make) -> None:
    phases = []

    class Clock:
        @contextmanager
        def phase(self, name: str, /) -> Iterator[None]:
            phases.append(name)
            yield

    env = make("CartPole-v1", 2, pools=1)
    env.reset()
    env.clock = Clock()
    env.step(torch.zeros(2, dtype=torch.int64))
    assert phases == ["transfer", "env_step", "env_step", "transfer"]


class FakePool:
    """An engine's pool whose answers are what ``answer`` returns for its number of envs."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs: int, answer: Callable[[int], Any]) -> None:
        self._recv = lambda: answer(num_envs)

    def async_reset(self) -> None: ...

    def recv(self) -> Any:
        return self._recv()


def rows(ids: list[int]) -> tuple[Any, ...]:
    column = np.array(ids)
    info = {"env_id": column, "elapsed_step": column}
    return column[:, None], column.astype(np.float32), column > 9, column > 9, info


def worker(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], Any], timeout: float = 5.0) -> Any:
    fake = SimpleNamespace(make_gymnasium=lambda id, num_envs: FakePool(num_envs, answer))
    monkeypatch.setattr(envpool_worker, "envpool", fake)
    return envpool_worker.PoolWorker("Toy-v0", slice(8, 12), timeout, {}, lambda observations: observations)


def test_rows_are_placed_by_env_id(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = worker(monkeypatch, lambda n: rows([2, 0, 3, 1])).reset()
    assert batch.observations[:, 0].tolist() == batch.elapsed.tolist() == batch.rewards.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], []])
def test_a_missing_or_repeated_row_is_an_error(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvError, match=r"pool of envs 8 \.\. 11 of Toy-v0: got .* expected one row of each of 4"):
        worker(monkeypatch, lambda n: rows(ids)).reset()


def test_an_error_inside_the_engine_keeps_its_type_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(num_envs: int) -> Any:
        raise RuntimeError("boom")

    with pytest.raises(EnvError, match=r"envs 8 \.\. 11 of Toy-v0: RuntimeError: boom") as caught:
        worker(monkeypatch, explode).reset()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_stuck_env_is_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    stuck = worker(monkeypatch, lambda n: release.wait(30), timeout=0.1)
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"envs 8 \.\. 11 of Toy-v0: no answer for env\.timeout=0\.1 s"):
        stuck.reset()
    stuck.close()
    assert time.monotonic() - started < 5
    release.set()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_close_and_garbage_collection_end_every_thread() -> None:
    def threads() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    before = threads()
    closed = envs.make("CartPole-v1", "envpool", 4, num_threads=2)
    dropped = envs.make("CartPole-v1", "envpool", 4, num_threads=2)
    assert threads() >= before + 2 * 2 * 2
    closed.close()
    del dropped
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before


FIELDS = [Field((5, 3), torch.float32), Field((5,), torch.float32), Field((5,), torch.bool), Field((5, 7), torch.uint8)]


def host_tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 3, generator=generator, dtype=torch.float64),
        torch.randn(5, generator=generator),
        torch.randn(5, generator=generator) > 0,
        torch.randint(256, (5, 7), generator=generator, dtype=torch.uint8),
    ]


def test_a_slot_is_written_only_after_its_last_copy_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class FakeEvent:
        def __init__(self) -> None:
            self.name = sum(call.startswith("made") for call in calls)
            calls.append(f"made {self.name}")

        def synchronize(self) -> None:
            calls.append(f"waited for {self.name}")

        def record(self, stream: object) -> None:
            calls.append(f"recorded {self.name}")

    cuda = SimpleNamespace(Event=FakeEvent, current_stream=lambda device: None)
    monkeypatch.setattr(staging.torch, "cuda", cuda)
    ring = StagingRing(FIELDS, torch.device("cpu"), depth=2)
    staged = [ring.to_device([tensor.numpy() for tensor in host_tensors(seed)]) for seed in range(3)]
    turn = [f"{verb} {slot}" for slot in (0, 1, 0) for verb in ("waited for", "recorded")]
    assert calls == ["made 0", "made 1", *turn]
    assert all(one is same for tensors in staged for one, same in zip(tensors, staged[0], strict=True))
    for found, field, source in zip(staged[0], FIELDS, host_tensors(2), strict=True):
        assert torch.equal(found, source.to(field.dtype))


@pytest.mark.gpu
def test_staged_steps_hold_their_values_on_a_busy_device() -> None:
    device = torch.device("cuda")
    ring = StagingRing(FIELDS, device)
    staged = []
    for seed in range(20):
        torch.cuda._sleep(1_000_000)  # the copies lag behind the host
        staged.append([tensor.clone() for tensor in ring.to_device([t.numpy() for t in host_tensors(seed)])])
    for seed, tensors in enumerate(staged):
        for found, field, source in zip(tensors, FIELDS, host_tensors(seed), strict=True):
            assert torch.equal(found.cpu(), source.to(field.dtype))


@pytest.mark.gpu
def test_actions_reach_the_host_after_the_work_that_makes_them() -> None:
    field = Field((5, 3), torch.float32)
    copy, expected = HostCopy(field), np.arange(15, dtype=np.float32).reshape(field.shape)
    for step in range(3):
        torch.cuda._sleep(10_000_000)
        made = torch.from_numpy(expected).cuda() + step
        assert np.array_equal(copy.to_host(made), expected + step)


@pytest.mark.gpu
def test_cuda_results_lie_still() -> None:
    with closing(envs.make("Pong-v5", "envpool", 3, num_threads=1, pools=1, device="cuda")) as env:
        env.reset()
        actions = torch.zeros(3, dtype=torch.int64, device="cuda")
        places = [[tensor.data_ptr() for tensor in env.step(actions)] for _ in range(3)]
        assert env.fixed_results and places[0] == places[1] == places[2]


@pytest.mark.gpu
@pytest.mark.parametrize("id", ["CartPole-v1", "Ant-v5", "Pong-v5"])
def test_cuda_results_equal_cpu_results(id: str, make: Make) -> None:
    on_cpu, on_cuda = make(id, 7), make(id, 7, device="cuda")
    assert torch.equal(on_cpu.reset(), on_cuda.reset().cpu())
    for batch in random_actions(on_cpu, 30):
        actions = batch.cuda()  # which both take
        for found, expected in zip(on_cuda.step(actions), on_cpu.step(actions), strict=True):
            assert found.device.type == "cuda" and torch.equal(found.cpu(), expected)
