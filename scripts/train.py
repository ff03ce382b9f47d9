"""Train an agent: ``python scripts/train.py algo=ppo env=Ant num_envs=4096``.

Every key can be overridden (``--cfg job`` prints them all), ``-m seed=1,2,3`` sweeps, ``resume=<run folder>``
continues a run in place. Exit status: 0 finished, 1 refused or failed, 130/143/138/129 stopped by
SIGINT/SIGTERM/SIGUSR1/SIGHUP after saving.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run can be saved, Ctrl-C ends without a traceback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from scripts.overrides import check_overrides
from scripts.refusals import EXPECTED_ERRORS
from trainer import distributed
from trainer.config import Config
from trainer.console import prepare_streams, say
from trainer.run_folder import RunFolder
from trainer.schema import CONFIG_FOLDER, compose_for_resume, from_omegaconf, register
from trainer.session import train


class JobFailed(CompactHydraException):
    """A job of a sweep failed: Hydra runs the others, then says so without a traceback and exits with status 1."""


def _prepare(composed: DictConfig, base: Path) -> tuple[Config, RunFolder | None]:
    """The validated configuration, and the folder of the run that it continues, if any."""
    job = HydraConfig.get()
    if composed.resume is not None:
        run = RunFolder.existing((base / composed.resume).resolve())
        return compose_for_resume(run.read_config(), list(job.overrides.task)), run
    config = from_omegaconf(composed)
    if job.mode == RunMode.MULTIRUN and config.out is not None:
        config.out = f"{config.out}/{job.job.num}"  # one folder per job of a sweep
    return config, None


def _notice_preset(overrides: list[str]) -> None:
    """Say whose settings an id that was given without a preset gets."""
    env_id = next((o.partition("=")[2] for o in overrides if o.startswith("env.id=")), None)
    if env_id is None or any(o.startswith("env=") for o in overrides) or distributed.rank():
        return
    preset, own = HydraConfig.get().runtime.choices["env"], env_id.partition("-")[0]
    cure = f"env={own}" if (CONFIG_FOLDER / "env" / f"{own}.yaml").is_file() else "env=<preset>"
    say(f"rollscan: env.id={env_id} gets the settings of env={preset}; {cure} chooses others", sys.stderr)


def _run(composed: DictConfig) -> None:
    base = Path(hydra.utils.get_original_cwd())
    try:
        config, continued = _prepare(composed, base)
        distributed.initialize(config.device)
        if continued is None:
            _notice_preset(list(HydraConfig.get().overrides.task))
        status = train(config, base, continued)
    except EXPECTED_ERRORS as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # no file's: an env has lost its connection, say, and the traceback tells which
        say(f"error: {error}", sys.stderr)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise JobFailed(str(error)) from None
        sys.exit(1)
    finally:
        distributed.shutdown()
    if status:
        sys.exit(status)


def main() -> None:
    """Compose the configuration and run, or refuse in one line."""
    prepare_streams()
    register()
    problem = check_overrides(sys.argv[1:])
    if problem is not None:
        say(f"error: {problem}", sys.stderr)
        sys.exit(1)
    hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="config")(_run)()


if __name__ == "__main__":
    main()
