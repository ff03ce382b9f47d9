"""The clock: phases sum to the total, nested ones are exclusive, parts of an update are not counted twice."""

import gc
import itertools
import time

import pytest
import torch

from trainer.timing import PHASES, UPDATE_PARTS, PhaseClock

CPU = torch.device("cpu")


class Hands:
    """A monotonic clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0

    def spend(self, milliseconds: int) -> None:
        self.now += milliseconds * 1_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(time, "perf_counter_ns", hands)
    return hands


def nonzero(times: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in times.items() if value}


def test_time_that_no_phase_claims_is_other(hands: Hands) -> None:
    clock = PhaseClock(CPU)
    clock.lap()
    hands.spend(2)
    with clock.phase("env_step"):
        hands.spend(5)
    with clock.phase("credit"):
        hands.spend(1)
    with clock.phase("env_step"):
        hands.spend(4)
    clock.lap()
    assert nonzero(clock.read()) == {"env_step": 9, "credit": 1, "other": 2, "total": 12}


def test_an_inner_phase_is_taken_out_of_the_outer_one(hands: Hands) -> None:
    clock = PhaseClock(CPU)
    clock.lap()
    with clock.phase("inference"):
        hands.spend(1)
        with clock.phase("env_step"):
            hands.spend(10)
            with clock.phase("transfer"):
                hands.spend(100)
            with clock.phase("transfer"):
                hands.spend(300)
    clock.lap()
    assert nonzero(clock.read()) == {"inference": 1, "env_step": 10, "transfer": 400, "total": 411}


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_few_of_many_equal_turns_stand_for_all_of_them(hands: Hands, is_settled: bool) -> None:
    clock = PhaseClock(CPU, timed_turns=2)
    clock.lap()
    with clock.phase("credit"):
        hands.spend(7)
    for number in clock.turns(5):  # every third is timed, counted from the third
        with clock.phase("inference"):
            hands.spend(1)
            with clock.phase("env_step"):
                hands.spend(2 if number == 2 else 100)
        hands.spend(1)
    if is_settled:
        clock.settle()
        clock.settle()
    clock.lap()
    turns = 4 + 4 * 102
    expected = {"inference": turns / 3, "env_step": turns * 2 / 3, "credit": 7, "total": 7 + turns}
    assert nonzero(clock.read()) == pytest.approx(expected)
    with clock.phase("log"):
        hands.spend(3)
    clock.lap()
    assert nonzero(clock.read()) == {"log": 3, "total": 3}, "turns that are over are forgotten"


def test_few_turns_are_all_timed(hands: Hands) -> None:
    clock = PhaseClock(CPU, timed_turns=3)
    clock.lap()
    for number in clock.turns(3):
        with clock.phase("env_step"):
            hands.spend(10**number)
    clock.lap()
    assert nonzero(clock.read()) == {"env_step": 111, "total": 111}


def test_turns_that_an_error_ends_leave_the_clock_going(hands: Hands) -> None:
    clock = PhaseClock(CPU, timed_turns=1)
    clock.lap()
    with pytest.raises(ZeroDivisionError):
        for _ in clock.turns(9):
            raise ZeroDivisionError
    gc.collect()
    with clock.phase("log"):
        hands.spend(2)
    clock.lap()
    assert nonzero(clock.read()) == {"log": 2, "total": 2}


def test_short_laps_rest_until_one_may_be_timed_again_and_are_filled_like_the_last_timed_one(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhaseClock, "_measure_phase", lambda _: 1.0)
    clock = PhaseClock(CPU, timed_turns=1, budget=0.05)  # 2 phases of 10 ms: 2 ms are 5 % of 4 laps
    rows, costs = [], []

    def lap(env_step: int, credit: int) -> None:
        for turn in clock.turns(2):
            with clock.phase("env_step"):
                hands.spend(env_step if turn else 0)
        with clock.phase("credit"):
            hands.spend(credit)
        clock.lap()
        rows.append(nonzero(clock.read()))
        costs.append(clock.cost_ms)

    clock.start()
    lap(6, 4)
    lap(8, 2)  # begun before the first one was read
    for _ in range(3):
        lap(1, 19)
    lap(5, 5)
    lap(2, 2)
    assert rows[:2] == [{"env_step": 6, "credit": 4, "total": 10}, {"env_step": 8, "credit": 2, "total": 10}]
    assert rows[2:5] == [pytest.approx({"env_step": 16, "credit": 4, "total": 20})] * 3
    assert rows[5:] == [{"env_step": 5, "credit": 5, "total": 10}, {"env_step": 2, "credit": 2, "total": 4}]
    assert costs == [2, 2, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("interval", [2, 3, 4, 5])
def test_laps_that_are_started_one_by_one_rest_as_those_in_a_row(
    hands: Hands, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    monkeypatch.setattr(PhaseClock, "_measure_phase", lambda _: 1.0)
    clock, timed = PhaseClock(CPU, budget=1 / (10 * interval)), []  # a phase in 10 ms: 1 ms of so many laps
    for number in range(4 * interval):
        clock.start()
        with clock.phase("env_step"):
            hands.spend(10)
        clock.lap()
        clock.read()
        timed += [number] if clock.cost_ms else []
    assert timed == list(range(0, 4 * interval, interval))


def test_long_laps_and_those_of_a_clock_that_may_not_rest_are_all_timed(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhaseClock, "_measure_phase", lambda _: 1.0)
    for budget, may_rest in ((0.05, False), (0.5, True), (None, True)):
        clock = PhaseClock(CPU, budget=budget)
        clock.may_rest = may_rest
        clock.start()
        for spent in (3, 4, 5):
            with clock.phase("env_step"):
                hands.spend(spent)
            clock.lap()
            assert nonzero(clock.read()) == {"env_step": spent, "total": spent}


def test_laps_that_are_read_together_are_filled_in_their_order(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PhaseClock, "_measure_phase", lambda _: 1.0)
    clock = PhaseClock(CPU, budget=0.05)
    clock.interval = 2
    clock.start()
    for env_step, credit in ((100, 0), (3, 1), (10, 10)):  # the first one rests, and there is nothing to fill it like
        with clock.phase("env_step"):
            hands.spend(env_step)
        with clock.phase("credit"):
            hands.spend(credit)
        clock.lap()
    assert nonzero(clock.read()) == {"other": 100, "env_step": 3 + 15, "credit": 1 + 5, "total": 124}


def test_parts_of_the_update_stay_inside_it(hands: Hands) -> None:
    clock = PhaseClock(CPU)
    clock.lap()
    with clock.phase("update"):
        hands.spend(1)
        for part, spent in zip(UPDATE_PARTS, (10, 20, 40), strict=True):
            with clock.phase(part):
                hands.spend(spent)
    clock.lap()
    assert nonzero(clock.read()) == {"update": 71, "forward": 10, "backward": 20, "optimizer": 40, "total": 71}


def test_a_phase_inside_a_part_is_taken_out_of_the_part_and_of_the_update(hands: Hands) -> None:
    clock = PhaseClock(CPU)
    clock.lap()
    with clock.phase("log"), clock.phase("update"), clock.phase("forward"):
        hands.spend(3)
        with clock.phase("transfer"):
            hands.spend(5)
    clock.lap()
    assert nonzero(clock.read()) == {"update": 3, "forward": 3, "transfer": 5, "total": 8}


def test_a_phase_that_raises_is_timed_and_closed(hands: Hands) -> None:
    clock = PhaseClock(CPU)
    clock.lap()
    with pytest.raises(KeyError), clock.phase("credit"):
        hands.spend(3)
        raise KeyError
    with clock.phase("log"):
        hands.spend(1)
    clock.lap()
    assert nonzero(clock.read()) == {"credit": 3, "log": 1, "total": 4}


def test_several_laps_are_read_together_and_an_unfinished_one_waits(hands: Hands) -> None:
    clock = PhaseClock(CPU)
    hands.spend(1000)  # before the first lap: nobody's
    clock.lap()
    for _ in range(2):
        with clock.phase("credit"):
            hands.spend(3)
        clock.lap()
    with clock.phase("log"):
        hands.spend(7)
    assert nonzero(clock.read()) == {"credit": 6, "total": 6}
    clock.lap()
    assert nonzero(clock.read()) == {"log": 7, "total": 7}


def test_nothing_to_read_is_all_zeros() -> None:
    assert PhaseClock(CPU).read() == dict.fromkeys((*PHASES, "total"), 0.0), "parts of update are told only if timed"


def test_the_clock_tells_what_it_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))  # a microsecond for every look at the clock
    clock = PhaseClock(CPU)
    clock.start()
    with clock.phase("update"):
        for _ in range(4):
            with clock.phase("forward"):
                pass
    clock.lap()
    clock.read()
    assert clock.cost_ms == pytest.approx(5 * 0.002, rel=0.03)
    clock.lap()
    clock.read()
    assert clock.cost_ms == 0
