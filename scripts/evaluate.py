"""Evaluate a checkpoint: ``python scripts/evaluate.py checkpoint=runs/.../ episodes=100``.

Plays whole episodes twice, with the most likely actions and with sampled ones, prints the returns' mean, standard
deviation and range, and saves every return in the run folder, ``evaluation-<update>-<engine>-<episodes>.json``.
``env.engine=envpool`` plays on another engine than the one trained on, without ``env.options``, which are that one's
own; any other key of ``env`` can be changed likewise. ``video=true`` also films one episode in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import gymnasium
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scripts.overrides import parse_options
from scripts.refusals import tell, told_in_one_line
from trainer.builder import resolve_device
from trainer.config import ConfigError, EnvConfig
from trainer.evaluate import Episodes, evaluate, load_checkpoint, run_folder_of
from trainer.metrics import write_json
from trainer.schema import import_own, one_line
from trainer.validation import check_device_name, validate

_ROOT = Path(__file__).resolve().parent.parent
_MISSING_PACKAGE = re.compile(r"^\S*(ModuleNotFoundError|DependencyNotInstalled)")
_MOST_EPISODES = 2**24  #: one env each: as many as may train
#: Whether the most likely actions are played.
_MODES = {"deterministic": True, "sampled": False}


@dataclass
class Options:
    """What the command line may set."""

    checkpoint: str = ""  #: a run folder (its newest checkpoint) or a file
    episodes: int = 100
    seed: int = 1_000_000
    device: str = "cpu"
    video: bool = False
    video_timeout: float = 1800.0  #: seconds after which a film that is not done is given up
    env: dict[str, Any] = field(default_factory=dict)  #: what to change in the run's own ``env``


def _parse(arguments: list[str]) -> Options:
    preset = next((argument for argument in arguments if argument.startswith("env=")), None)
    if preset is not None:
        raise ConfigError(f"{preset}: the run's env is changed key by key, such as env.id={preset[4:] or 'Ant-v5'}")
    options = parse_options(Options, arguments)
    if not options.checkpoint:
        raise ConfigError("checkpoint=<a run folder or file> is missing")
    check_device_name(options.device)
    if not 1 <= options.episodes <= _MOST_EPISODES:
        raise ConfigError(f"episodes={options.episodes} must be at least 1 and at most {_MOST_EPISODES}")
    if options.video and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ConfigError("video=true needs pip install -e '.[video]'")
    if not 0 <= options.seed < 2**31:
        raise ConfigError(f"seed={options.seed} must be at least 0 and at most {2**31 - 1}")
    return options


def _merged(env: EnvConfig, changes: dict[str, Any]) -> EnvConfig:
    if env.options and changes.get("engine", env.engine) != env.engine:
        tell(f"env.options {', '.join(env.options)} are those of env.engine={env.engine}: left out")
        env = replace(env, options={})
    try:
        return cast(EnvConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(env), changes)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"env.{one_line(error, known=list(EnvConfig.__dataclass_fields__))}") from error


def _summary(episodes: Episodes) -> dict[str, Any]:
    returns = episodes.returns
    return {
        "mean": statistics.fmean(returns),
        "std": statistics.pstdev(returns),
        "min": min(returns),
        "max": max(returns),
        "mean_length": statistics.fmean(episodes.lengths),
        "returns": returns,
        "lengths": episodes.lengths,
    }


def _print(name: str, summary: dict[str, Any]) -> None:
    tell(
        f"{name:14s} return {summary['mean']:.2f} ± {summary['std']:.2f} (min {summary['min']:.2f}, max "
        f"{summary['max']:.2f}), length {summary['mean_length']:.1f}, {len(summary['returns'])} episodes"
    )


def _film(path: Path, target: Path, options: Options) -> None:
    """Film in a process of its own: a renderer that crashes or hangs takes nothing with it."""
    tell("filming        one episode, which takes minutes without a GPU ...")
    command = [sys.executable, "-m", "trainer.video", str(path), str(target), str(options.seed)]
    path_of_modules = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path_of_modules}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.video_timeout)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"video=true: no film within video_timeout={options.video_timeout} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        cure = " (pip install -e '.[video]')" if _MISSING_PACKAGE.search(reason) else ""
        raise ConfigError(f"video=true: no film was made: {reason}{cure}")
    tell(f"film           {target}")


def run(options: Options) -> None:
    """Evaluate, print and save."""
    path = Path(options.checkpoint).resolve()
    config, state = load_checkpoint(path)
    config.env = _merged(replace(config.env, id=state["env_id"]), options.env)  # what `env.id=Ant` meant in the run
    import_own(config.env.module)
    validate(config)  # with the run's own sizes: limits of training are none of playing
    config.num_envs, config.env.pools = options.episodes, 0  # one episode in each
    if options.video and config.env.id not in gymnasium.registry:
        raise ConfigError(
            f"video=true: Gymnasium, which renders, has no {config.env.id}: films are of its MuJoCo and classic tasks, "
            "and of envs of your own that are registered there"
        )
    device = resolve_device(options.device)
    result: dict[str, Any] = {
        "checkpoint": str(options.checkpoint),
        "update": state["update"],
        "env_steps": state["counters"]["env_steps"],
        "env_id": config.env.id,
        "engine": config.env.engine,
        "seed": options.seed,
    }
    tell(
        f"{result['env_id']} on {result['engine']}, after {result['env_steps']} env steps ({result['update']} updates)"
    )
    for name, deterministic in _MODES.items():
        result[name] = _summary(evaluate(config, state, options.episodes, options.seed, deterministic, device))
    folder = run_folder_of(path)
    target = folder / f"evaluation-{state['update']}-{config.env.engine}-{options.episodes}.json"
    write_json(target, result)
    for name in _MODES:
        _print(name, result[name])
    tell(f"saved          {target}")
    if options.video:
        _film(path, folder / f"episode-{state['update']}.mp4", options)


def main() -> None:
    """Run, or refuse in one line."""
    with told_in_one_line():
        run(_parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
