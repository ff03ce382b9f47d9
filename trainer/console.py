"""What a person sees while a run goes on: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, Protocol, TextIO

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer import distributed
from trainer.config import LoggingConfig
from trainer.timing import PHASES

_STYLES = ("green", "yellow", "cyan", "magenta", "blue", "bright_black", "white", "red")
_COLORS: dict[str, str] = dict(zip(PHASES, _STYLES, strict=True))
_STDERR = 2
_WIDTH = 80
_BAR_WIDTH = 56
_SHOWN_SHARE = 0.005  #: phases below it are left out of the text


class Console(Protocol):
    """Where progress and notices go."""

    def notice(self, text: str) -> None:
        """Tell a person something once."""
        ...

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        """Show an update's metrics; ``progress`` is in [0, 1]."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def make_console(config: LoggingConfig, title: str) -> Console:
    """The console that ``logging.console`` asks for."""
    kind = config.console
    if kind == "auto":
        kind = "rich" if sys.stdout is not None and sys.stdout.isatty() else "plain"
    if kind == "rich":
        return LiveConsole(title)
    return PlainConsole(config.plain_interval) if kind == "plain" else QuietConsole()


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: float) -> str:
    """``12.3 k``, ``4.56 M``: three digits."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= 0.9995 * scale:  # from there on three digits would round up to it
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


@contextmanager
def _unread_is_fine(stream: TextIO) -> Iterator[None]:
    """Where nobody reads a stream any more (`| head`, a terminal that is gone), what is written is dropped."""
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is buffered shall fail no later flush


def say(text: str, stream: TextIO | None) -> None:
    """Print a line, whether somebody reads it or not; a stream that was closed from the start is None."""
    if stream is not None:
        with _unread_is_fine(stream):
            print(text, file=stream, flush=True)


def prepare_streams() -> None:
    """Let this process write to any terminal or none: signs that it does not know become question marks, and standard
    descriptors that were closed lead nowhere, lest a file of the run gets their numbers and what is written to them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _dearest_phases(metrics: dict[str, Any]) -> list[tuple[str, float]]:
    """The phases and their shares of the update's wall time, the dearest first."""
    return sorted(((name, metrics.get(f"share/{name}", 0.0)) for name in PHASES), key=lambda item: -item[1])


class _Remaining:
    """Time left, from the progress since this process began: a resumed run does not count what was done before."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None

    def seconds(self, progress: float) -> float | None:
        if self._first is None:
            self._first, self._start = progress, time.monotonic()
            return None
        done = progress - self._first
        return (time.monotonic() - self._start) * (1.0 - progress) / done if done > 0 else None


class QuietConsole:
    """Shows nothing but notices, on the error stream."""

    def notice(self, text: str) -> None:
        """Tell a person something once."""
        rank = f" rank {distributed.rank()}:" if distributed.rank() else ""
        say(f"rollscan:{rank} {text}", sys.stderr)

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainConsole(QuietConsole):
    """One line every so many seconds, for log files and pipes."""

    def __init__(self, interval: float):
        self._interval, self._last = interval, -float("inf")
        self._remaining = _Remaining()
        self._latest: tuple[dict[str, Any], float] | None = None

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        """Print a line if the last one is long enough ago."""
        self._latest = metrics, progress
        left = self._remaining.seconds(progress)
        if time.monotonic() - self._last < self._interval:
            return
        self._print(metrics, progress, left)

    def _print(self, metrics: dict[str, Any], progress: float, left: float | None) -> None:
        self._last, self._latest = time.monotonic(), None
        shares = _dearest_phases(metrics)
        line = (
            f"{progress:4.0%}  {count(metrics['env_steps']):>6} steps  {count(metrics['steps_per_second']):>6}/s  "
            f"return {_number(metrics['episode_return']):>6}  length {_number(metrics['episode_length']):>5}  "
            f"left {duration(left) if left is not None else '-':>7}  "
            + " ".join(f"{name} {share:.0%}" for name, share in shares[:4] if share >= _SHOWN_SHARE)
        )
        say(line, sys.stdout)

    def close(self) -> None:
        """Print the last update if its line was held back."""
        if self._latest is not None:
            self._print(*self._latest, None)


class LiveConsole:
    """A panel that is redrawn in place: progress, returns, throughput, and what each phase costs."""

    def __init__(self, title: str, console: RichConsole | None = None):
        self._title = title
        self._remaining = _Remaining()
        self._latest: tuple[dict[str, Any], float, float | None] | None = None
        # drawn by its own thread, four times a second however fast updates are
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)
        self._live.start()

    def notice(self, text: str) -> None:
        """Print a line above the panel."""
        with _unread_is_fine(sys.stdout):
            self._live.console.print(Text.assemble(("rollscan: ", "dim"), text))

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        """Take over an update's metrics for the next drawing."""
        self._latest = metrics, progress, self._remaining.seconds(progress)

    def close(self) -> None:
        """Leave the last panel on the screen."""
        with _unread_is_fine(sys.stdout):
            self._live.stop()

    def _draw(self) -> RenderableType:
        if self._latest is None:
            return Text(f"{self._title}: starting", style="dim")
        metrics, progress, left = self._latest
        body = Group(_progress(metrics, progress, left), "", _numbers(metrics), "", *_phases(metrics))
        return Panel(body, title=Text(self._title, "bold"), title_align="left", border_style="dim", width=_WIDTH)


def _progress(metrics: dict[str, Any], progress: float, left: float | None) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(
        ProgressBar(total=1.0, completed=progress, width=_BAR_WIDTH),
        Text(f"{progress:.1%}", "bold"),
        Text(f"left {duration(left)}" if left is not None else "", "dim"),
    )
    return row


def _numbers(metrics: dict[str, Any]) -> Table:
    """Names and values, three of each in a row."""
    shown = (
        ("return", _number(metrics["episode_return"])),
        ("steps", count(metrics["env_steps"])),
        ("KL", _number(metrics.get("loss/approx_kl"))),
        ("length", _number(metrics["episode_length"])),
        ("steps/s", count(metrics["steps_per_second"])),
        ("entropy", _number(metrics.get("loss/entropy"))),
        ("episodes", count(metrics["episodes"])),
        ("update", count(metrics["update"])),
        ("learning rate", _number(metrics.get("learning_rate"))),
    )
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(style="dim")
        table.add_column(style="bold", min_width=13)
    for start in range(0, len(shown), 3):
        table.add_row(*(text for pair in shown[start : start + 3] for text in pair))
    return table


def _phases(metrics: dict[str, Any]) -> tuple[Text, Columns]:
    """A bar that is divided as the update's time was, and its legend, the dearest phase first."""
    bar, legend = Text(no_wrap=True, overflow="crop"), Columns(padding=(0, 2))
    cells, total = 0, 0.0
    for name, share in _dearest_phases(metrics):
        total += share
        bar.append("█" * (round(total * _BAR_WIDTH) - cells), style=_COLORS[name])
        cells = round(total * _BAR_WIDTH)
        if share >= _SHOWN_SHARE:
            legend.add_renderable(Text.assemble(("■ ", _COLORS[name]), f"{name} {share:.0%}"))
    return bar, legend
