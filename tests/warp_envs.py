"""What the tests of the MuJoCo Warp engine share: envs, random actions, rollouts and changes to a state."""

import torch

from envs.mujoco_warp import MujocoWarpVecEnv


def warp_env(id, num_envs=4, device="cpu", **options):
    return MujocoWarpVecEnv(id, num_envs, device=device, **options)


def random_actions(env, generator):
    low, high = (
        torch.from_numpy(bound).to(env.device) for bound in (env.single_action_space.low, env.single_action_space.high)
    )
    shape = env.num_envs, *env.single_action_space.shape
    return low + (high - low) * torch.rand(shape, generator=generator, device=env.device)


def copied(result):
    return [tensor.clone() for tensor in result]


def rollout(env, steps, seed=0):
    """``steps`` random steps, each field stacked over time."""
    generator = torch.Generator(env.device).manual_seed(seed)
    rows = [copied(env.step(random_actions(env, generator))) for _ in range(steps)]
    return [torch.stack(field) for field in zip(*rows, strict=True)]


def with_state(env, **changes):
    """Overwrite rows of the env's state, given as name=(row, value)."""
    state = env.state_dict()
    for name, (row, value) in changes.items():
        state[name][row] = torch.as_tensor(value, dtype=state[name].dtype)
    env.load_state_dict(state)
