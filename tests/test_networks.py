"""Torsos over frames: shapes, scaling, sharing, and which observations they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor
from torch.nn import functional as F

from trainer.builder import set_precision
from trainer.config import ConfigError, PolicyConfig
from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.networks import PIXEL_TORSOS, ImpalaResNet, NatureCNN
from trainer.policy import ActorCritic
from trainer.schema import compose_config

FRAMES = Box(0, 255, (4, 84, 84), np.uint8)
TORSOS = tuple(PIXEL_TORSOS)


def frames(*batch: int, shape: tuple[int, ...] = (4, 84, 84), seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*batch, *shape), dtype=torch.uint8, generator=generator)


def make_policy(torso: str, autocast_dtype: torch.dtype | None = None, **options: Any) -> ActorCritic:
    torch.manual_seed(0)
    config = PolicyConfig(torso=torso, hidden_sizes=[], **options)
    return ActorCritic(FRAMES, Discrete(6), config, autocast_dtype)


@pytest.mark.parametrize(
    ("torso", "features", "parameters"), [(NatureCNN, 512, 1_684_128), (ImpalaResNet, 256, 1_089_232)]
)
def test_torsos_have_the_sizes_of_their_papers(torso: Any, features: int, parameters: int) -> None:
    network = torso((4, 84, 84))
    assert network(frames(3)).shape == (3, features) and network.features == features
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_the_nature_cnn_is_three_convolutions_over_frames_scaled_to_one() -> None:
    network, observations = NatureCNN((4, 84, 84)), frames(2)
    x = observations.double() / 255
    for layer, stride in zip((0, 2, 4), (4, 2, 1), strict=True):
        convolution: Any = network.convolutions.get_submodule(str(layer))
        x = F.relu(F.conv2d(x, convolution.weight.double(), convolution.bias.double(), stride))
    expected = F.relu(F.linear(x.flatten(1), network.linear.weight.double(), network.linear.bias.double()))
    torch.testing.assert_close(network(observations).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_residual_block_adds_what_its_convolutions_find() -> None:
    block: Any = ImpalaResNet((4, 84, 84)).convolutions.get_submodule("2")
    x = torch.randn(2, 16, 9, 9)
    found = F.conv2d(F.relu(x), block.first.weight, block.first.bias, padding=1)
    expected = x + F.conv2d(F.relu(found), block.second.weight, block.second.bias, padding=1)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("torso", TORSOS)
def test_the_layout_in_memory_changes_no_result(torso: str) -> None:
    network, observations = PIXEL_TORSOS[torso]((4, 84, 84)), frames(2)
    expected = network(observations)
    network.set_layout(torch.contiguous_format)
    torch.testing.assert_close(network(observations), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("torso", TORSOS)
def test_actor_and_critic_share_one_torso_that_is_evaluated_once(torso: str) -> None:
    policy, calls = make_policy(torso), []
    policy.torso.register_forward_hook(lambda *_: calls.append(1))
    action = policy.act(frames(3))
    assert len(calls) == 1
    assert [x.shape for x in action[:3]] == [(3,), (3,), (3,)]
    torch.testing.assert_close(policy.distribution(frames(3)).log_prob(action.actions), action.log_probs)
    policy.outputs(frames(3)).values.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in policy.torso.parameters())


def test_windows_of_frames_are_evaluated_as_their_rows() -> None:
    policy, observations = make_policy("nature_cnn"), frames(2, 3)
    whole, flat = policy.outputs(observations), policy.outputs(observations.flatten(0, 1))
    assert whole.values.shape == (2, 3) and whole.policy_outputs.shape == (2, 3, 6)
    torch.testing.assert_close(whole.values.flatten(), flat.values)


@pytest.mark.parametrize("torso", TORSOS)
def test_autocast_takes_frames_straight_to_bfloat16(torso: str) -> None:
    full, half = make_policy(torso), make_policy(torso, torch.bfloat16)
    seen: list[torch.dtype] = []
    convolutions: Any = half.torso.get_submodule("convolutions")
    convolutions.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    got, expected = half.outputs(frames(3)), full.outputs(frames(3))
    assert seen == [torch.bfloat16] and got.values.dtype == torch.float32
    # bfloat16 has 8 bits, and rounding adds up over up to 15 layers
    scale = expected.values.abs().max().item()
    torch.testing.assert_close(got.values, expected.values, rtol=0, atol=0.05 * max(scale, 0.1))


@pytest.mark.parametrize("torso", TORSOS)
def test_frames_of_other_sizes_and_channels_are_taken(torso: str) -> None:
    network = PIXEL_TORSOS[torso]((3, 72, 96))
    assert network(frames(2, shape=(3, 72, 96))).isfinite().all()


@pytest.mark.parametrize(
    ("torso", "space", "message"),
    [
        ("mlp", FRAMES, r"policy\.torso=mlp: .*\(4, 84, 84\) are images; set policy=nature_cnn"),
        ("nature_cnn", Box(-1, 1, (5,)), r"policy\.torso=nature_cnn: .*float32 observations of shape \(5,\); set"),
        ("impala_resnet", Box(-1, 1, (4, 84, 84)), r"\(4, 84, 84\) are images of float32; .* uint8 .*wrap the env$"),
        ("mlp", Box(-1, 1, (4, 84, 84)), r"\(4, 84, 84\) are images of float32; .* uint8 .*wrap the env$"),
        ("impala_resnet", Box(0, 255, (96, 96, 3), np.uint8), r"\(96, 96, 3\) look like \[height, width, channels\]"),
        ("nature_cnn", Box(0, 255, (4, 20, 20), np.uint8), r"frames of shape \(4, 20, 20\) .*too small"),
    ],
)
def test_observations_that_do_not_fit_the_torso_are_refused_by_key(torso: str, space: Box, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ActorCritic(space, Discrete(2), PolicyConfig(torso=torso))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("env=Pong", "normalize.observations=true"), r"normalize\.observations=true: policy\.torso=nature_cnn scales"),
        (("env=CartPole", "policy.hidden_sizes=[]"), r"policy\.hidden_sizes=\[\] must be one or more"),
        (
            ("env=Pong", "policy.torso=mlp"),
            r"hidden_sizes=\[\] .* where policy\.torso=mlp and policy\.core=none",
        ),
        (("env=Pong", "policy.hidden_sizes=[0]"), r"policy\.hidden_sizes=\[0\] must be"),
        (("env=Pong", "policy.torso=vit"), r"policy\.torso=vit is not one of mlp, nature_cnn, impala_resnet"),
        (("env=Pong", "normalize.reward_clip=0"), r"normalize\.reward_clip=0.* must be"),
        (("env=Pong", "env.training_options.num_envs=4"), r"env\.training_options\.num_envs is not an engine's own"),
    ],
)
def test_impossible_settings_are_refused_before_any_env_starts(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(list(overrides))


@pytest.mark.parametrize("game", ["Pong", "Breakout", "BeamRider", "Enduro", "Qbert", "Seaquest", "SpaceInvaders"])
def test_presets_of_games_clip_rewards_and_keep_frames(game: str) -> None:
    config = compose_config([f"env={game}"])
    assert (config.env.id, config.policy.torso, config.normalize.reward_clip) == (game, "nature_cnn", 1.0)
    assert not config.normalize.observations and not config.env.options
    lives = {"episodic_life": True} if game == "Breakout" else {}
    assert config.env.training_options == lives


def test_pong_trains_on_the_cpu_from_bytes_and_clipped_rewards() -> None:
    small = ("num_envs=4", "rollout_length=8", "total_steps=96", "ppo.num_minibatches=2", "ppo.update_epochs=1")
    config = compose_config(["env=Pong", *small, "device=cpu", "env.num_threads=1"])
    trainer = Trainer(config, QuietConsole())
    metrics = [trainer.train_one_update() for _ in range(3)]
    assert metrics[-1]["env_steps"] == 96 and not any(row["skipped_minibatches"] for row in metrics)
    assert math.isclose(metrics[0]["loss/entropy"], math.log(6), rel_tol=0.01)
    assert all(math.isfinite(row["loss/total"]) for row in metrics)
    rollout, _ = trainer.newest
    assert rollout.observations.dtype == torch.uint8
    rollout.rewards[0, :2] = torch.tensor([7.0, -3.0])
    assert trainer._rewards(rollout)[0, :2].tolist() == [1.0, -1.0]
    assert rollout.rewards[0, :2].tolist() == [7.0, -3.0]  # what returns are summed from
    trainer.close()


@pytest.mark.parametrize(("precision", "tf32"), [("highest", False), ("high", True)])
def test_convolutions_multiply_as_matrices_do(monkeypatch: pytest.MonkeyPatch, precision: str, tf32: bool):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not tf32)
    before = torch.get_float32_matmul_precision()
    try:
        set_precision(precision)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 is tf32
    finally:
        torch.set_float32_matmul_precision(before)
