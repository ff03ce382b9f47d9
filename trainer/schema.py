"""The Hydra side of the configuration: schema, groups, and what the command line overrides on resume."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError, from_omegaconf, one_line

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"


def register() -> None:
    """Tell Hydra the typed schema under which ``configs/config.yaml`` is checked."""
    ConfigStore.instance().store(name="schema", node=Config)


def compose_config(overrides: list[str]) -> Config:
    """The validated configuration that ``scripts/train.py`` would run with these overrides.

    Raises:
        ConfigError: refused, in one line.
        HydraException: an override that Hydra cannot parse or place.
    """
    return from_omegaconf(compose_raw(overrides))


def compose_raw(overrides: list[str]) -> DictConfig:
    """What Hydra composes, not yet validated."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        return compose("config", overrides=overrides)


def compose_for_resume(saved: str, overrides: list[str]) -> Config:
    """The configuration of a run that is continued: the saved one, with what the command line overrides.

    Args:
        saved: the content of the run's ``config.yaml``.
        overrides: ``key=value``; ``resume`` itself is dropped.

    Raises:
        ConfigError: a preset (a config group) was given, or a key is unknown, or a value impossible.
    """
    config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(saved))
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "resume":
            continue
        if (CONFIG_FOLDER / key).is_dir():
            raise ConfigError(
                f"{override}: a preset cannot be changed on resume; override single keys, e.g. total_steps=..."
            )
        try:
            OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
        except OmegaConfBaseException as error:
            raise ConfigError(one_line(error)) from error
    if not isinstance(config, DictConfig):
        raise ConfigError("config.yaml is not a mapping of keys")
    return from_omegaconf(config)
