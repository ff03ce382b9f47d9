"""Export a trained policy: ``python scripts/export_policy.py checkpoint=runs/.../ out=policy.onnx``.

Writes the deterministic policy, from raw observations to actions within the env's bounds, as an ONNX model
(``*.onnx``, needs ``pip install -e '.[export]'``) or as a program of torch (``*.pt2``, for ``torch.export.load``);
without ``out`` as ``policy-<update>.onnx`` in the run folder. Batches may be of any size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import torch

from scripts.overrides import parse_options
from scripts.refusals import tell, told_in_one_line
from trainer.builder import make_env
from trainer.config import ConfigError
from trainer.evaluate import load_checkpoint, make_agent, run_folder_of
from trainer.export import export_policy


@dataclass
class Options:
    """What the command line may set."""

    checkpoint: str = ""  #: a run folder (its newest checkpoint) or a file
    out: str | None = None  #: the file to write, *.onnx or *.pt2


def run(options: Options) -> None:
    """Export, and say what was written."""
    if not options.checkpoint:
        raise ConfigError("checkpoint=<a run folder or file> is missing")
    path, device = Path(options.checkpoint).resolve(), torch.device("cpu")
    config, state = load_checkpoint(path)
    target = Path(options.out) if options.out else run_folder_of(path) / f"policy-{state['update']}.onnx"
    config.autocast = "none"  # how a GPU trained; the file acts in float32
    env = make_env(replace(config.env, id=state["env_id"], pools=1, training_options={}), 2, device, config.seed)
    try:
        observations = env.reset()
        agent = make_agent(config, state, env.single_observation_space, env.single_action_space, device)
    finally:
        env.close()
    notes = {
        "env_id": state["env_id"],
        "engine": config.env.engine,
        "env_steps": str(state["counters"]["env_steps"]),
        "update": str(state["update"]),
    }
    export_policy(agent, observations, target, notes)
    tell(f"{state['env_id']} after {notes['env_steps']} env steps ({notes['update']} updates)")
    tell(f"observations   {env.single_observation_space}")
    tell(f"actions        {env.single_action_space}")
    if agent.policy.state_size:
        tell(f"state          {agent.policy.state_size} numbers per env, zeros where an episode begins")
    tell(f"saved          {target}")


def main() -> None:
    """Run, or refuse in one line."""
    with told_in_one_line():
        run(parse_options(Options, sys.argv[1:]))


if __name__ == "__main__":
    main()
