"""Films one episode of a checkpoint: ``python -m trainer.video <checkpoint> <file.mp4> <seed>``.

Runs as a process of its own. Gymnasium renders, so the env must be registered there (``pip install -e
'.[video]'``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gymnasium
import imageio.v3  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from trainer.evaluate import load_checkpoint, make_agent


def film(checkpoint: Path, target: Path, seed: int, max_steps: int = 2000) -> float:
    """Play one episode with the most likely actions, write it as a video, and return its return."""
    config, state = load_checkpoint(checkpoint)
    device = torch.device("cpu")
    env = gymnasium.make(state["env_id"], render_mode="rgb_array", max_episode_steps=config.env.max_episode_steps)
    agent = make_agent(config, state, env.observation_space, env.action_space, device)
    observation, _ = env.reset(seed=seed)
    frames, total, memory = [np.asarray(env.render())], 0.0, agent.policy.initial_state(1)
    for _ in range(max_steps):
        actions, memory = agent.act(torch.as_tensor(observation, dtype=torch.float32)[None], memory, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(actions[0].numpy())
        frames.append(np.asarray(env.render()))
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    target.parent.mkdir(parents=True, exist_ok=True)
    imageio.v3.imwrite(target, frames, fps=env.metadata.get("render_fps", 30), macro_block_size=1)
    return total


if __name__ == "__main__":
    os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform == "linux" else "")
    print(film(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
