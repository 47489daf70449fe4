"""What `doctor` finds, and its checks of the machine: versions, packages, delivery, limits, device."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

import meshfeed as mf
from meshfeed import extras
from meshfeed.deliver import can_share
from meshfeed.native import is_compiled
from meshfeed.report.words import counted
from meshfeed.roles import choose_delivery

_FEW_DESCRIPTORS = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic: what.
        verdict: "ok", "note" (works, but differently), or "bad" (will fail).
        says: what was found, and what follows.
        figures: of it, where there are any: name with unit -> number.
    """

    topic: str
    verdict: Literal["ok", "note", "bad"]
    says: str
    figures: dict[str, float] | None = None


def findings(layout: mf.Layout | None) -> Iterator[Finding]:
    """All checks of this machine, and of a layout if one is given."""
    yield _versions()
    yield from _packages()
    yield _within_nodes()
    yield _across_nodes()
    if layout is not None:
        yield _chosen(layout)
    yield _descriptors()
    yield _device()


def _versions() -> Finding:
    loops = "compiled loops" if is_compiled() else "loops in NumPy, which are slower"
    says = (
        f"meshfeed {extras.version_of('meshfeed') or '(not installed)'}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, NumPy {np.__version__}, {loops}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.release()}"
    )
    if platform.system() != "Linux":
        return Finding("versions", "note", f"{says}; meshfeed is tested on Linux only")
    return Finding("versions", "ok", says)


def _packages() -> Iterator[Finding]:
    """The requirements in meshfeed's metadata: one finding for the core and one for each extra."""
    for extra, packages in extras.requirements().items():
        versions = {each: extras.version_of(each.name) for each in packages}
        missing = [
            f"{each.name} from {each.least}"
            for each, found in versions.items()
            if found is None or extras.numbers(found) < extras.numbers(each.least)
        ]
        topic = f"extra [{extra}]" if extra else "packages"
        if not missing:
            newer = [says for says, _ in extras.untested(extra)]
            text = ", ".join(f"{each.name} {found}" for each, found in versions.items())
            yield Finding(topic, "note" if newer else "ok", "; ".join([text, *newer]))
        else:
            text = f"no {', '.join(missing)}: {extras.install(extra)}"
            yield Finding(topic, "note", f"{text}, if you need it") if extra else Finding(topic, "bad", text)


def _within_nodes() -> Finding:
    topic, why_not = "delivery within a node", can_share()
    if why_not:
        text = f"broadcast: {why_not}. delivery='auto' chooses it, delivery='share' is refused"
        return Finding(topic, "note", text)
    return Finding(topic, "ok", "share: memfd and abstract unix sockets work")


def _across_nodes() -> Finding:
    topic = "delivery across nodes"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding(topic, "bad", "this torch has no gloo; only direct and share will work")
    if can_share():
        return Finding(topic, "ok", "broadcast: torch.distributed has gloo")
    return Finding(topic, "ok", "tree: gloo between nodes, share within each")


def _chosen(layout: mf.Layout) -> Finding:
    stages, fields = mf.StageMap(pp=layout.pp), mf.Windows(4096).fields
    delivery = choose_delivery(layout, stages, fields, can_share=can_share() is None)
    roles = mf.roles.assign_roles(layout, stages, fields, delivery)
    nodes = len(set(layout.node(roles.ranks).tolist()))
    text = f"{layout} on {counted(nodes, 'node')}: delivery='auto' takes {delivery}"
    return Finding("layout", "ok", f"{text}; storage is opened by {counted(int(roles.reads.sum()), 'rank')}")


def _descriptors() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"limit {soft} (hard {hard}); a feed uses about 10 and up to a quarter for stores"
    if soft < _FEW_DESCRIPTORS:
        return Finding("open files", "note", f"{says}; raise it with ulimit -n {min(hard, 65_536)}")
    return Finding("open files", "ok", says)


def _device() -> Finding:
    import resource

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    if not torch.cuda.is_available():
        text = f"no CUDA device: tensors stay in host memory (device='cpu'); memory lock limit {limit}"
        return Finding("device", "note", text)
    try:
        page_locked = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)

        def copy() -> None:
            page_locked.to("cuda")
            torch.cuda.synchronize()

        copy()  # the first makes the context
        began = time.perf_counter()
        copy()
        rate = page_locked.numel() / (time.perf_counter() - began)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Finding("device", "bad", f"{torch.cuda.get_device_name()}: no page-locked copy: {reason}")
    text = f"{torch.cuda.get_device_name()}: page-locked copies at {rate / 1e9:.0f} GB/s, lock limit {limit}"
    return Finding("device", "ok", text, {"bytes_per_s": rate})
