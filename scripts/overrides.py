"""Command lines of key=value: checked before anything runs, so that a wrong one is refused in one line."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TypeVar, get_type_hints

from hydra._internal.utils import get_args_parser  # what hydra.main itself parses with; there is no public one
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scripts.refusals import config_errors
from trainer.config import Config, ConfigError
from trainer.keys import KEYS, as_text, unknown_key, why_unread
from trainer.run_folder import RunFolder
from trainer.schema import compose_config, compose_for_resume, is_group, one_line, parse_overrides

Options = TypeVar("Options")


def parse_options(kind: type[Options], arguments: list[str]) -> Options:
    """A dataclass of options from ``key=value`` arguments, for scripts that Hydra does not run; ``--help`` prints what
    the script says of itself and the options, and exits. Texts are taken as they stand, a folder ``007`` too.

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
    texts = {name for name, hint in get_type_hints(kind).items() if hint in (str, str | None)}
    try:
        given = (_given(argument, texts) for argument in arguments)
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), *given))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error, known=[str(key) for key in OmegaConf.structured(kind)])) from error
    if not isinstance(options, kind):
        raise ConfigError("arguments are key=value")
    return options


def _given(argument: str, texts: set[str]) -> DictConfig:
    """One argument: texts as they stand, whatever YAML makes of them, all else as YAML."""
    key, _, value = argument.partition("=")
    try:
        argument.encode()
        if key not in texts or value == "null":
            return OmegaConf.from_dotlist([argument])
    except UnicodeEncodeError as error:
        raise ConfigError(f"{argument}: the locale has no such letters; set PYTHONUTF8=1") from error
    except YAMLError as error:
        raise ConfigError(f"{argument}: {' '.join(str(error).split())}") from error
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return OmegaConf.create({key: value[1:-1] if is_quoted else value})


def check_overrides(arguments: list[str]) -> str | None:
    """What is wrong with a command line, as one line, or None. Nothing is started.

    Each value of a sweep is checked with the first values of the others.
    """
    parsed, unknown = get_args_parser().parse_known_args(arguments)
    if unknown:
        return f"{unknown[0]}: an override is key=value, without dashes{_undashed(unknown[0])}"
    try:
        with config_errors():
            _check_jobs(parsed.overrides, parsed.multirun)
    except ConfigError as error:
        return str(error)
    return None


def composed(overrides: list[str]) -> Config:
    """The configuration of a run with these overrides, for scripts that make their own runs.

    Raises:
        ConfigError: refused, in one line that names the override.
    """
    with config_errors():
        for override in overrides:
            _single_values(override, multirun=False)
        return compose_config(overrides)


def _undashed(flag: str) -> str:
    """What ``--num-envs=8`` was meant to say; ``--lr`` names no key."""
    key, _, value = flag.lstrip("-").partition("=")
    key = key.replace("-", "_")
    return f": {key}={value or '<value>'}" if key in KEYS or is_group(key) else f"; {unknown_key(key)}"


def _check_jobs(overrides: list[str], multirun: bool) -> None:
    choices = [_single_values(override, multirun) for override in overrides]
    first = [values[0] for values in choices]
    jobs = [first] + [
        [*first[:index], value, *first[index + 1 :]] for index, values in enumerate(choices) for value in values[1:]
    ]
    _refuse_unread([(job, _check(job)) for job in jobs])


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
        raise ConfigError(f"{override}: {one_line(error)}{_cure(override)}") from error


def _cure(override: str) -> str:
    key, _, value = override.partition("=")
    if override.count("[") > override.count("]"):
        return "; a list is one word, without spaces"
    is_quoted = "'" in value or '"' in value
    return "" if is_quoted else f"; a text with such signs stands in two kinds of quotes: \"{key}='{value}'\""


def _check(overrides: list[str]) -> Config:
    """The configuration of a run, or of one that is continued."""
    resume = next((_parse(o).value() for o in overrides if o.startswith("resume=")), None)
    if resume is None:
        return compose_config(overrides)
    return compose_for_resume(RunFolder.existing(Path(str(resume))).read_config(), overrides)


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
