"""The configuration as Hydra and OmegaConf see it: composed from groups and overrides, saved, loaded, refused."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from trainer.config import Config, ConfigError
from trainer.keys import KEYS, check_override, unknown_key, wrong_value
from trainer.validation import validate

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"


class ModuleError(ConfigError):
    """``env.module`` cannot be imported from here."""


def _schema() -> DictConfig:
    schema = OmegaConf.structured(Config)
    for options in (schema.env.options, schema.env.training_options):
        OmegaConf.set_struct(options, False)  # whatever the engine knows
    return schema


def register() -> None:
    """Tell Hydra the typed schema under which ``configs/config.yaml`` is checked."""
    ConfigStore.instance().store(name="schema", node=_schema())


def compose_raw(overrides: list[str]) -> DictConfig:
    """What Hydra composes from ``configs`` and overrides, not yet validated."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        return compose("config", overrides=overrides)


def compose_config(overrides: list[str]) -> Config:
    """The validated configuration that ``scripts/train.py`` would run with these overrides.

    Raises:
        ConfigError: refused, in one line.
        HydraException: an override that Hydra cannot parse or place.
    """
    for override in parse_overrides(overrides):
        if not is_group(override.key_or_group):
            check_override(override.key_or_group, override.value())
    return from_omegaconf(compose_raw(overrides))


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Those of the overrides that are not Hydra's own.

    Raises:
        ConfigError: a key shall be deleted, or Hydra shall choose the run folder.
        HydraException: an override cannot be parsed.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        if override.is_delete():
            raise ConfigError(f"{override.input_line}: a key is not deleted, it has a default; set it to another value")
        if override.key_or_group == "hydra.run.dir":
            raise ConfigError(f"{override.input_line}: a run's folder is named by out=<folder>")
    return [override for override in parsed if not override.key_or_group.startswith(("hydra.", "hydra/"))]


def is_group(key: str) -> bool:
    """Whether a key chooses a preset."""
    return (CONFIG_FOLDER / key).is_dir()


def from_omegaconf(composed: DictConfig) -> Config:
    """The validated `Config` of what Hydra composed.

    Raises:
        ConfigError: a key is unknown, or a value is missing, of the wrong type, or impossible.
    """
    config = _typed(composed)
    import_own(config.env.module)
    validate(config)
    return config


def _typed(composed: DictConfig) -> Config:
    try:
        # as plain values: a key that was added with `+` meets the schema like any other
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), OmegaConf.to_container(composed, resolve=True)))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    if not isinstance(config, Config):
        raise ConfigError(f"the configuration is a {type(config).__name__}, not a mapping of keys")
    return config


def import_own(module: str | None) -> None:
    """Import what registers the user's own envs, also from the working directory.

    Raises:
        ModuleError: it cannot be imported.
    """
    if module is None:
        return
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except ImportError as error:
        cure = "; it is looked for in the working directory and in PYTHONPATH"
        if module.endswith(".py"):
            cure = f"; write env.module={module.removesuffix('.py')}"
        raise ModuleError(f"env.module={module} cannot be imported: {error}{cure}") from error


def from_yaml(text: str) -> Config:
    """The validated `Config` of a run folder's ``config.yaml``.

    Raises:
        ConfigError: not YAML, or refused.
    """
    return from_omegaconf(_mapping(text))


def read_yaml(text: str) -> Config:
    """The `Config` of a ``config.yaml`` to look at, not to run: nothing of one's own is imported, no value refused.

    Raises:
        ConfigError: not YAML, a key is unknown, or a value of the wrong type.
    """
    return _typed(_mapping(text))


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, the content of a run folder's ``config.yaml``."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain nested dictionaries."""
    container = OmegaConf.to_container(OmegaConf.structured(config))
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


def compose_for_resume(saved: str, overrides: list[str]) -> Config:
    """The configuration of a run that is continued: the saved one, with what the command line overrides.

    Args:
        saved: the content of the run's ``config.yaml``.
        overrides: ``key=value``; ``resume`` itself is dropped.

    Raises:
        ConfigError: a preset (a config group) was given, or a key is unknown, or a value impossible; says so where the
            saved configuration itself is refused.
        HydraException: an override cannot be parsed.
    """
    config = _mapping(saved)
    try:
        from_omegaconf(config)
    except ModuleError:  # where it lies is no fault of the saved configuration
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{error} (so says the run's config.yaml, of another version or edited: mend it there)"
        ) from error
    for override in parse_overrides(overrides):
        key, value = override.key_or_group, override.value()
        if key == "resume":
            continue
        if key == "out":
            raise ConfigError(f"{override.input_line}: a run is continued in its own folder")
        if is_group(key):
            raise ConfigError(
                f"{override.input_line}: a preset cannot be changed on resume; override single keys, e.g. "
                f"total_steps=..."
            )
        check_override(key, value)
        OmegaConf.update(config, key, value)
    return from_omegaconf(config)


def _mapping(text: str) -> DictConfig:
    try:
        loaded = OmegaConf.create(text)
    except YAMLError as error:
        raise ConfigError(f"config.yaml cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError("config.yaml is not a mapping of keys")
    return loaded


def one_line(error: Exception, known: list[str] | None = None) -> str:
    """An OmegaConf or Hydra error as one line that names the key and, where it can, the cure.

    Args:
        error: what was raised.
        known: the keys there are; by default those of `Config`.
    """
    key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    first = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(error).__name__)
    if not key:
        return first
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown_key(str(key), known)
    if known is None and key in KEYS and isinstance(cause, ValidationError):
        return wrong_value(str(key), getattr(cause, "value", None))
    return f"{key}: {first}"
