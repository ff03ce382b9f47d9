"""What a person sees while a run goes on: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.config import LoggingConfig
from trainer.timing import PHASES

_STYLES = ("green", "yellow", "cyan", "magenta", "blue", "bright_black", "white", "red")
_COLORS: dict[str, str] = dict(zip(PHASES, _STYLES, strict=True))
_BAR_WIDTH = 60


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
        kind = "rich" if sys.stdout.isatty() else "plain"
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
        if abs(number) >= scale:
            return f"{number / scale:.3g}{unit}" if abs(number) < 999.5 * scale else f"{number / scale:.0f}{unit}"
    return f"{number:.3g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def phase_shares(metrics: dict[str, Any]) -> dict[str, float]:
    """Each phase's share of the update's wall time."""
    total = metrics.get("time/total_ms") or 0.0
    return {name: metrics.get(f"time/{name}_ms", 0.0) / total for name in PHASES} if total > 0 else {}


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
        print(f"rollscan: {text}", file=sys.stderr, flush=True)

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
        shares = sorted(phase_shares(metrics).items(), key=lambda item: -item[1])
        print(
            f"{progress:4.0%}  {count(metrics['env_steps'])} steps  {count(metrics['steps_per_second'])}/s  "
            f"return {_number(metrics['episode_return'])}  length {_number(metrics['episode_length'])}  "
            f"{'left ' + duration(left) + '  ' if left is not None else ''}"
            + " ".join(f"{name} {share:.0%}" for name, share in shares[:4] if share >= 0.005),
            flush=True,
        )

    def close(self) -> None:
        """Print the last update if its line was held back."""
        if self._latest is not None:
            self._print(*self._latest, None)


class LiveConsole:
    """A panel that is redrawn in place: progress, returns, throughput, and what each phase costs."""

    def __init__(self, title: str):
        self._title = title
        self._remaining = _Remaining()
        self._live = Live(console=RichConsole(), refresh_per_second=4, transient=False)
        self._live.start()

    def notice(self, text: str) -> None:
        """Print a line above the panel."""
        self._live.console.print(f"[dim]rollscan:[/] {text}", highlight=False)

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        """Redraw the panel."""
        left = self._remaining.seconds(progress)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=1.0, completed=progress, width=_BAR_WIDTH),
            f"{progress:.1%}",
            f"left {duration(left)}" if left is not None else "",
        )
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(
            *(
                f"[dim]{name}[/] [bold]{value}[/]"
                for name, value in (
                    ("return", _number(metrics["episode_return"])),
                    ("length", _number(metrics["episode_length"])),
                    ("steps", count(metrics["env_steps"])),
                    ("steps/s", count(metrics["steps_per_second"])),
                )
            )
        )
        numbers.add_row(
            *(
                f"[dim]{name}[/] {value}"
                for name, value in (
                    ("kl", _number(metrics.get("loss/approx_kl"))),
                    ("lr", _number(metrics.get("learning_rate"))),
                    ("expl. var.", _number(metrics.get("explained_variance"))),
                    ("update", str(metrics["update"])),
                )
            )
        )
        self._live.update(Panel(Group(head, numbers, *_phase_bar(metrics)), title=self._title, title_align="left"))

    def close(self) -> None:
        """Leave the last panel on the screen."""
        self._live.stop()


def _phase_bar(metrics: dict[str, Any]) -> tuple[Text, Text]:
    bar, legend = Text(), Text()
    for name, share in phase_shares(metrics).items():
        bar.append("█" * round(max(share, 0.0) * _BAR_WIDTH), style=_COLORS[name])
        legend.append(f"{name} {share:.0%}  ", style=_COLORS[name])
    return bar, legend
