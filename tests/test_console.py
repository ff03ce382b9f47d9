"""What a person sees: a live panel in a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest
from rich.console import Console

from trainer import console
from trainer.config import LoggingConfig
from trainer.console import (
    LiveConsole,
    PlainConsole,
    QuietConsole,
    count,
    duration,
    make_console,
    prepare_streams,
    say,
)
from trainer.timing import PHASES


def metrics(**changes: Any) -> dict[str, Any]:
    shares = dict.fromkeys(PHASES, 0.0) | {"update": 60.0, "env_step": 29.0, "inference": 10.7, "log": 0.3}
    return {
        "update": 7,
        "env_steps": 12_345,
        "steps_per_second": 4_560_000.0,
        "episode_return": None,
        "episode_length": None,
        "episodes": 0,
        "loss/approx_kl": 0.00412,
        **{f"share/{name}": value / 100.0 for name, value in shares.items()},
        **changes,
    }


def drawn(width: int, title: str = "ppo CartPole envpool", **changes: Any) -> str:
    """The text of a panel in a terminal of so many columns."""
    stream = io.StringIO()
    live = LiveConsole(title, Console(file=stream, width=width, force_terminal=False))
    live.show(metrics(**changes), 0.25)
    live.close()
    return stream.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (7.25, "7.25"), (999, "999"), (999.6, "1 k"), (1000, "1 k"), (12_345, "12.3 k"), (999_400, "999 k"),
        (999_600, "1 M"), (4_560_000, "4.56 M"), (1e9, "1 G"), (123e9, "123 G"), (-12_345, "-12.3 k"),
    ],
)  # fmt: skip
def test_counts_have_three_digits_and_a_unit(number: float, text: str):
    assert count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (61, "1:01"), (3599, "59:59"), (3723, "1:02:03")])
def test_durations_read_as_a_clock(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_its_terminal_and_shows_progress_and_the_dearest_phases(width: int):
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= min(width, 80)
    assert "25.0%" in text
    for shown in ("12.3 k", "4.56 M", "-"):
        assert shown in text
    assert text.index("update 60%") < text.index("env_step 29%") < text.index("inference 11%")
    assert "log 0%" not in text


def test_the_phase_bar_is_as_wide_as_it_should_be_however_shares_round():
    shares = {f"share/{name}": 1 / 8 for name in PHASES}
    assert drawn(120, **shares).count("█") == console._BAR_WIDTH


def test_brackets_in_paths_and_names_are_shown_as_they_are():
    assert "ppo [bold]x[/] envpool" in drawn(100, title="ppo [bold]x[/] envpool")
    stream = io.StringIO()
    live = LiveConsole("title", Console(file=stream, width=200, force_terminal=False))
    live.notice("runs/[red]a[/red]/[/oops]")
    live.close()
    assert "rollscan: runs/[red]a[/red]/[/oops]" in stream.getvalue()


def test_a_pipe_gets_plain_lines_and_a_terminal_the_panel(monkeypatch: pytest.MonkeyPatch):
    assert type(make_console(LoggingConfig(console="none"), "")) is QuietConsole
    assert isinstance(make_console(LoggingConfig(console="auto"), ""), PlainConsole)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    live = make_console(LoggingConfig(console="auto"), "")
    live.close()
    assert isinstance(live, LiveConsole)


def test_plain_lines_come_at_their_interval_and_the_last_update_always(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    plain = PlainConsole(interval=10.0)
    for update in range(1, 26):
        plain.show(metrics(update=update, env_steps=update), update / 100)
        now += 1.0
    plain.close()
    plain.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1%", "1"], ["11%", "11"], ["21%", "21"], ["25%", "25"]]
    assert "left    1:29" in lines[1], "89 % at 1 % a second"
    assert not any("\x1b" in line for line in lines)


def test_time_left_counts_from_where_a_resumed_run_began(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    plain = PlainConsole(interval=0.0)
    plain.show(metrics(), 0.50)
    now += 10.0
    plain.show(metrics(), 0.60)
    first, second = capsys.readouterr().out.splitlines()
    assert "left       -" in first
    assert "left    0:40" in second


def test_notices_go_to_the_error_stream(capsys: pytest.CaptureFixture[str]):
    QuietConsole().notice("hello")
    assert capsys.readouterr() == ("", "rollscan: hello\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_lines_that_nobody_reads_any_more_end_no_run(monkeypatch: pytest.MonkeyPatch, stream: str):
    read, write = os.pipe()
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, stream, pipe)
        plain = PlainConsole(interval=0.0)
        plain.show(metrics(), 0.1)
        plain.notice("first")
        os.close(read)  # as `| head -1` does
        plain.show(metrics(), 0.2)
        plain.notice("second")
        plain.close()
    assert pipe.closed  # also what was still buffered could be given up


def test_a_sign_that_the_terminal_does_not_know_is_a_question_mark(monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    prepare_streams()
    live = LiveConsole("title")
    live.show(metrics(), 0.1)
    live.close()
    say("±", sys.stdout)
    assert b"update 60%" in written.getvalue()
    assert written.getvalue().endswith("±\n".encode("latin-1"))


def test_closed_streams_are_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    prepare_streams()
    plain = make_console(LoggingConfig(console="auto", plain_interval=0.0), "")
    plain.show(metrics(), 0.1)
    plain.notice("nobody")
    assert isinstance(plain, PlainConsole)


def test_a_panel_whose_terminal_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    terminal, ours = os.openpty()
    with open(ours, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        live = LiveConsole("title")
        live.show(metrics(), 0.1)
        os.close(terminal)
        live.notice("nobody reads this")
        live.close()
    assert stream.closed  # also what was still buffered could be given up
