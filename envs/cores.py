"""How many CPU cores this process may use: affinity and container quota, not what the machine has."""

from __future__ import annotations

import math
import os
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


def _quota(cgroup: Path) -> float:
    """CPUs' worth of time per period that the cgroup grants; infinite where it sets no limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf
