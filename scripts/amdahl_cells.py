"""What `scripts/amdahl.py` measures: a preset is cells, a cell is one setting of the trainer in several variants."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config import Config, ConfigError
from trainer.report import engine_name
from trainer.schema import compose_config, from_omegaconf, one_line, to_dict

PRESETS = Path(__file__).resolve().parent / "amdahl_presets"
#: Parts of an update that a comparison can make faster: the phases of the clock that are together a part's share.
PARTS: dict[str, tuple[str, ...]] = {
    "credit": ("credit",),
    "update": ("credit", "update"),
    "collect": ("env_step", "transfer", "inference", "normalize"),
}


@dataclass
class Comparison:
    """Runs that differ in one thing; the last variant is the one that the others are compared with."""

    parts: list[str]  #: what the difference makes faster, timed alone: keys of `PARTS`
    variants: dict[str, list[str]]  #: a name: single keys of the trainer, ``key=value``


@dataclass
class Cells:
    """One cell for each combination of the swept values."""

    compare: str  #: a key of the preset's comparisons
    settings: list[str] = field(default_factory=list)  #: overrides
    sweep: dict[str, list[Any]] = field(default_factory=dict)  #: a key of the trainer: its values
    seconds: float = 10.0  #: for which each cell is measured, once its runs are warm; six rounds are always measured
    builds: int = 2  #: how often its runs are built, every second time in the opposite order
    warmup: int = 4  #: updates of each run that are not measured: the fourth captures what runs once per update
    turn: int = 1  #: updates that a run makes before it is the next one's turn
    skip: int = 0  #: of each turn, so many first updates are not measured
    control: bool = True  #: also run the last variant with its clock switched off


@dataclass
class Preset:
    """A file under ``scripts/amdahl_presets``."""

    comparisons: dict[str, Comparison]
    cells: list[Cells]
    seconds: float = 400.0  #: budget of all cells; those that find it spent are listed as not measured
    settings: list[str] = field(default_factory=list)  #: overrides of every run


@dataclass(frozen=True, kw_only=True, order=True)
class Labels:
    """What tells cells apart, and orders them: the first columns of a table."""

    compare: str
    algo: str
    env: str
    engine: str
    num_envs: int
    rollout_length: int
    hidden: str
    epochs: int
    minibatches: int
    recompute: str

    @classmethod
    def of(cls, compare: str, config: Config) -> Labels:
        """The labels of a run that is compared in this way."""
        method = config.ppo if config.algo == "ppo" else config.impala
        return cls(
            compare=compare,
            algo=config.algo,
            env=config.env.id,
            engine=engine_name(config),
            num_envs=config.num_envs,
            rollout_length=config.rollout_length,
            hidden="-".join(map(str, config.policy.hidden_sizes)),
            epochs=method.update_epochs,
            minibatches=method.num_minibatches,
            recompute=config.ppo.recompute_advantages,
        )


@dataclass(frozen=True)
class Variant:
    """One run of a cell."""

    name: str
    config: Config
    has_clock: bool = True


@dataclass(frozen=True)
class Cell:
    """One setting of the trainer, whose variants are compared."""

    compare: str
    parts: tuple[str, ...]
    baselines: tuple[Variant, ...]
    candidate: Variant
    control: Variant | None
    seconds: float
    builds: int
    warmup: int
    turn: int
    skip: int

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All runs, in the order in which they take turns."""
        return (*self.baselines, self.candidate, *((self.control,) if self.control else ()))

    @property
    def labels(self) -> Labels:
        """What tells this cell apart."""
        return Labels.of(self.compare, self.candidate.config)


def read_preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ConfigError: there is none, or its file is refused; one line.
    """
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))
        raise ConfigError(f"preset={name}: there is no such preset under scripts/amdahl_presets: {known}")
    return parse_preset(path)


def parse_preset(path: Path) -> Preset:
    """A preset's file, checked.

    Raises:
        ConfigError: a key is unknown or missing, or a value is of the wrong type; one line.
    """
    try:
        preset = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Preset), OmegaConf.load(path)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{path.name}: {one_line(error, known=_keys())}") from error
    if not isinstance(preset, Preset):
        raise ConfigError(f"{path.name} is not a mapping of keys")
    problem = next(_problems(preset), None)
    if problem is not None:
        raise ConfigError(f"{path.name}: {problem}")
    return preset


def _problems(preset: Preset) -> Iterator[str]:
    for name, comparison in preset.comparisons.items():
        for part in comparison.parts:
            if part not in PARTS:
                yield f"comparisons.{name}.parts={part} is not one of {', '.join(PARTS)}"
        if len(comparison.variants) < 2:
            yield f"comparisons.{name}.variants: there must be two or more"
    for cells in preset.cells:
        if cells.compare not in preset.comparisons:
            yield f"cells.compare={cells.compare} is not one of its comparisons: {', '.join(preset.comparisons)}"
        if not 0 <= cells.skip < cells.turn:
            yield f"cells.skip={cells.skip} must be less than cells.turn={cells.turn}"
        if cells.builds < 1:
            yield f"cells.builds={cells.builds} must be 1 or more"


def _keys() -> list[str]:
    return list(dict.fromkeys(key for schema in (Preset, Cells, Comparison) for key in schema.__dataclass_fields__))


def expand(preset: Preset, device: str, seed: int) -> Iterator[Cell]:
    """All cells of a preset, in its order, every run's configuration composed and validated.

    Raises:
        ConfigError: a setting is refused; one line.
    """
    common = [f"device={device}", f"seed={seed}", *preset.settings]
    for cells in preset.cells:
        comparison = preset.comparisons[cells.compare]
        for values in itertools.product(*cells.sweep.values()):
            swept = [f"{key}={_text(value)}" for key, value in zip(cells.sweep, values, strict=True)]
            yield _cell(cells, comparison, [*common, *cells.settings, *swept])


def shard_of(cells: Sequence[Cell], shard: str) -> list[Cell]:
    """The i-th of k stretches of cells, whose budgets are about equal; ``shard`` is ``i/k``.

    Raises:
        ConfigError: it is not.
    """
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    index, count = map(int, found.groups()) if found else (1, 0)
    if index > count:
        raise ConfigError(f"shard={shard} is not i/k with i from 1 to k, like 1/2")
    ends = list(itertools.accumulate(cell.seconds for cell in cells))
    middles = [end - cell.seconds / 2 for cell, end in zip(cells, ends, strict=True)]
    return [cell for cell, middle in zip(cells, middles, strict=True) if int(count * middle / ends[-1]) == index - 1]


def _text(value: Any) -> str:
    return str(value).replace(" ", "")


def _cell(cells: Cells, comparison: Comparison, settings: list[str]) -> Cell:
    try:
        base = compose_config(settings)
        *baselines, candidate = (
            Variant(name, _varied(base, overrides)) for name, overrides in comparison.variants.items()
        )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(settings)}: {one_line(error)}") from error
    control = Variant(f"{candidate.name}, no clock", candidate.config, has_clock=False) if cells.control else None
    parts = tuple(comparison.parts)
    return Cell(
        cells.compare, parts, tuple(baselines), candidate, control, cells.seconds, cells.builds, cells.warmup,
        cells.turn, cells.skip,
    )  # fmt: skip


def _varied(base: Config, overrides: list[str]) -> Config:
    """The configuration with other values under single keys; composing it anew would take ten times as long."""
    varied = OmegaConf.create(to_dict(base))
    varied.merge_with_dotlist(overrides)
    return from_omegaconf(varied)
