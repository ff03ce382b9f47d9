"""MuJoCo Warp engine: options, and what is refused by name."""

import pytest
import torch

pytest.importorskip("warp", reason="the warp extra is not installed")
pytest.importorskip("mujoco_warp", reason="the warp extra is not installed")

from warp_envs import rollout, warp_env

from envs import make, warp_simulation
from envs.base import EnvError
from envs.warp_rows import customize
from envs.warp_tasks import TASKS

pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")


def test_euler_is_another_task_except_where_the_model_says_euler():
    def states(id, physics):
        env = warp_env(id, physics=physics)
        env.reset()
        return rollout(env, 5)[0]

    assert not torch.equal(states("Hopper-v5", "rk4"), states("Hopper-v5", "euler"))
    assert torch.equal(states("HalfCheetah-v5", "rk4"), states("HalfCheetah-v5", "euler"))


def test_gymnasiums_options_change_the_row():
    env = warp_env("Ant-v5", reset_noise_scale=0.0, healthy_z_range=(0.9, 1.0), healthy_reward=3.0)
    assert torch.equal(env.reset(), env.reset())
    assert env.step(torch.zeros(4, 8)).terminated.all()
    hopper = customize(TASKS["Hopper-v5"], {"healthy_state_range": (-5, 5)})
    assert [(check.low, check.high) for check in hopper.healthy[:2]] == [(-5, 5), (-5, 5)]


@pytest.mark.parametrize(
    ("id", "options", "word"),
    [
        ("Pusher-v5", {}, "Pusher-v5"),
        ("Ant-v5", {"num_envs": 0}, "num_envs=0"),
        ("Ant-v5", {"physics": "rk2"}, "physics=rk2"),
        ("Ant-v5", {"seed": -1}, "seed=-1"),
        ("Ant-v5", {"rank": 2}, "rank=2"),
        ("Ant-v5", {"max_episode_steps": 0}, "max_episode_steps=0"),
        ("Ant-v5", {"healthy_y_range": (0, 1)}, "healthy_y_range"),
        ("Ant-v5", {"healthy_z_range": (1, 0)}, "ordered"),
        ("Ant-v5", {"healthy_z_range": 1}, "two numbers"),
        ("Ant-v5", {"reset_noise_scale": "big"}, "reset_noise_scale='big'"),
        ("Ant-v5", {"healthy_reward": float("nan")}, "healthy_reward=nan"),
        ("Ant-v5", {"terminate_when_unhealthy": 1}, "terminate_when_unhealthy=1"),
        ("Ant-v5", {"frame_skip": 0}, "frame_skip=0"),
        ("Ant-v5", {"device": "nowhere"}, "device=nowhere"),
        ("Ant-v5", {"device": "meta"}, "device=meta"),
    ],
)
def test_bad_arguments_are_refused_by_name(id, options, word):
    with pytest.raises(EnvError, match=word):
        warp_env(id, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(EnvError, match="device=cuda"):
        warp_env("Ant-v5", device="cuda")


def test_more_worlds_than_memory_or_32_bits_hold_are_refused_by_number(monkeypatch):
    with pytest.raises(EnvError, match="num_envs=1000000000: Ant-v5 does not fit"):
        make("Ant-v5", "mujoco_warp", num_envs=1_000_000_000)

    def out_of_memory(*args, **kwargs):
        raise RuntimeError("Failed to allocate 123456789 bytes on device 'cuda:0'")

    monkeypatch.setattr(warp_simulation.mjw, "make_data", out_of_memory)
    with pytest.raises(EnvError, match="num_envs=7: Ant-v5 does not fit into memory: Failed to allocate 123456789"):
        make("Ant-v5", "mujoco_warp", num_envs=7)


@pytest.mark.parametrize(
    ("actions", "word"),
    [
        (torch.zeros(4, 7), r"\[4, 8\]"),
        (torch.zeros(3, 8), r"\[4, 8\]"),
        (torch.zeros(4, 8, dtype=torch.float64), "float64"),
        (torch.full((4, 8), float("nan")), "env 0"),
    ],
)
def test_bad_actions_are_refused_before_the_engine(actions, word):
    env = warp_env("Ant-v5")
    env.reset()
    before = env.state_dict()
    with pytest.raises(EnvError, match=word):
        env.step(actions)
    assert all(torch.equal(x, y) for x, y in zip(env.state_dict().values(), before.values(), strict=True))


def test_a_closed_env_says_so_and_closes_again():
    env = warp_env("Reacher-v5")
    env.close()
    env.close()
    with pytest.raises(EnvError, match="closed"):
        env.reset()


def test_make_builds_the_newest_version_by_its_short_name():
    env = make("Hopper", "mujoco_warp", 3)
    assert (env.id, env.engine, env.num_envs, env.pools) == ("Hopper-v5", "mujoco_warp", 3, (slice(0, 3),))
