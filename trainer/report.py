"""Names and facts by which runs are told apart."""

from __future__ import annotations

import os
import platform

import torch

from trainer.config import Config


def run_name(config: Config) -> str:
    """``ppo Ant mujoco_warp/euler`` and the like: what differs as a task is part of the name."""
    return f"{config.algo} {config.env.id} {engine_name(config)}"


def engine_name(config: Config) -> str:
    """The engine, with the physics where they are not Gymnasium's: another task."""
    other_task = config.env.engine == "mujoco_warp" and config.env.physics != "rk4"
    return f"{config.env.engine}/{config.env.physics}" if other_task else config.env.engine


def run_tags(config: Config, env_id: str, backend: str) -> list[str]:
    """Tags by which wandb groups runs: algorithm, env, engine, credit backend."""
    tags = [config.algo, env_id, config.env.engine, f"credit-{backend}"]
    if config.env.engine == "mujoco_warp":
        tags.append(config.env.physics)
    return tags


def machine(device: torch.device) -> str:
    """The device's name and the cores that this process may use, e.g. ``NVIDIA H200, 16 cores``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, {cores} cores"
