"""CPU cores: how many this process may use, not what the machine has, and who goes first on them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may keep busy, at least 1: CPU affinity, cut to the cgroup's quota, rounded up."""
    affinity = os.sched_getaffinity if hasattr(os, "sched_getaffinity") else None
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota(cgroup))))


def local_ranks() -> int:
    """Processes of this run that share the machine, as ``torchrun`` tells them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def batch_threads() -> Iterator[None]:
    """Linux schedules threads that are started in this block as batch work: with more of them than cores, they do not
    preempt the threads that feed them. Elsewhere, and where another policy was chosen for this thread, nothing changes.
    """
    if not hasattr(os, "sched_setscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with suppress(OSError):  # a sandbox may forbid it: the threads are no slower than without
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _quota(cgroup: Path) -> float:
    """CPUs' worth of time per period that the cgroup grants; infinite where it sets no limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf
