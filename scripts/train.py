"""Train an agent: ``python scripts/train.py algo=ppo env=Ant num_envs=4096``.

Every key can be overridden (``--cfg job`` prints them all), ``-m seed=1,2,3`` sweeps, ``resume=<run folder>``
continues a run in place. Exit status: 0 finished, 1 refused or failed, 130/143/138 stopped by SIGINT/SIGTERM/SIGUSR1
after saving.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from envs.base import EnvError
from scripts.overrides import check_overrides, task_overrides
from trainer import distributed
from trainer.checkpoint import CheckpointError
from trainer.config import Config, ConfigError, from_omegaconf
from trainer.loop import TrainingError, train
from trainer.run_folder import RunFolder
from trainer.schema import CONFIG_FOLDER, compose_for_resume, register

#: What a user can mend: told in one line, without a traceback.
EXPECTED_ERRORS = (ConfigError, EnvError, CheckpointError, TrainingError, OSError)


def _prepare(composed: DictConfig) -> tuple[Config, RunFolder, bool]:
    """The validated configuration, the run's folder, and whether it continues."""
    base = Path(hydra.utils.get_original_cwd())
    if composed.resume is not None:
        folder = RunFolder.existing(base / composed.resume)
        return compose_for_resume(folder.config.read_text(), task_overrides()), folder, True
    config = from_omegaconf(composed)
    if HydraConfig.get().mode == RunMode.MULTIRUN and config.out is not None:
        config.out = f"{config.out}/{HydraConfig.get().job.num}"  # one folder per job of a sweep
    folder = RunFolder.create(config, base) if distributed.rank() == 0 else None
    path = distributed.broadcast_object(folder.path if folder else None)
    if path is None:
        raise ConfigError("out: rank 0 made no run folder")
    return config, RunFolder(path), False


def _run(composed: DictConfig) -> None:
    distributed.initialize(str(composed.device))
    try:
        status = train(*_prepare(composed))
    except EXPECTED_ERRORS as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # the sweep's other jobs run, and it ends with status 1
        sys.exit(1)
    finally:
        distributed.shutdown()
    if status:
        sys.exit(status)


def main() -> None:
    """Compose the configuration and run, or refuse in one line."""
    register()
    problem = check_overrides(sys.argv[1:])
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)
    hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="config")(_run)()


if __name__ == "__main__":
    main()
