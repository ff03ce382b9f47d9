"""The clock in runs and on a GPU: phases that sum to the total, and what they cost."""

import pytest
import torch
from small_runs import small_config

from trainer.console import QuietConsole
from trainer.loop import Trainer
from trainer.timing import PHASES, PhaseClock


def test_what_is_captured_takes_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PhaseClock(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(clock, "_stamp", None)
    with clock.phase("env_step"):
        pass
    assert clock.read()["env_step"] == 0


def test_timing_costs_less_than_a_hundredth_of_a_small_run() -> None:
    trainer = Trainer(small_config("env.engine=torch", "num_envs=2048"), QuietConsole())
    rows = [trainer.train_one_update() for _ in range(5)]
    trainer.close()
    assert min(row["time/clock_ms"] / row["time/total_ms"] for row in rows) < 0.01


@pytest.mark.gpu
def test_on_cuda_turns_that_are_over_are_read_while_the_device_does_more() -> None:
    clock = PhaseClock(torch.device("cuda"), timed_turns=2)
    clock.start()
    for _ in clock.turns(8):
        with clock.phase("env_step"):
            torch.cuda._sleep(1_000_000)
    with clock.phase("update"):
        torch.cuda._sleep(500_000_000)
    clock.settle()
    assert not torch.cuda.current_stream().query(), "it waited for the update"
    clock.lap()
    times = clock.read()
    assert times["env_step"] > 0
    assert sum(times[name] for name in PHASES) == pytest.approx(times["total"], rel=1e-3, abs=1e-3)


@pytest.mark.gpu
def test_on_cuda_phases_sum_to_the_total_and_events_are_used_again() -> None:
    clock = PhaseClock(torch.device("cuda"))
    torch.cuda._sleep(200_000_000)  # until an idle device has raised its clock rate
    clock.start()
    for _ in range(3):
        with clock.phase("update"):
            with clock.phase("forward"):
                torch.cuda._sleep(1_000_000)
            with clock.phase("credit"):
                torch.cuda._sleep(2_000_000)
        clock.lap()
        times = clock.read()
        assert sum(times[name] for name in PHASES) == pytest.approx(times["total"], rel=1e-3, abs=1e-3)
        # both sleeps count cycles of the same clock; the rest of the lap is launches
        assert times["credit"] == pytest.approx(2 * times["forward"], rel=0.25)
        assert times["forward"] <= times["update"] < times["credit"]
