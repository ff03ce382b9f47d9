"""Names of envs and engines, seeds, cores: what is decided before an engine starts."""

from __future__ import annotations

import itertools
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import envs
from envs.base import EnvError
from envs.checks import memory_errors
from envs.cores import usable_cores
from envs.names import resolve_among
from envs.seeding import first_seed

IDS = ("Ant-v3", "Ant-v10", "Ant-v5", "Pong-v5", "GO-v1", "Go-v1", "Humanoid-v5", "HumanoidStandup-v5", "Bare")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Ant", "Ant-v10"),
        ("Ant-v3", "Ant-v3"),
        ("ant", "Ant-v10"),
        ("aNT-V5", "Ant-v5"),
        ("Pong", "Pong-v5"),
        ("Humanoid", "Humanoid-v5"),
        ("Go", "Go-v1"),
        ("bare", "Bare"),
    ],
)
def test_a_name_means_its_newest_version_and_an_exact_id_itself(name: str, expected: str) -> None:
    assert resolve_among(name, IDS, "mine") == expected


def test_case_that_decides_between_two_names_is_ambiguous() -> None:
    with pytest.raises(EnvError, match=r"env\.id=gO is ambiguous: GO-v1, Go-v1"):
        resolve_among("gO", IDS, "mine")


@pytest.mark.parametrize(
    ("name", "closest"),
    [("Antt", "Ant-v10"), ("Ant-v4", "Ant-v3"), ("humanoidstandpu", "HumanoidStandup-v5"), ("Pnog-v5", "Pong-v5")],
)
def test_an_unknown_name_lists_the_closest_ids(name: str, closest: str) -> None:
    with pytest.raises(EnvError, match=rf"env\.id={name} is unknown to env\.engine=mine; closest: .*{closest}"):
        resolve_among(name, IDS, "mine")


def test_a_name_like_no_other_is_refused_in_one_line() -> None:
    with pytest.raises(EnvError, match=r"^env\.id=qqqqqq is unknown to env\.engine=mine, which has Ant-v10, Bare, .*"):
        resolve_among("qqqqqq", IDS, "mine")


@pytest.mark.parametrize(
    ("name", "expected"), [("Ant", "Ant-v5"), ("pong", "Pong-v5"), ("CartPole", "CartPole-v1"), ("Ant-v4", "Ant-v4")]
)
def test_envpool_names_resolve(name: str, expected: str) -> None:
    assert envs.resolve(name, "envpool") == expected


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EnvError, match=r"env\.engine=isaac is unknown: envpool, gymnasium, mujoco_warp, torch"):
        envs.make("Ant", "isaac", 1)


def test_a_missing_package_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "warp", None)  # type: ignore[arg-type]  # None makes the import fail
    for module in [name for name in sys.modules if name.startswith(("envs.mujoco_warp", "envs.warp"))]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(EnvError, match=r"env\.engine=mujoco_warp needs .*pip install -e '\.\[warp\]'"):
        envs.make("Ant", "mujoco_warp", 1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.\nmore"),
        MemoryError("Unable to allocate 1.00 TiB for an array with shape (7,)"),
        RuntimeError("Failed to allocate 123 bytes on device 'cuda:0'"),
        OSError("[Errno 12] Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_does_not_suffice_is_one_line_with_what_was_said(error: Exception) -> None:
    with pytest.raises(EnvError) as refusal, memory_errors("num_envs=4: Ant-v5"):
        raise error
    said = (str(error) or "MemoryError").splitlines()[0]
    assert str(refusal.value) == f"num_envs=4: Ant-v5 does not fit into memory: {said}"
    with pytest.raises(EnvError) as same, memory_errors("num_envs=4, rollout_length=2: the run", KeyError):
        raise refusal.value
    assert same.value is refusal.value


@pytest.mark.parametrize("text", ["failed to allocate port 5900", "it was allocated twice", "illegal memory access"])
def test_other_errors_keep_their_type_and_text(text: str) -> None:
    with pytest.raises(RuntimeError, match=text), memory_errors("num_envs=4: Ant-v5"):
        raise RuntimeError(text)


def test_an_id_is_enough_to_make_one_env() -> None:
    with closing(envs.make("CartPole")) as env:
        assert env.reset().shape == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"num_envs": 4, "rank": 2, "world_size": 2}, "rank=2"),
        ({"num_envs": 4, "seed": -1}, "seed=-1"),
        ({"num_envs": 4, "pools": 5}, r"env\.pools=5: it must be 0 \(automatic\) or in 1 \.\. num_envs=4"),
        ({"num_envs": 4, "pools": -1}, r"env\.pools=-1"),
        ({"num_envs": 4, "num_threads": -1}, r"env\.num_threads=-1"),
        ({"num_envs": 4, "timeout": 0}, r"env\.timeout=0"),
        ({"num_envs": 4, "max_episode_step": 5}, r"env\.options\.max_episode_step: .*closest: max_episode_steps"),
        ({"num_envs": 4, "batch_size": 2}, r"env\.options\.batch_size"),
    ],
)
def test_impossible_settings_are_refused_by_their_key(arguments: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        envs.make("CartPole", "envpool", **arguments)


seeds = st.integers(0, 5000)
epochs = st.integers(0, 200)


@given(num_envs=st.integers(1, 4096), world_size=st.integers(1, 16), seed=st.integers(0, 2**63), epoch=epochs)
def test_ranks_share_no_seed_and_all_seeds_are_int32(num_envs: int, world_size: int, seed: int, epoch: int) -> None:
    firsts = [
        first_seed(num_envs, seed=seed, rank=rank, world_size=world_size, epoch=epoch) for rank in range(world_size)
    ]
    assert all(later - earlier == num_envs for earlier, later in itertools.pairwise(firsts))
    assert firsts[0] >= 0 and firsts[-1] + num_envs <= 2**31


@given(num_envs=st.integers(1, 4096), one=st.tuples(seeds, epochs), other=st.tuples(seeds, epochs))
def test_seeds_and_epochs_share_no_env_seed(num_envs: int, one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = (first_seed(num_envs, seed=seed, epoch=epoch) for seed, epoch in (one, other))
    if one != other and (one[0] == other[0] or one[1] == other[1]):
        assert abs(first - second) >= num_envs


def test_small_seeds_stay_clear_of_each_others_first_epochs() -> None:
    firsts = {first_seed(4096, seed=seed, epoch=epoch) for seed in range(100) for epoch in range(100)}
    assert len(firsts) == 100 * 100


def test_more_envs_than_seeds_are_refused() -> None:
    with pytest.raises(EnvError, match="num_envs"):
        first_seed(2**31, seed=0, world_size=2)


@pytest.mark.parametrize(
    ("files", "at_most"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_container_quota_limits_the_cores(files: dict[str, str], at_most: int, tmp_path: Path) -> None:
    unlimited = usable_cores(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == min(unlimited, at_most)


@pytest.mark.parametrize("files", [{"cpu.max": "max 100000\n"}, {"cpu.max": ""}])
def test_no_quota_or_an_unreadable_one_limits_nothing(files: dict[str, str], tmp_path: Path) -> None:
    unlimited = usable_cores(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == unlimited
