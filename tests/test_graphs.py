"""Steps become graphs: what is captured, what the clock still sees, and that replays equal eager runs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tape
import torch
from small_runs import small_config, without_times

from trainer import graphs, loop
from trainer.builder import make_graphs
from trainer.console import QuietConsole
from trainer.graphs import WARM_UP_CALLS, Graphs, Part
from trainer.loop import Trainer
from trainer.timing import PhaseClock

CPU = torch.device("cpu")
#: Uncompiled: a compilation for every run would take longer than the runs.
ENGINES = {"torch": ["env.engine=torch", "env.options.compile=false"], "envpool": ["env.engine=envpool"]}

Run = tuple[list[dict[str, Any]], list[torch.Tensor]]  #: metrics of every update, and the parameters at the end


class Journal:
    """Notes, in order, which phases open and close and which parts run; stands for the clock."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def phase(self, name: str, /) -> Iterator[None]:
        self.lines.append(f"+{name}")
        yield
        self.lines.append(f"-{name}")

    def part(self, phase: str | None, name: str) -> Part:
        return Part(phase, lambda: self.lines.append(name))

    def take(self) -> str:
        lines, self.lines = self.lines, []
        return " ".join(lines)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts went into each graph; a replay of these stand-ins runs the parts."""
    sizes: list[int] = []

    def capture(steps: list[Callable[[], None]], *_: Any) -> Callable[[], None]:
        sizes.append(len(steps))
        return lambda: [step() for step in steps]

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return sizes


def update_step(journal: Journal, detail: bool) -> graphs.GraphedStep:
    names = ("forward", "backward", "optimizer")
    return Graphs(journal, True, detail).step("a step", *(journal.part(name, name[0]) for name in names))


def test_a_cpu_has_no_graphs() -> None:
    for setting in ("true", "false"):
        config = small_config(f"cuda_graphs={setting}")
        clock = PhaseClock(CPU)
        assert not make_graphs(config, CPU, clock, QuietConsole()).enabled
        assert make_graphs(config, torch.device("cuda"), clock, QuietConsole()).enabled == (setting == "true")


def test_a_step_warms_up_eagerly_and_its_parts_are_timed_until_then(captures: list[int]) -> None:
    journal = Journal()
    step = update_step(journal, detail=False)
    for _ in range(WARM_UP_CALLS):
        step()
        assert journal.take() == "+forward f -forward +backward b -backward +optimizer o -optimizer"
    assert not captures
    step()
    assert captures == [3]
    assert journal.take() == "f b o"  # one graph: its parts cannot be told apart


def test_high_detail_cuts_the_update_into_its_parts(captures: list[int]) -> None:
    journal = Journal()
    step = update_step(journal, detail=True)
    for _ in range(WARM_UP_CALLS + 1):
        journal.take()
        step()
    assert captures == [1, 1, 1]
    assert journal.take() == "+forward f -forward +backward b -backward +optimizer o -optimizer"


def test_phases_of_the_loop_are_cut_apart_whatever_the_detail(captures: list[int]) -> None:
    journal = Journal()
    parts = [journal.part(phase, name) for phase, name in (("normalize", "n"), ("inference", "i"), ("inference", "j"))]
    step = Graphs(journal, True).step("a step", *parts)
    for _ in range(WARM_UP_CALLS + 1):
        journal.take()
        step()
    assert captures == [1, 2]
    assert journal.take() == "+normalize n -normalize +inference i j -inference"


def test_a_reset_step_warms_up_and_is_captured_again(captures: list[int]) -> None:
    step = update_step(Journal(), detail=False)
    for _ in range(2):
        for _ in range(WARM_UP_CALLS + 2):
            step()
        step.reset()
    assert captures == [3, 3]


def test_closed_graphs_hold_nothing_that_was_captured(captures: list[int]) -> None:
    some = Graphs(enabled=True)
    step = some.step("a step", Part(None, lambda: None))
    for closings in range(2):
        for _ in range(WARM_UP_CALLS + 2):
            step()
        assert len(captures) == 1 + closings
        some.close()
        assert step._replays == []


def test_steps_of_one_name_share_memory(captures: list[int]) -> None:
    some = Graphs(enabled=True)
    assert some.pool("minibatches") is some.pool("minibatches")
    assert some.pool("minibatches") is not some.pool("the update's end")


def test_a_step_that_cannot_be_captured_says_why_once_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(graphs, "capture", fail)
    notices: list[str] = []
    calls: list[int] = []
    step = Graphs(enabled=True, notice=notices.append).step("the policy step", Part(None, lambda: calls.append(1)))
    for _ in range(WARM_UP_CALLS + 4):
        step()
    assert len(calls) == WARM_UP_CALLS + 4
    assert notices == [
        "cuda_graphs=true: the policy step cannot be captured and runs eagerly: "
        "operation not permitted when stream is capturing"
    ]


def test_a_step_that_is_not_capturable_is_never_captured(captures: list[int]) -> None:
    step = Graphs(enabled=True).step("a step", Part(None, lambda: None), capturable=False)
    for _ in range(WARM_UP_CALLS + 2):
        step()
    assert not captures


def train(*overrides: str, graphed: bool, updates: int = 7) -> Run:
    """Metrics and parameters of a small run on the CPU, with tapes for graphs or eagerly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", tape.capture)
        patch.setattr(loop, "make_graphs", lambda config, device, clock, console: Graphs(clock, graphed, notice=refuse))
        trainer = Trainer(small_config("env.engine=torch", *overrides), QuietConsole())
        metrics = [without_times(trainer.train_one_update()) for _ in range(updates)]
        parameters = [p.detach().clone() for p in trainer.policy.parameters()]
        trainer.close()
    return metrics, parameters


def refuse(notice: str) -> None:
    raise AssertionError(notice)


@pytest.mark.parametrize(
    "settings",
    [
        ["ppo.lr_schedule=adaptive", "normalize.observations=true", "normalize.rewards=true"],
        ["env.id=Pendulum", "ppo.lr_schedule=linear", "ppo.clip_schedule=linear", "normalize.values=false"],
        ["ppo.entropy_coef=0.1", "ppo.entropy_schedule=linear", "ppo.target_kl=0.0005", "total_steps=600"],
        ["ppo.recompute_advantages=minibatch", "ppo.value_clip_range=0.2"],
        ["ppo.num_minibatches=3", "ppo.recompute_advantages=epoch"],
        ["ppo.recompute_advantages=epoch", "env.id=Pendulum", "normalize.observations=true"],
        ["env.reseed_interval=5"],
        ["policy.core=lstm", "policy.core_size=8", "normalize.observations=true"],
    ],
    ids=lambda settings: settings[0],
)
def test_operators_called_again_on_the_same_tensors_equal_an_eager_run_bit_for_bit(settings: list[str]) -> None:
    (replayed, parameters), (eager, expected) = (train(*settings, graphed=graphed) for graphed in (True, False))
    assert replayed == eager
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def run(*overrides: str, updates: int = 20) -> Run:
    # in tf32 a difference in the last bit may turn a rounding, and with it an action: runs would part
    config = small_config("device=cuda", "loss.backend=torch", "matmul_precision=highest", *overrides)
    trainer = Trainer(copy.deepcopy(config), QuietConsole())
    metrics = [trainer.train_one_update() for _ in range(updates)]
    parameters = [p.detach().clone() for p in trainer.policy.parameters()]
    trainer.close()
    return metrics, parameters


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        ["ppo.lr_schedule=adaptive", "normalize.observations=true"],
        ["ppo.lr_schedule=linear", "ppo.target_kl=0.001", "ppo.clip_schedule=linear", "ppo.entropy_schedule=linear"],
        ["ppo.recompute_advantages=minibatch", "normalize.rewards=true", "ppo.num_minibatches=3"],
        ["timing.detail=high"],
        ["loss.backend=triton", "ppo.value_clip_range=0.2", "ppo.entropy_coef=0.01", "matmul_precision=highest"],
        ["policy.core=gru", "policy.core_size=8", "loss.backend=triton"],
    ],
    ids=lambda settings: settings[0],
)
def test_replayed_updates_equal_eager_ones(engine: str, settings: list[str]) -> None:
    """The same kernels on the same random numbers: equal up to the order in which cuBLAS may sum under another
    workspace."""
    common = [*ENGINES[engine], *settings]
    assert_alike(*(run(f"cuda_graphs={graphs}", *common) for graphs in ("true", "false")))


@pytest.mark.gpu
@pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
def test_the_fused_loss_trains_as_the_one_in_torch_does(env: str) -> None:
    """Sums in another order: a rounding in the loss, and what Adam makes of it; tf32 would make a thousandth of it."""
    common = [*ENGINES["torch"], f"env.id={env}", "ppo.entropy_coef=0.01", "ppo.value_clip_range=0.2"]
    common += ["matmul_precision=highest"]
    assert_alike(*(run(f"loss.backend={backend}", *common) for backend in ("triton", "torch")))


@pytest.mark.gpu
@pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
def test_networks_side_by_side_train_as_those_apart_do(env: str) -> None:
    """Products of some 21 bits instead of 24, and what Adam makes of it."""
    common = [*ENGINES["torch"], f"env.id={env}"]
    assert_alike(*(run(f"policy.backend={backend}", *common) for backend in ("triton", "torch")))


def assert_alike(replayed_run: Run, eager_run: Run) -> None:
    (replayed, replayed_parameters), (eager, eager_parameters) = replayed_run, eager_run
    for a, b in zip(replayed_parameters, eager_parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(replayed, eager, strict=True):
        assert a["env_steps"] == b["env_steps"]
        assert a["stopped_minibatches"] == b["stopped_minibatches"]
        for name in ("loss/policy", "loss/value", "loss/approx_kl", "learning_rate", "explained_variance"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


@pytest.mark.gpu
def test_replays_still_tell_the_phases_and_only_high_detail_the_parts_of_the_update() -> None:
    normal, high = (
        run(*ENGINES["torch"], f"timing.detail={detail}", updates=12)[0][-1] for detail in ("normal", "high")
    )
    for metrics in (normal, high):
        assert all(
            metrics[f"time/{phase}_ms"] > 0 for phase in ("env_step", "transfer", "inference", "credit", "update")
        )
    assert "time/forward_ms" not in normal
    parts = sum(high[f"time/{part}_ms"] for part in ("forward", "backward", "optimizer"))
    assert 0 < parts <= high["time/update_ms"]


@pytest.mark.gpu
def test_what_waits_for_the_device_cannot_be_captured_and_runs_eagerly() -> None:
    notices: list[str] = []
    numbers, read = torch.zeros(3, device="cuda"), []

    def waits() -> None:
        numbers.add_(1)
        read.append(numbers.sum().item())

    step = Graphs(enabled=True, notice=notices.append).step("a step", Part(None, waits))
    for _ in range(WARM_UP_CALLS + 3):
        step()
    assert numbers.tolist() == [WARM_UP_CALLS + 3.0] * 3
    assert len(notices) == 1 and "a step cannot be captured" in notices[0]
    assert torch.rand(2, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_a_replay_with_learning_rate_0_changes_nothing() -> None:
    config = small_config("device=cuda", *ENGINES["torch"], "ppo.lr_schedule=constant", "normalize.values=false")
    trainer = Trainer(config, QuietConsole())
    for _ in range(5):  # warm-up, capture, replay
        trainer.train_one_update()
    trainer.algorithm.learning_rate.zero_()
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    trainer.train_one_update()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    trainer.close()
