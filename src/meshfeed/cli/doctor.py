"""meshfeed doctor: what this machine offers, and what meshfeed will do with it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import meshfeed as mf
from meshfeed.deliver import can_share
from meshfeed.store import IndexedWriter

_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad[/red]"}
_PROBE_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic: what.
        verdict: "ok", "note" (works, but differently), or "bad" (will fail).
        says: what was found, and what follows.
    """

    topic: str
    verdict: Literal["ok", "note", "bad"]
    says: str


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="the environment: which delivery, limits, page-locking, shared memory, storage latency",
        description="Look at this machine as a training rank would; exit 1 where something will fail.",
    )
    parser.add_argument("--dir", type=Path, help="measure the storage of this directory (the temporary one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 where one of them is bad."""
    findings = [check() for check in (_python, _share, _broadcast, _descriptors, _memory, _device)]
    findings.append(_storage(args.dir or Path(tempfile.gettempdir())))
    if args.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        table = Table("", "what", "finding", title="meshfeed doctor", title_justify="left")
        for finding in findings:
            table.add_row(_MARKS[finding.verdict], finding.topic, finding.says)
        Console().print(table)
    return int(any(finding.verdict == "bad" for finding in findings))


def _python() -> Finding:
    return Finding(
        "versions",
        "ok",
        f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}, "
        f"{os.cpu_count()} cores",
    )


def _share() -> Finding:
    why_not = can_share()
    if why_not:
        return Finding(
            "delivery within a node",
            "note",
            f"broadcast: {why_not}. delivery='auto' takes it, delivery='share' is refused",
        )
    return Finding("delivery within a node", "ok", "share: memfd and abstract unix sockets work")


def _broadcast() -> Finding:
    topic = "delivery across nodes"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding(topic, "bad", "this torch has no gloo; only direct and share will work")
    if can_share():
        return Finding(topic, "ok", "broadcast: torch.distributed has gloo")
    return Finding(topic, "ok", "tree: gloo between the leaders of nodes, share within each")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    verdict = "ok" if soft >= 1024 else "note"
    return Finding(
        "open files", verdict, f"limit {soft} (hard {hard}); a feed needs one per store and some 10 more"
    )


def _memory() -> Finding:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return Finding("memory", "ok", f"{available} GiB free; memory lock limit {told}")


def _device() -> Finding:
    if not torch.cuda.is_available():
        return Finding("device", "note", "no CUDA device: tensors stay in ordinary memory, device='cpu'")
    page_locked = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    rate = page_locked.numel() / _median_s(lambda: page_locked.to("cuda")) / 1e9
    return Finding("device", "ok", f"{torch.cuda.get_device_name()}: page-locked copies at {rate:.0f} GB/s")


def _storage(directory: Path) -> Finding:
    """Random reads of 4,096 tokens, the page cache dropped where that is allowed."""
    if not os.access(directory, os.W_OK):
        return Finding("storage", "note", f"{directory} cannot be written; give --dir to measure another")
    if shutil.disk_usage(directory).free < 4 * _PROBE_TOKENS:
        return Finding("storage", "note", f"{directory} is full; give --dir to measure another")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        prefix = Path(scratch) / "probe"
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document(np.zeros(_PROBE_TOKENS, np.uint16))
        with Path(f"{prefix}.bin").open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        starts = np.random.default_rng(0).integers(0, _PROBE_TOKENS - 4096, 256)
        with mf.open(prefix) as store:
            times: list[float] = []
            for start in starts.reshape(-1, 1):
                began = time.perf_counter()
                store.read_stream(start, start + 4096)
                times.append(time.perf_counter() - began)
    p50, p99 = statistics.median(times), sorted(times)[-3]
    return Finding(
        "storage", "ok", f"{directory}: 8 KiB reads, cold: p50 {p50 * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs"
    )


def _median_s(action: Callable[[], Any], rounds: int = 5) -> float:
    times: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
