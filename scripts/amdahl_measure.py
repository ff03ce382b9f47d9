"""Runs of a cell in one process, in turns A B A B with the same seeds: what their updates take, in all and alone.

End-to-end times come from the host's clock around whole updates, shares from the run's own phase clock, and speed-ups
of a part from calling that part alone: three measurements that do not know of each other.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from envs.base import VecEnv
from scripts.amdahl_cells import Cell, Variant
from trainer.builder import make_training_env, resolve_device
from trainer.config import Config
from trainer.console import QuietConsole
from trainer.estimator import Estimator
from trainer.loop import Trainer
from trainer.probe import CreditProbe, compare_credit, estimator_of, synchronize
from trainer.rollout import Rollout
from trainer.timing import PHASES

MIN_ROUNDS, MAX_ROUNDS = 6, 60


class Sample(NamedTuple):
    """One update."""

    wall_ms: float  #: by the host's clock, from an idle device to an idle device
    phases_ms: dict[str, float]  #: by the run's clock, and their ``total``
    clock_ms: float  #: what timing them took: their number times the cost of an empty one
    interval: int = 1  #: of so many such updates a run of its own times one; here every one is timed


@dataclass
class Run:
    """One variant under way."""

    variant: Variant
    trainer: Trainer
    source_state: dict[str, Any] | None = None  #: with that of an env that it shares with the other runs
    unfinished_ms: float = 0.0  #: for how long the device has work when credit is assigned

    @property
    def credit(self) -> Estimator:
        """The run's own credit call."""
        return estimator_of(self.trainer.config.credit, self.trainer.backend)

    @contextmanager
    def env_as_left(self) -> Iterator[None]:
        """Give an env that is shared the state in which this run left it, and keep the one that it is left in."""
        env = self.trainer.env
        env.clock = self.trainer.clock
        if self.source_state is None:
            yield
            return
        self.trainer.source.load_state_dict(self.source_state)
        yield
        self.source_state = self.trainer.source.state_dict()

    def update(self) -> Sample:
        """One whole update, its logging included."""
        trainer, clock = self.trainer, self.trainer.clock
        synchronize(trainer.device)
        clock.start()
        start = time.perf_counter()
        metrics = trainer.train_one_update()
        interval = clock.interval
        clock.lap()
        logging = clock.read()  # reading the update's figures, which a run counts in the next update
        wall_ms = (time.perf_counter() - start) * 1e3
        phases = {name: metrics[f"time/{name}_ms"] + logging[name] for name in (*PHASES, "total")}
        return Sample(wall_ms, phases, metrics["time/clock_ms"] + clock.cost_ms, interval)

    def take_turn(self, updates: int, skipped: int, seed: int) -> list[Sample]:
        """Make some updates; what they took, without the first ``skipped``. Equal seeds draw equal numbers."""
        torch.manual_seed(self.trainer.config.seed + seed)
        with self.env_as_left():
            return [self.update() for _ in range(updates)][skipped:]

    def warm_up(self, updates: int) -> None:
        """Make some updates, and another one that tells where credit stands in it."""
        self.take_turn(updates, skipped=0, seed=0)
        probe = self.trainer.probe = CreditProbe(
            self.credit, self.credit, self.variant.name, self.trainer.graphs.enabled
        )
        self.take_turn(1, skipped=0, seed=0)
        self.trainer.probe = None
        if probe.times is not None:
            self.unfinished_ms = probe.times.unfinished_ms

    @property
    def newest(self) -> tuple[Rollout, Tensor]:
        """The rollout and rewards of the last update."""
        if self.trainer.newest is None:
            raise RuntimeError(f"{self.variant.name}: there was no update yet")
        return self.trainer.newest


class PartTimes(NamedTuple):
    """A part alone, in a baseline and in the candidate."""

    baseline_ms: float
    candidate_ms: float


def _time_credit(baseline: Run, candidate: Run) -> PartTimes:
    """Both runs' credit calls on the baseline's live tensors."""
    graphed = baseline.trainer.graphs.enabled
    times = compare_credit(baseline.credit, candidate.credit, *baseline.newest, baseline.unfinished_ms, graphed)
    return PartTimes(times.used_ms, times.other_ms)


def _time_update(baseline: Run, candidate: Run) -> PartTimes:
    """Each run's algorithm once more on its last rollout, credit included."""

    def update(run: Run) -> float:
        return _alone(run, lambda: run.trainer.algorithm.update(*run.newest, run.trainer.progress))

    return PartTimes(update(baseline), update(candidate))


def _time_collect(baseline: Run, candidate: Run) -> PartTimes:
    """One rollout more of each run."""

    def collect(run: Run) -> float:
        with run.env_as_left():
            return _alone(run, run.trainer.source.collect)

    return PartTimes(collect(baseline), collect(candidate))


def _alone(run: Run, call: Callable[[], object]) -> float:
    """Milliseconds of a call from an idle device to an idle device."""
    synchronize(run.trainer.device)
    start = time.perf_counter()
    call()
    synchronize(run.trainer.device)
    return (time.perf_counter() - start) * 1e3


#: How each of `PARTS` is timed alone.
TIMED = {"credit": _time_credit, "update": _time_update, "collect": _time_collect}


Rounds = list[list[Sample]]


@dataclass(frozen=True)
class Measured:
    """What came out of one cell."""

    cell: Cell
    samples: dict[str, Rounds] = field(default_factory=lambda: defaultdict(list))  #: by variant
    parts: dict[str, list[dict[str, PartTimes]]] = field(default_factory=lambda: defaultdict(list))  #: by baseline

    @property
    def rounds(self) -> int:
        """Turns that every run took, there and back."""
        return len(self.samples[self.cell.candidate.name])


class EnvShelf:
    """Envs that outlive a cell, as building one may take longer than measuring.

    One that can give its state serves all runs of a cell, each with a state of its own; of others every run has one.
    """

    def __init__(self) -> None:
        self._envs: dict[str, list[VecEnv]] = {}  #: by what decides which envs they are

    def take(self, config: Config, index: int) -> VecEnv:
        """The env of a cell's ``index``-th run, as new."""
        settings = (config.algo, config.env, config.num_envs, config.seed, config.device)
        envs = self._envs.setdefault(str(settings), [])
        if envs and envs[0].state_dict() is not None:
            index = 0
        if index < len(envs):
            envs[index].reseed(0)
        else:
            envs.append(make_training_env(config, resolve_device(config.device)))
        return envs[index]

    def close(self) -> None:
        """End all envs."""
        for env in itertools.chain(*self._envs.values()):
            env.close()
        self._envs.clear()


def measure(cell: Cell, shelf: EnvShelf) -> Measured:
    """Build a cell's runs, warm them up, and let them take turns; so often as the cell says, with an equal part of its
    budget each time, and every second time in the opposite order: where a run's memory comes to lie may favour it.

    Raises:
        ConfigError, EnvError: a run cannot be built.
    """
    measured = Measured(cell)
    for build in range(cell.builds):
        with _runs(cell.variants[:: -1 if build % 2 else 1], shelf) as runs:
            for run in runs.values():
                run.warm_up(cell.warmup)
            _take_turns(measured, runs)
    return measured


def _take_turns(measured: Measured, runs: dict[str, Run]) -> None:
    """Rounds until this build's part of the budget is spent."""
    cell, before = measured.cell, measured.rounds
    fewest, most = (-(-limit // cell.builds) for limit in (MIN_ROUNDS, MAX_ROUNDS))
    deadline = time.monotonic() + cell.seconds / cell.builds
    while (done := measured.rounds - before) < fewest or (done < most and time.monotonic() < deadline):
        _make_round(measured, runs)


def _make_round(measured: Measured, runs: dict[str, Run]) -> None:
    """Every run once there and once back, so that a drift cancels, and then the parts alone."""
    cell, number = measured.cell, measured.rounds
    found: dict[str, list[Sample]] = defaultdict(list)
    for way, order in enumerate((list(runs), list(runs)[::-1])):
        for name in order:
            found[name] += runs[name].take_turn(cell.turn, cell.skip, seed=1 + 2 * number + way)
    for name, samples in found.items():
        measured.samples[name].append(samples)
    candidate = runs[cell.candidate.name]
    for name in (baseline.name for baseline in cell.baselines):
        measured.parts[name].append({part: TIMED[part](runs[name], candidate) for part in cell.parts})


@contextmanager
def _runs(variants: Sequence[Variant], shelf: EnvShelf) -> Iterator[dict[str, Run]]:
    """Runs by their variants' names, whose memory is free again afterwards."""
    runs: dict[str, Run] = {}
    try:
        for index, variant in enumerate(variants):
            runs[variant.name] = _build(variant, shelf.take(variant.config, index))
        yield runs
    finally:
        for run in runs.values():
            run.trainer.source.close()
            del run.trainer
        gc.collect()
        torch.cuda.empty_cache()


def _build(variant: Variant, env: VecEnv) -> Run:
    trainer = Trainer(variant.config, QuietConsole(), env)
    trainer.clock.may_rest = False
    if not variant.has_clock:
        vars(trainer.clock).update(phase=nullcontext, turns=range)  # in place of the methods: no stamp is taken
    return Run(variant, trainer, None if env.state_dict() is None else trainer.source.state_dict())
