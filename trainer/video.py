"""Films one episode of a checkpoint: ``python -m trainer.video <checkpoint> <file.mp4> <seed>``.

Runs as a process of its own. Gymnasium renders, so the env must be registered there (``pip install -e
'.[video]'``).
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import imageio.v2  # pyright: ignore[reportMissingImports]
import torch

from envs.base import EnvError
from envs.observations import ObservationMap
from trainer.config import EnvConfig
from trainer.evaluate import load_checkpoint, make_agent


def film(checkpoint: Path, target: Path, seed: int, max_steps: int = 2000) -> float:
    """Play one episode with the most likely actions, write it as a video, and return its return.

    Every frame is written as it comes; the file has its name only when it is whole.

    Raises:
        EnvError: the env cannot be rendered as pictures.
    """
    config, state = load_checkpoint(checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".part{target.suffix}")
    with closing(_rendered(state["env_id"], config.env)) as env:
        join = ObservationMap(state["env_id"], env.single_observation_space)
        agent = make_agent(config, state, join.space, env.single_action_space, torch.device("cpu"))
        observations, _ = env.reset(seed=seed)
        total, memory = 0.0, agent.policy.initial_state(1)
        fps = env.metadata.get("render_fps", 30)
        writer: Any = imageio.v2.get_writer(partial, fps=fps, macro_block_size=1)  # sizes stay as they are
        with writer:
            writer.append_data(_frame(env))
            for _ in range(max_steps):
                batch = torch.from_numpy(join(observations).astype(join.space.dtype, copy=False))
                actions, memory = agent.act(batch, memory, deterministic=True)
                observations, rewards, terminated, truncated, _ = env.step(actions.numpy())
                writer.append_data(_frame(env))
                total += float(rewards[0])
                if terminated[0] or truncated[0]:
                    break
    partial.replace(target)
    return total


def _rendered(id: str, config: EnvConfig) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """One env as a batch of one; the options of a run on another engine are not Gymnasium's."""
    options = dict(config.options) if config.engine == "gymnasium" else {}
    options |= {"vectorization_mode": "sync", "render_mode": "rgb_array"}
    return gymnasium.make_vec(id, 1, max_episode_steps=config.max_episode_steps, **options)


def _frame(env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> Any:
    (frame,) = env.render() or (None,)
    if frame is None:
        raise EnvError(f"{env.spec and env.spec.id} renders no rgb_array, see its metadata['render_modes']")
    return frame


if __name__ == "__main__":
    os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform == "linux" else "")
    print(film(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
