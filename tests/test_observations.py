"""Observations of several named parts: which are joined, in which order, and which are refused."""

from __future__ import annotations

import envpool
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

import envs
from envs.base import EnvError
from envs.observations import ObservationMap
from envs.seeding import first_seed
from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.schema import compose_config

N = 3


def box(*shape: int, dtype: type = np.float64) -> Box:
    return Box(0 if dtype is np.uint8 else -1, 1, shape, dtype)


def test_the_parts_of_a_dict_are_joined_in_the_order_of_the_space() -> None:
    space = Dict([("z", box(2)), ("a", box(2, 2)), ("m", Dict([("y", box()), ("b", box(1, dtype=np.float32))]))])
    joined = ObservationMap("Toy-v0", space)
    numbers = np.arange(N * 8.0).reshape(N, 8)
    given = {
        "a": numbers[:, 2:6].reshape(N, 2, 2),
        "m": {"b": numbers[:, 7:].astype(np.float32), "y": numbers[:, 6]},
        "z": numbers[:, :2],
    }
    assert joined.space.shape == (8,) and joined.space.dtype == np.float32
    np.testing.assert_array_equal(joined(given), numbers)


def test_a_box_passes_through() -> None:
    image, numbers = np.zeros((N, 4, 84, 84), np.uint8), np.zeros((N, 5))
    assert ObservationMap("Toy-v0", box(4, 84, 84, dtype=np.uint8))(image) is image
    assert ObservationMap("Toy-v0", box(5))(numbers) is numbers


def test_bytes_in_a_dict_become_float32() -> None:
    joined = ObservationMap("Toy-v0", Dict({"bytes": box(4, dtype=np.uint8)}))
    assert joined.space.dtype == np.float32


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            Dict({"eye": box(7, 7, 3, dtype=np.uint8), "x": box(2)}),
            r"observation part eye is Box\(.*may hold vectors only",
        ),
        (Dict({"inner": Dict({"way": Discrete(4)})}), r"observation part inner\.way is Discrete\(4\)"),
        (Discrete(4), "observations of Discrete; only Box and Dict"),
    ],
)
def test_what_cannot_be_one_vector_is_refused_by_name(space: Dict, message: str) -> None:
    with pytest.raises(EnvError, match=rf"env\.id=Toy-v0.*{message}"):
        ObservationMap("Toy-v0", space)


def test_a_dm_control_task_steps_as_one_vector() -> None:
    env = envs.make("FingerSpin-v1", "envpool", N, num_threads=1, pools=1, seed=3)
    twin = envpool.make_gymnasium("FingerSpin-v1", num_envs=N, num_threads=1, seed=first_seed(N, seed=3))
    parts = ("position", "velocity", "touch", "target_position", "dist_to_target")
    for found, given in (
        (env.reset(), twin.reset()[0]),
        (env.step(torch.ones(N, 2)).observations, twin.step(np.ones((N, 2)))[0]),
    ):
        expected = np.concatenate([given[name].reshape(N, -1) for name in parts], axis=1)
        assert found.shape == (N, 12) and found.dtype == torch.float32
        np.testing.assert_array_equal(found, expected.astype(np.float32))
    env.close()


def test_an_image_beside_vectors_is_refused_before_any_env_starts() -> None:
    with pytest.raises(EnvError, match=r"env\.id=MiniGrid-Empty-5x5-v0: observation part direction"):
        envs.make("MiniGrid-Empty-5x5-v0", "envpool", N)


def test_ppo_trains_on_joined_observations() -> None:
    small = ("num_envs=4", "rollout_length=4", "device=cpu", "env.num_threads=1")
    trainer = Trainer(compose_config(["env.id=FingerSpin-v1", *small]), QuietConsole())
    row = trainer.train_one_update()
    trainer.close()
    assert row["env_steps"] == 16 and row["skipped_minibatches"] == 0
