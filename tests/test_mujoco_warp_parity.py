"""MuJoCo Warp engine: parity with Gymnasium on MuJoCo's C code, in single steps and in distribution."""

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("warp", reason="the warp extra is not installed")
pytest.importorskip("mujoco_warp", reason="the warp extra is not installed")

from warp_envs import random_actions, rollout, warp_env

from envs import make
from envs.warp_tasks import TASKS
from scripts.parity_mujoco import (
    FLOAT32_ROUNDING,
    agree,
    departures,
    draw_starts,
    mujoco_rollouts,
    starts_at,
    warp_rollouts,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")

# Contacts that are soft down to nothing (HalfCheetah) and large contact forces (Humanoid) amplify float32 beyond 1e-4.
CHAOTIC = ("HalfCheetah-v5", "Humanoid-v5")
NEWEST = [id for id in TASKS if id.endswith("-v5")]
OLD_AND_DIFFERENT = [id for id in TASKS if id.endswith("-v4") and TASKS[id] is not TASKS[id.replace("v4", "v5")]]


@pytest.mark.parametrize("id", [id for id in NEWEST if id not in CHAOTIC])
def test_five_steps_agree_with_mujoco_in_95_percent_of_64_states(id):
    starts = draw_starts(id, 64)
    errors = departures(warp_rollouts(warp_env(id), starts), mujoco_rollouts(id, starts))
    assert agree(errors).mean() >= 0.95


@pytest.mark.parametrize("id", CHAOTIC)
def test_five_steps_depart_from_mujoco_no_more_than_float32_must(id):
    starts = draw_starts(id, 64)
    reference = mujoco_rollouts(id, starts)
    errors = departures(warp_rollouts(warp_env(id), starts), reference)
    rounded = departures(mujoco_rollouts(id, starts, rounding=FLOAT32_ROUNDING), reference)
    assert not errors.terminated.any()
    for q in (0.5, 0.9):
        ours, floor = (np.quantile(x.observations.max(axis=1), q) for x in (errors, rounded))
        assert ours <= 2 * floor


def test_all_but_the_contact_forces_of_humanoid_agree_with_mujoco():
    starts = draw_starts("Humanoid-v5", 64)
    errors = departures(warp_rollouts(warp_env("Humanoid-v5"), starts), mujoco_rollouts("Humanoid-v5", starts))
    without_forces = errors._replace(observations=errors.observations[:, :-78])
    assert agree(without_forces).mean() >= 0.95


@pytest.mark.parametrize("id", OLD_AND_DIFFERENT)
def test_older_versions_that_differ_agree_with_theirs(id):
    starts = draw_starts(id, 16, seed=1)
    errors = departures(warp_rollouts(warp_env(id), starts), mujoco_rollouts(id, starts))
    without_forces = errors._replace(observations=errors.observations[:, : -84 if id == "Humanoid-v4" else None])
    assert agree(without_forces).mean() >= 0.95


@pytest.mark.parametrize("id", TASKS)
def test_spaces_are_gymnasiums_in_float32(id):
    env, reference = warp_env(id), gymnasium.make(id)
    assert env.single_observation_space.shape == reference.observation_space.shape
    assert env.single_observation_space.dtype == np.float32
    assert env.single_action_space == reference.action_space


@pytest.mark.parametrize("id", TASKS)
def test_first_observations_are_what_gymnasium_observes_in_the_same_state(id):
    env, reference = warp_env(id), gymnasium.make(id).unwrapped
    reference.reset(seed=0)
    observations = env.reset()
    state = env.state_dict()
    for world in range(env.num_envs):
        reference.reset()
        reference.set_state(state["qpos"][world].double().numpy(), state["qvel"][world].double().numpy())
        np.testing.assert_allclose(observations[world].numpy(), reference._get_obs(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("id", [*NEWEST, "Reacher-v4"])
def test_first_states_have_gymnasiums_distribution(id):
    env, reference = warp_env(id, num_envs=400), gymnasium.make(id).unwrapped
    reference.reset(seed=0)
    theirs = []
    for _ in range(400):
        reference.reset()
        theirs.append(np.concatenate([reference.data.qpos, reference.data.qvel]))
    theirs = np.array(theirs)
    env.reset()
    state = env.state_dict()
    ours = torch.cat([state["qpos"], state["qvel"]], dim=1).double().numpy()
    # five standard errors of a difference of two means, and of two (near) normal or flatter variances
    scale = theirs.std(axis=0) + 1e-12
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) <= 5 * scale * np.sqrt(2 / 400) + 1e-7).all()
    assert (np.abs(ours.var(axis=0) - theirs.var(axis=0)) <= 5 * scale**2 * np.sqrt(4 / 400) + 1e-12).all()
    if not TASKS[id].reset_velocity_normal:
        reach = np.abs(theirs - theirs.mean(axis=0)).max(axis=0)
        assert (np.abs(ours - theirs.mean(axis=0)).max(axis=0) <= 1.1 * reach + 1e-6).all()


def random_episodes(env, count):
    """Return and length ``[count, 2]`` of the first ``count`` episodes to end under random actions."""
    env.reset()
    generator = torch.Generator(env.device).manual_seed(5)
    finished = []
    returns, lengths = torch.zeros(2, env.num_envs, dtype=torch.float64, device=env.device)
    while len(finished) < count:
        result = env.step(random_actions(env, generator))
        returns += result.rewards
        lengths += result.valid
        ended = result.terminated | result.truncated
        finished += torch.stack([returns, lengths], dim=1)[ended].tolist()
        returns[ended] = lengths[ended] = 0
    return np.array(finished)


def assert_same_means(ours, theirs):
    error = np.sqrt(ours.var(axis=0) / len(ours) + theirs.var(axis=0) / len(theirs))
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) <= 4 * error).all()


def test_random_episodes_are_as_long_and_as_good_as_envpools():
    ours = random_episodes(warp_env("Hopper-v5", num_envs=32), 256)
    assert_same_means(ours, random_episodes(make("Hopper-v5", "envpool", 32, seed=1), 256))


@pytest.mark.gpu
@pytest.mark.parametrize("id", ["Ant-v5", "HalfCheetah-v5", "Humanoid-v5", "Walker2d-v5"])
def test_random_episodes_on_the_gpu_are_as_long_and_as_good_as_envpools(id):
    ours = random_episodes(warp_env(id, num_envs=256, device="cuda"), 256)
    assert_same_means(ours, random_episodes(make(id, "envpool", 256, seed=1), 256))


@pytest.mark.gpu
@pytest.mark.parametrize("id", [id for id in NEWEST if id not in CHAOTIC])
def test_4096_worlds_agree_with_mujoco_on_the_gpu(id):
    env = warp_env(id, num_envs=4096, device="cuda")
    env.reset()
    rollout(env, 15)  # where a random policy has come to
    qpos, qvel = (env.state_dict()[name].cpu().numpy() for name in ("qpos", "qvel"))
    actions = torch.stack([random_actions(env, torch.Generator("cuda").manual_seed(t)) for t in range(5)], dim=1)
    starts = starts_at(id, qpos, qvel, actions.cpu().numpy())
    assert agree(departures(warp_rollouts(env, starts), mujoco_rollouts(id, starts))).mean() >= 0.95
