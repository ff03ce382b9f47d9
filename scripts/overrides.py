"""Checks a command line before Hydra runs anything, so that a wrong override is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from trainer.config import ConfigError, from_omegaconf, one_line
from trainer.schema import CONFIG_FOLDER, compose_for_resume, compose_raw


def task_overrides(arguments: list[str] | None = None) -> list[str]:
    """The ``key=value`` arguments of the command line that are not Hydra's own."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return [a for a in arguments if "=" in a and not a.startswith(("-", "hydra.", "hydra/"))]


def _single_values(override: str) -> list[str]:
    """An override once for each value that it sweeps over."""
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return [override]
    prefix = override.partition("=")[0]
    return [f"{prefix}={value}" for value in parsed.sweep_string_iterator()]


def check_overrides(arguments: list[str]) -> str | None:
    """What is wrong with a command line, as one line, or None. Nothing is started.

    Each value of a sweep is checked with the first values of the others.
    """
    overrides = task_overrides(arguments)
    try:
        choices = [_single_values(override) for override in overrides]
        first = [values[0] for values in choices]
        _check(first)
        for index, values in enumerate(choices):
            for value in values[1:]:
                _check([*first[:index], value, *first[index + 1 :]])
    except ConfigError as error:
        return str(error)
    except MissingConfigException as error:
        return _missing(error)
    except (OmegaConfBaseException, HydraException) as error:
        return one_line(error)
    return None


def _check(overrides: list[str]) -> None:
    resume = next((o.partition("=")[2] for o in overrides if o.startswith("resume=")), None)
    if resume in (None, "null"):
        from_omegaconf(compose_raw(overrides))
    elif (Path(resume) / "config.yaml").is_file():
        compose_for_resume((Path(resume) / "config.yaml").read_text(), overrides)
    else:
        raise ConfigError(f"resume={resume}: there is no run (no config.yaml)")


def _missing(error: MissingConfigException) -> str:
    """``env=Foo: there is no such preset``."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    known = ", ".join(sorted(p.stem for p in (CONFIG_FOLDER / group).glob("*.yaml")))
    hint = "; any other id: env.id=<id>" if group == "env" else ""
    return f"{group}={name}: there is no such preset under configs/{group}: {known}{hint}"
