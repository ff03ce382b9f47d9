"""The keys of the configuration: which there are, what a name that is none was meant to say, and what reads a key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import envs
from trainer.config import Config, ConfigError

#: What other libraries call a key.
_OTHER_NAMES = {
    "actor_hidden_dims": "hidden_sizes",
    "actors": "pools",
    "anneal_lr": "lr_schedule",
    "batch_size": "num_minibatches",
    "clip_coef": "clip_range",
    "clip_param": "clip_range",
    "clip_vloss": "value_clip_range",
    "cuda": "device",
    "discount": "gamma",
    "empirical_normalization": "observations",
    "env.name": "id",
    "env_id": "id",
    "epochs": "update_epochs",
    "exp_name": "name",
    "gpu": "device",
    "hidden_dims": "hidden_sizes",
    "horizon": "rollout_length",
    "lam": "gae_lambda",
    "load_run": "resume",
    "log_dir": "out",
    "log_interval": "plain_interval",
    "lr": "learning_rate",
    "max_iterations": "total_steps",
    "minibatch_size": "num_minibatches",
    "n_epochs": "update_epochs",
    "n_steps": "rollout_length",
    "net_arch": "hidden_sizes",
    "norm_adv": "normalize_advantages",
    "num_epochs": "update_epochs",
    "num_learning_epochs": "update_epochs",
    "num_steps": "rollout_length",
    "num_steps_per_env": "rollout_length",
    "num_workers": "pools",
    "output_dir": "out",
    "run_name": "name",
    "save_interval": "interval_updates",
    "task": "id",
    "tau": "gae_lambda",
    "timesteps": "total_steps",
    "track": "mode",
    "unroll_length": "rollout_length",
    "verbose": "console",
    "vf_coef": "value_coef",
}
#: Where any name goes: what the engine knows.
_OPEN = ("env.options.", "env.training_options.")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of texts",
    "dict[str, Any]": "a mapping",
}
_ADAPTIVE = ("ppo.lr_schedule", ("adaptive",))
#: A section or key that is read for some values of another key only: that key, and these values.
_READ_BY: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ppo": ("algo", ("ppo",)),
    "impala": ("algo", ("impala",)),
    **dict.fromkeys(("ppo.desired_kl", "ppo.min_learning_rate", "ppo.max_learning_rate"), _ADAPTIVE),
    **dict.fromkeys(("impala.rmsprop_decay", "impala.rmsprop_eps"), ("impala.optimizer", ("rmsprop",))),
    "impala.adam_eps": ("impala.optimizer", ("adam",)),
    "normalize.observation_clip": ("normalize.observations", (True,)),
    "policy.core_size": ("policy.core", ("lstm", "gru")),
    "credit.gae_lambda": ("credit.estimator", ("gae",)),
    "credit.td_lambda": ("credit.estimator", ("td_lambda",)),
    "credit.vtrace_lambda": ("credit.estimator", ("vtrace",)),
    "credit.rho_bar": ("credit.estimator", ("vtrace",)),
    "credit.pg_rho_bar": ("credit.estimator", ("vtrace",)),
    "credit.c_bar": ("credit.estimator", ("vtrace", "retrace")),
    "credit.retrace_lambda": ("credit.estimator", ("retrace",)),
}
#: What is read where the engine's entry in `envs.ENGINES`, maybe one's own, names it.
_TAKEN_BY_ENGINES = ("env.pools", "env.num_threads", "env.timeout", "env.physics")
#: Of these, what IMPALA's actors read whatever the engine.
_TAKEN_BY_ACTORS = ("env.pools", "env.timeout")


@dataclass(frozen=True)
class Key:
    """A dotted key that takes a value."""

    name: str
    type: str  #: as declared
    default: Any

    @property
    def section(self) -> str:
        """What stands before the last dot; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """What stands after the last dot."""
        return self.name.rpartition(".")[2]


def _keys_of(kind: type, prefix: str = "") -> Iterator[Key]:
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if is_dataclass(default):
            yield from _keys_of(type(default), f"{prefix}{field.name}.")
        else:
            yield Key(f"{prefix}{field.name}", str(field.type), default)


#: Every key there is, by its name.
KEYS = {key.name: key for key in _keys_of(Config)}
_SECTIONS = dict.fromkeys(key.section for key in KEYS.values() if key.section)


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_override(key: str, value: Any) -> None:
    """Refuse what no key takes, as far as a key and its value show it.

    Raises:
        ConfigError: one line with the key, the value, and what would be right.
    """
    if key.startswith(_OPEN) or (key in _SECTIONS and isinstance(value, dict)):
        return
    if key in _SECTIONS:
        raise ConfigError(f"{key}={as_text(value)}: {key} is a section of keys; {_section(key)}")
    if key not in KEYS:
        raise ConfigError(unknown_key(key))
    is_number = isinstance(value, int | float)
    if value == "" or (KEYS[key].type == "bool" and is_number and value not in (False, True)):
        raise ConfigError(wrong_value(key, value))
    if value == "None" and KEYS[key].type.endswith("| None"):
        raise ConfigError(f"{key}=None: write {key}=null")


def why_unread(key: str, value: Any, config: Config) -> str | None:
    """That nothing in this configuration reads a key, what would, and what is read instead; None if it is read."""
    for name in (key.partition(".")[0], key):
        found = _readers(name, config)
        if found is None:
            continue
        decider, readers = found
        now = get(config, decider)
        if now not in readers:
            instead = f"{now}.{key.rpartition('.')[2]}"
            cure = f"set {instead}" if instead in KEYS else "leave it out"
            only = f"{decider}={' or '.join(map(as_text, readers))}"
            return f"{key}={as_text(value)} is read with {only} only, and this is {decider}={as_text(now)}; {cure}"
    return None


def _readers(name: str, config: Config) -> tuple[str, tuple[Any, ...]] | None:
    """The key, and its values, for which a section or key is read; None: for any."""
    if name in _TAKEN_BY_ENGINES and not (config.algo == "impala" and name in _TAKEN_BY_ACTORS):
        setting = name.rpartition(".")[2]
        return "env.engine", tuple(engine for engine, entry in envs.ENGINES.items() if setting in entry.settings)
    return _READ_BY.get(name)


def wrong_value(key: str, value: Any) -> str:
    """That a known key does not take this value, and what it takes."""
    kind, _, optional = KEYS[key].type.partition(" | ")
    expected = _KINDS[kind] + (" or null" if optional else "")
    example = KEYS[key].default
    if kind == "int" and isinstance(value, float) and value.is_integer():
        example = int(value)  # YAML takes 1e6 for a float
    return f"{key}={as_text(value)} is not {expected}, such as {key}={as_text(example)}"


def as_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace(" ", "") if isinstance(value, list | dict) else str(value)


def meant(value: str, choices: Iterable[str]) -> str:
    """``; did you mean vtrace?`` for the choice that is most like a value, or nothing."""
    lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(value.lower(), lower, n=1) or [c for c in lower if value and value.lower() in c]
    return f"; did you mean {lower[close[0]]}?" if close else ""


def unknown_key(key: str, known: Sequence[str] | None = None) -> str:
    """That there is no such key, with the ones that may have been meant; ``known`` ones are by default `KEYS`."""
    close, section = _closest(key, known or (*KEYS, *_SECTIONS)), key.partition(".")[0]
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif known is not None:
        hint = f"there are {', '.join(known)}"
    elif section in _SECTIONS:
        hint = _section(section)
    else:
        hint = "docs/config.md lists them all"
    return f"{key}: there is no such key; {hint}"


def _section(name: str) -> str:
    """The keys of a section."""
    own = ", ".join(key.last for key in KEYS.values() if key.section == name)
    engine = "; the engine's own options go under env.options" if name == "env" else ""
    return f"{name} has {own}{engine}"


def _closest(key: str, known: Sequence[str]) -> list[str]:
    """Known keys like this one: of its own section if there is any, else wherever the last part of a name fits."""
    section, _, last = key.rpartition(".")
    last = _OTHER_NAMES.get(key) or _OTHER_NAMES.get(last, last)
    own = [name for name in known if name.rpartition(".")[0] == section]
    for names, cutoff in ((own, 0.7), (known, 0.75)):
        by_last: dict[str, list[str]] = {}
        for name in names:
            by_last.setdefault(name.rpartition(".")[2], []).append(name)
        close = difflib.get_close_matches(last, by_last, n=1, cutoff=cutoff)
        if close:
            return by_last[close[0]]
    return []
