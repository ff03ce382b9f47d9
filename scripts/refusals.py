"""How a script ends where its user can mend something: with one line and exit status 1, without a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from envs.base import EnvError
from trainer.checkpoint import CheckpointError
from trainer.config import ConfigError
from trainer.console import prepare_streams, say
from trainer.keys import meant
from trainer.loop import TrainingError
from trainer.schema import CONFIG_FOLDER, one_line

#: What a user can mend.
EXPECTED_ERRORS = (ConfigError, EnvError, CheckpointError, TrainingError, OSError)


def tell(text: str) -> None:
    """Print a line of what a script has to say, whether somebody reads it or not."""
    say(text, sys.stdout)


@contextmanager
def told_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """End the process with ``error: <one line>`` and status 1 where what runs inside fails by what a user can mend, and
    with status 130 at Ctrl-C.

    Args:
        others: further errors whose message is such a line.

    Raises:
        OSError: one that names no file, an env's own say: the traceback tells where it came from.
    """
    prepare_streams()
    try:
        yield
    except (*EXPECTED_ERRORS, *others) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        say(f"error: {error}", sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise what Hydra and OmegaConf refuse as `ConfigError`, in one line that names the key."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing(error)) from error
    except (OmegaConfBaseException, HydraException) as error:
        raise ConfigError(one_line(error)) from error


def _missing(error: MissingConfigException) -> str:
    """``env=Foo: there is no such preset``."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    known = sorted(p.stem for p in (CONFIG_FOLDER / group).glob("*.yaml"))
    hint = meant(name, known) + ("; any other id: env.id=<id>" if group == "env" else "")
    return f"{group}={name}: there is no such preset under configs/{group}: {', '.join(known)}{hint}"
