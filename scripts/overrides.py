"""Command lines of key=value: checked before anything runs, so that a wrong one is refused in one line."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TypeVar

from hydra._internal.utils import get_args_parser  # what hydra.main itself parses with; there is no public one
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError
from trainer.keys import KEYS, as_text, meant, unknown_key, why_unread
from trainer.run_folder import RunFolder
from trainer.schema import (
    CONFIG_FOLDER,
    compose_config,
    compose_for_resume,
    is_group,
    one_line,
    parse_overrides,
)

Options = TypeVar("Options")


def parse_options(kind: type[Options], arguments: list[str]) -> Options:
    """A dataclass of options from ``key=value`` arguments, for scripts that Hydra does not run; ``--help`` prints what
    the script says of itself and the options, and exits.

    Raises:
        ConfigError: an argument is not ``key=value``, a key is unknown, or a value of the wrong type.
    """
    if {"-h", "--help"} & set(arguments):
        defaults = " ".join(f"{name}={as_text(value)}" for name, value in vars(kind()).items())
        print(f"{inspect.getdoc(sys.modules[kind.__module__])}\n\nKeys and their defaults: {defaults}")
        sys.exit(0)
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            word = argument.lstrip("-")
            right = word if "=" in word else f"{next(iter(vars(kind())))}={word}"
            raise ConfigError(f"{argument}: an argument is key=value, without dashes: {right}")
    try:
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_cli(arguments)))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error, known=[str(key) for key in OmegaConf.structured(kind)])) from error
    if not isinstance(options, kind):
        raise ConfigError("arguments are key=value")
    return options


def check_overrides(arguments: list[str]) -> str | None:
    """What is wrong with a command line, as one line, or None. Nothing is started.

    Each value of a sweep is checked with the first values of the others.
    """
    parsed, unknown = get_args_parser().parse_known_args(arguments)
    if unknown:
        return f"{unknown[0]}: an override is key=value, without dashes{_undashed(unknown[0])}"
    try:
        choices = [_single_values(override, parsed.multirun) for override in parsed.overrides]
        first = [values[0] for values in choices]
        jobs = [first] + [
            [*first[:index], value, *first[index + 1 :]] for index, values in enumerate(choices) for value in values[1:]
        ]
        _refuse_unread([(job, _check(job)) for job in jobs])
    except ConfigError as error:
        return str(error)
    except MissingConfigException as error:
        return _missing(error)
    except (OmegaConfBaseException, HydraException) as error:
        return one_line(error)
    return None


def _undashed(flag: str) -> str:
    """What ``--num-envs=8`` was meant to say; ``--lr`` names no key."""
    key, _, value = flag.lstrip("-").partition("=")
    key = key.replace("-", "_")
    return f": {key}={value or '<value>'}" if key in KEYS or is_group(key) else f"; {unknown_key(key)}"


def _single_values(override: str, multirun: bool) -> list[str]:
    """An override once for each value that it sweeps over."""
    key = override.partition("=")[0]
    if not key or (key == override and not key.startswith("~")):
        raise ConfigError(f"{override}: an override is key=value, without spaces around the =")
    parsed = _parse(override)
    if not parsed.is_sweep_override():
        return [override]
    if not multirun:
        is_list = key in KEYS and KEYS[key].type.startswith("list")
        cure = f"write {key}=[{override.partition('=')[2]}]" if is_list else "add -m"
        raise ConfigError(f"{override} sweeps over several values: {cure}")
    return [f"{key}={value}" for value in parsed.sweep_string_iterator()]


def _parse(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        cure = "; a list is one word, without spaces" if override.count("[") > override.count("]") else ""
        raise ConfigError(f"{override}: {one_line(error)}{cure}") from error


def _check(overrides: list[str]) -> Config:
    """The configuration of a run, or of one that is continued."""
    resume = next((_parse(o).value() for o in overrides if o.startswith("resume=")), None)
    if resume is None:
        return compose_config(overrides)
    folder = RunFolder(Path(str(resume)))
    if not folder.config.is_file():
        raise ConfigError(f"resume={resume}: there is no run (no config.yaml)")
    return compose_for_resume(folder.read_config(), overrides)


def _refuse_unread(jobs: list[tuple[list[str], Config]]) -> None:
    """Refuse an override that none of the jobs reads: of a sweep over algorithms, each may read some."""
    reasons: dict[str, list[str | None]] = {}
    for overrides, config in jobs:
        for override in parse_overrides(overrides):
            if not is_group(key := override.key_or_group):
                reasons.setdefault(str(override.input_line), []).append(why_unread(key, override.value(), config))
    for found in reasons.values():
        if all(found):
            raise ConfigError(str(found[0]))


def _missing(error: MissingConfigException) -> str:
    """``env=Foo: there is no such preset``."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    known = sorted(p.stem for p in (CONFIG_FOLDER / group).glob("*.yaml"))
    hint = meant(name, known) + ("; any other id: env.id=<id>" if group == "env" else "")
    return f"{group}={name}: there is no such preset under configs/{group}: {', '.join(known)}{hint}"
