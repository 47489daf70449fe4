"""The processes of a job on this node: those that one parent has started, such as torchrun or srun."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def since_boot_s() -> float:
    """Seconds, on a clock that all processes of a node share."""
    return time.clock_gettime(_CLOCK)


def job_here() -> tuple[str, float] | None:
    """What identifies the parent of this process, and when this process began, see `since_boot_s`.

    None where the system does not say.
    """
    return _job(os.getpid(), os.getppid())


@lru_cache(1)
def _job(own: int, parent: int) -> tuple[str, float] | None:
    try:
        began, parent_began = (_began(pid) for pid in (own, parent))
    except (OSError, ValueError, IndexError):
        return None
    return f"{parent} {parent_began}", (began + 1) / os.sysconf("SC_CLK_TCK")


def _began(pid: int) -> int:
    """In ticks since boot, rounded down: field 22; the name, field 2, may have spaces."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
