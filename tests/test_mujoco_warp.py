"""MuJoCo Warp engine: the transition contract, faults, seeds, resume."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("warp", reason="the warp extra is not installed")
pytest.importorskip("mujoco_warp", reason="the warp extra is not installed")

import warp as wp
from warp_envs import copied, random_actions, rollout, warp_env, with_state

from envs.base import EnvError
from envs.counter_rng import stream_key, uniform

pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")

# ---- the transition contract


def test_an_ended_episode_gives_its_final_observation_and_then_one_filler_row():
    env = warp_env("Hopper-v5", num_envs=7)
    env.reset()
    observations, rewards, terminated, truncated, valid = rollout(env, 80)
    ends = (terminated | truncated)[:-1]
    assert ends.any()
    assert torch.equal(~valid[1:], ends)
    assert valid[0].all()
    assert (rewards[~valid] == 0).all()
    assert not (terminated | truncated)[~valid].any()
    fallen = observations[:-1][ends]
    assert ((fallen[:, 0] < 0.7) | (fallen[:, 1].abs() > 0.2)).all()
    first = observations[~valid]
    assert ((first[:, 0] - 1.25).abs() <= 5.1e-3).all()
    assert (first[:, 1:].abs() <= 5.1e-3).all()


def test_a_filler_row_ignores_its_action():
    env, other = warp_env("Ant-v5"), warp_env("Ant-v5")
    for each in (env, other):
        each.reset()
        with_state(each, done=(2, True))
    actions = torch.full((4, 8), 0.5)
    bold = actions.clone()
    bold[2] = -1.0
    first, second = copied(env.step(actions)), copied(other.step(bold))
    assert first[4].tolist() == [True, True, False, True]
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("id", ["Ant-v5", "Humanoid-v5"])
def test_the_reset_of_one_world_changes_no_bit_of_another(id):
    quiet, disturbed = warp_env(id), warp_env(id)
    for env in (quiet, disturbed):
        env.reset()
        rollout(env, 5)
    with_state(disturbed, done=(2, True))
    others = torch.tensor([0, 1, 3])
    for x, y in zip(rollout(quiet, 20, seed=1), rollout(disturbed, 20, seed=1), strict=True):
        assert torch.equal(x[:, others], y[:, others])
        if x.dtype is torch.float32:
            assert not torch.equal(x[:, 2], y[:, 2])


def test_episodes_are_cut_at_the_time_limit_and_termination_wins():
    env = warp_env("InvertedPendulum-v5", max_episode_steps=3)
    env.reset()
    with_state(env, qpos=(1, [0.0, 0.25]))
    with_state(env, elapsed=(1, 2))
    actions = torch.zeros(4, 1)
    flags = [copied(env.step(actions))[2:] for _ in range(4)]
    terminated, truncated, valid = (torch.stack(field) for field in zip(*flags, strict=True))
    assert terminated.tolist() == [[False, True, False, False], *[[False] * 4] * 3]
    assert truncated.tolist() == [[False] * 4, [False] * 4, [True, False, True, True], [False] * 4]
    assert valid.tolist() == [[True] * 4, [True, False, True, True], [True] * 4, [False, True, False, False]]


def test_gymnasiums_time_limit_is_the_default():
    env = warp_env("Reacher-v5")
    env.reset()
    _, _, _, truncated, _ = rollout(env, 51)
    assert truncated.sum(dim=1).tolist() == [0] * 49 + [4, 0]


# ---- faults


def test_a_world_that_is_not_finite_ends_as_terminated_is_counted_and_named_and_recovers():
    env, healthy = warp_env("Ant-v5"), warp_env("Ant-v5")
    for each in (env, healthy):
        each.reset()
    with_state(env, qvel=(1, float("nan")))
    broken, expected = rollout(env, 6), rollout(healthy, 6)
    observations, rewards, terminated, _, valid = broken
    assert terminated[:, 1].tolist() == [True] + [False] * 5
    assert valid[:, 1].tolist() == [True, False] + [True] * 4
    assert rewards[0, 1] == 0
    assert (observations[0, 1] == 0).all()
    assert all(field.isfinite().all() for field in broken)
    others = torch.tensor([0, 2, 3])
    for x, y in zip(broken, expected, strict=True):
        assert torch.equal(x[:, others], y[:, others])
    with pytest.warns(RuntimeWarning, match="world 1"):
        assert env.counters() == {"nonfinite_worlds": 1, "dropped_contacts": 0, "dropped_constraints": 0}
    assert env.counters()["nonfinite_worlds"] == 0


@pytest.mark.parametrize(
    ("room", "counter"), [("contacts", "dropped_contacts"), ("constraints", "dropped_constraints")]
)
def test_contacts_and_constraints_without_room_are_counted(room, counter):
    env = warp_env("Ant-v5", **{room: 1})
    env.reset()
    rollout(env, 20)
    faults = env.counters()
    assert faults.pop(counter) > 0
    assert not any(faults.values())


def test_no_task_lacks_room_under_extreme_actions():
    for id in ("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Humanoid-v5"):
        env = warp_env(id, **({} if id == "HalfCheetah-v5" else {"terminate_when_unhealthy": False}))
        env.reset()
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            env.step(random_actions(env, generator).sign() * torch.from_numpy(env.single_action_space.high))
        assert not any(env.counters().values())


# ---- randomness and resume


def test_first_states_are_a_function_of_the_counters():
    env = warp_env("Swimmer-v5", num_envs=5, seed=11, rank=2, world_size=3)
    for episode in (1, 2):
        env.reset()
        numbers = uniform(stream_key(11, 2, 0), torch.arange(5), torch.full((5,), episode), torch.arange(5))
        expected = 0.1 * (2 * numbers.T - 1)
        torch.testing.assert_close(env.state_dict()["qpos"].double(), expected, rtol=0, atol=1e-7)


def test_worlds_ranks_seeds_and_epochs_begin_apart_and_one_seed_begins_alike():
    def first(seed=0, rank=0, epoch=0):
        env = warp_env("Reacher-v5", seed=seed, rank=rank, world_size=2)
        env.reseed(epoch)
        return env.reset()

    rows = torch.cat([first(), first(seed=1), first(rank=1), first(epoch=1), first(seed=43)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert torch.equal(first(seed=43), first(seed=43))


def test_a_restored_state_continues_bit_for_bit_in_a_new_env():
    env = warp_env("Hopper-v5")
    env.reset()
    rollout(env, 25)
    state = env.state_dict()
    expected = rollout(env, 40, seed=1)
    other = warp_env("Hopper-v5", seed=9)
    assert torch.equal(other.load_state_dict(state), state["observations"])
    assert expected[2].any()
    for x, y in zip(rollout(other, 40, seed=1), expected, strict=True):
        assert torch.equal(x, y)


def test_a_state_of_another_task_or_size_is_refused():
    env = warp_env("Hopper-v5")
    with pytest.raises(EnvError, match="qpos"):
        env.load_state_dict(warp_env("Hopper-v5", num_envs=3).state_dict())
    with pytest.raises(EnvError, match="expected"):
        env.load_state_dict({})


def test_envs_step_in_threads_side_by_side_as_they_do_alone():
    """IMPALA's actors do; Humanoid's 23 degrees of freedom keep a kernel in its tiles for long."""
    alone, *together = (warp_env("Humanoid-v5", num_envs=3) for _ in range(3))
    for env in (alone, *together):
        env.reset()
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda env: rollout(env, 30), together))
    expected = rollout(alone, 30)
    for result in results:
        for x, y in zip(result, expected, strict=True):
            assert torch.equal(x, y)


# ---- on a GPU


@pytest.mark.gpu
def test_policy_and_steps_replay_as_one_graph_and_memory_stays():
    # at most one constraint row per world, so that CUDA, too, leaves no choice of an order of summation
    env, alone = (warp_env("Reacher-v5", num_envs=65, device="cuda") for _ in range(2))
    observations, expected = env.reset(), alone.reset()
    state = env.state_dict()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(2):
            result = env.step(observations[:, :2].sin())
    env.load_state_dict(state)
    held = []
    for _ in range(60):
        graph.replay()
        for _ in range(2):
            reference = alone.step(expected[:, :2].sin())
        for x, y in zip(result, reference, strict=True):
            assert torch.equal(x, y)
        held.append((torch.cuda.memory_reserved(), wp.get_mempool_used_mem_current("cuda")))
    assert held[-1] == held[10]
    assert not torch.equal(env.state_dict()["episode"], state["episode"])


@pytest.mark.gpu
def test_the_reset_of_one_world_changes_no_bit_of_another_on_the_gpu():
    quiet, disturbed = (warp_env("Reacher-v5", num_envs=65, device="cuda") for _ in range(2))
    for env in (quiet, disturbed):
        env.reset()
        rollout(env, 5)
    with_state(disturbed, done=(2, True))
    others = torch.arange(65, device="cuda") != 2
    for x, y in zip(rollout(quiet, 60, seed=1), rollout(disturbed, 60, seed=1), strict=True):
        assert torch.equal(x[:, others], y[:, others])
