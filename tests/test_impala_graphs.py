"""IMPALA's steps as graphs: they equal an eager run, and are captured before there are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import tape
import torch
from impala_runs import impala_config
from small_runs import without_times

from trainer import graphs, loop
from trainer.console import QuietConsole
from trainer.graphs import WARM_UP_CALLS, Graphs
from trainer.loop import Trainer

#: What two runs of the same numbers do not share.
_CLOCKED = ("share", "learner", "actor")
SETTINGS = [
    ["normalize.observations=true", "impala.update_epochs=2", "impala.lr_schedule=linear", "impala.force_lag=1"],
    ["env.id=Pendulum", "normalize.values=true", "impala.optimizer=rmsprop", "impala.num_minibatches=1"],
    ["credit.estimator=retrace", "impala.normalize_advantages=true", "impala.num_minibatches=3", "impala.force_lag=2"],
    ["policy.core=gru", "policy.core_size=4", "env.pools=4", "impala.rollouts_per_update=2", "impala.queue_size=2"],
]


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def train(*overrides: str, updates: int) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Metrics of a run's updates, and the parameters after them."""
    trainer = Trainer(impala_config(*overrides), QuietConsole())
    try:
        metrics = [without_times(trainer.train_one_update()) for _ in range(updates)]
        numbers = [{k: v for k, v in m.items() if not k.startswith(_CLOCKED)} for m in metrics]
        return numbers, [p.detach().clone() for p in trainer.policy.parameters()]
    finally:
        trainer.close()


def use_tapes(patch: pytest.MonkeyPatch, graphed: bool) -> None:
    def refuse(notice: str) -> None:
        raise AssertionError(notice)

    patch.setattr(graphs, "capture", tape.capture)
    patch.setattr(loop, "make_graphs", lambda config, device, clock, console: Graphs(clock, graphed, notice=refuse))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[0])
def test_operators_called_again_on_the_same_tensors_equal_an_eager_run_bit_for_bit(settings: list[str]):
    results = []
    for graphed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            use_tapes(patch, graphed)
            results.append(train("impala.queue_size=1", "impala.force_lag=0", "rollout_length=4", *settings, updates=5))
    (replayed, parameters), (eager, expected) = results
    assert replayed == eager
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def test_actors_wait_for_threads_until_every_graph_stands(monkeypatch: pytest.MonkeyPatch):
    use_tapes(monkeypatch, graphed=True)
    captured_in: list[str] = []
    original = graphs.capture
    monkeypatch.setattr(
        graphs, "capture", lambda *args: captured_in.append(threading.current_thread().name) or original(*args)
    )
    trainer = Trainer(impala_config("env.pools=4", "impala.rollouts_per_update=2"), QuietConsole())
    preludes = (WARM_UP_CALLS + 1) * 4  # two groups of actors fill two memories each
    try:
        for _ in range(preludes):
            trainer.train_one_update()
            assert not any(thread.name.startswith("actor") for thread in threading.enumerate())
        captures = len(captured_in)
        lags = [trainer.train_one_update()["lag/max"] for _ in range(6)]
        assert sum(thread.name.startswith("actor") for thread in threading.enumerate()) == 4
        assert max(lags) >= 1
    finally:
        trainer.close()
    assert len(captured_in) == captures
    assert set(captured_in) == {"MainThread"}


def test_what_a_capture_does_to_random_generators_is_done_before_its_replay(monkeypatch: pytest.MonkeyPatch):
    """It resets them on its own stream, and a replay sets them on the current one."""
    done: list[str] = []

    @contextmanager
    def capturing(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        done.append(f"begin on {stream}")
        yield
        done.append("end")

    main = SimpleNamespace(priority=0, wait_stream=lambda other: done.append(f"wait for {other}"))
    graph = SimpleNamespace(replay=lambda: done.append("replay"))
    fakes = {"CUDAGraph": lambda: graph, "graph": capturing, "graph_pool_handle": object}
    for name, fake in {**fakes, "current_stream": lambda: main, "Stream": lambda priority: "its own"}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs.capture([lambda: done.append("step")], Graphs(enabled=True), "a step")()
    assert done == ["begin on its own", "step", "end", "wait for its own", "replay"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "engine", [["env.engine=envpool"], ["env.engine=torch", "env.options.compile=false"]], ids=lambda engine: engine[0]
)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[0])
def test_replayed_updates_equal_eager_ones(settings: list[str], engine: list[str]):
    """The same kernels on the same random numbers: equal up to the order in which cuBLAS may sum."""
    common = ("impala.force_lag=0", *settings, *engine, "device=cuda", "matmul_precision=highest")
    results = [train(*common, f"cuda_graphs={enabled}", updates=12) for enabled in ("true", "false")]
    (replayed, parameters), (eager, expected) = results
    for a, b in zip(parameters, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert [m["env_steps"] for m in replayed] == [m["env_steps"] for m in eager]


@pytest.mark.gpu
def test_graphs_that_are_replayed_side_by_side_share_no_memory_of_cublas():
    """Products over 3136 numbers are split, and their parts meet in a workspace: one of another stream would spoil
    them. The first is captured from the default stream, as a learner is."""
    steps, worst = [], torch.zeros(4, device="cuda")
    torch.manual_seed(0)
    for number in range(4):
        x, weight = torch.randn(32, 3136, device="cuda"), torch.randn(3136, 512, device="cuda")
        expected, stream = x @ weight, torch.cuda.Stream(priority=-1) if number else torch.cuda.default_stream()

        def compare(x: Any = x, weight: Any = weight, expected: Any = expected, seen: Any = worst[number]) -> None:
            for _ in range(20):
                torch.maximum(seen, (x @ weight - expected).abs().max(), out=seen)

        steps.append((stream, Graphs(enabled=True).step("the product", graphs.Part(None, compare))))
    torch.cuda.synchronize()
    for _ in range(WARM_UP_CALLS + 50):
        for stream, step in steps:
            with torch.cuda.stream(stream):
                step()
    torch.cuda.synchronize()
    assert worst.max() < 1.0, "entries of about 56, of which a lost part would take some"


@pytest.mark.gpu
def test_actors_that_replay_side_by_side_leave_nothing_that_is_not_finite():
    overrides = ("device=cuda", "env.pools=4", "num_envs=64", "impala.num_minibatches=2")
    metrics, parameters = train(*overrides, updates=60)
    assert all(m["skipped_minibatches"] == 0 for m in metrics)
    assert all(p.isfinite().all() for p in parameters)
