"""What `doctor` checks in storage: the cache folder, a disk, a remote object.

It times a disk and some requests, too. These probes belong to the command: users diagnose a slow run on the
machine that is slow, where this package is installed and the repository's benchmarks are not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import meshfeed as mf
from meshfeed.cli.machine import Finding, Times
from meshfeed.errors import MeshfeedError, MissingError
from meshfeed.files.remote.client import Client
from meshfeed.files.remote.retries import Patience, Stat
from meshfeed.files.url import is_hub, is_remote, local_path, split, without_secrets
from meshfeed.report.words import counted
from meshfeed.sequence.fetched import MUCH, fetched_per_byte
from meshfeed.store import IndexedWriter, StreamStore

_PROBE_TOKENS = 4_000_000
_PROBE_READS = 256
_ASKED_BYTES, _ASKED_TIMES = 64 << 10, 32
_DEFAULT_LIMIT = 64 << 30
_GIB = 1 << 30
_SUFFIXES = ("", ".idx", "/dataset.json", "/index.json")  # what may stand for the store at a URL
_PATIENCE = Patience(timeout_s=10.0, give_up_s=20.0, attempts=2, hedge=False)
_NETWORKED = {"nfs", "nfs4", "cifs", "lustre", "beegfs"}


def cache_folder(cache: mf.Cache) -> Finding:
    """Whether the node's cache can be written, how much room it has, and on which file system."""
    topic = "cache"
    try:
        folder = cache.make()
    except MeshfeedError as error:
        return Finding(topic, "bad", str(error))
    free, limit = shutil.disk_usage(folder).free, cache.limit_bytes or _DEFAULT_LIMIT
    says, kind = f"{cache.path}: {free / _GIB:.1f} GiB free", _kind_of(folder)
    figures = {"free_bytes": float(free)}
    if kind == "tmpfs" or kind in _NETWORKED:
        what = "memory" if kind == "tmpfs" else "a network file system"
        text = f"{says}, but {kind} is {what}; give a folder on a disk of the node"
        return Finding(topic, "note", f"{text}: mf.Cache(folder) or $MESHFEED_CACHE", figures)
    if free < limit:
        text = f"{says}, and it may grow to {limit / _GIB:.0f} GiB; set limit_bytes, or another folder"
        return Finding(topic, "note", text, figures)
    return Finding(topic, "ok", f"{says} on {kind}", figures)


def disk(folder: Path) -> Finding:
    """Random reads of 4,096 tokens, the page cache dropped where that is allowed."""
    if not os.access(folder, os.W_OK):
        return Finding("storage", "note", f"{folder} cannot be written; give --dir to measure another")
    if shutil.disk_usage(folder).free < 4 * _PROBE_TOKENS:
        return Finding("storage", "note", f"{folder} is full; give --dir to measure another")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        prefix = Path(scratch) / "probe"
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document(np.zeros(_PROBE_TOKENS, np.uint16))
        with Path(f"{prefix}.bin").open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        starts = np.random.default_rng(0).integers(0, _PROBE_TOKENS - 4096, _PROBE_READS)
        with mf.open(prefix) as store:
            times = Times.of(lambda at=at: store.read_stream(at, at + 4096) for at in starts.reshape(-1, 1))
    return Finding("storage", "ok", f"{folder}: 8 KiB reads, cold: {times}", asdict(times))


def place(url: str, options: Mapping[str, str], cache: mf.Cache) -> Iterator[Finding]:
    """Whether a store can be opened and its objects fetched, and how fast storage answers."""
    try:
        remote = is_remote(url)
        if remote and not is_hub(url):
            yield _asked(url, options)
        with mf.open(url, cache=cache, options=options) as store:
            text = f"{counted(store.num_documents, 'document')}, {counted(store.num_tokens, 'token')}"
            text = f"{store.facts()['format']}, {text}, {store.dtype.name}"
            fetched = [*_fetched(store)]
        yield Finding(without_secrets(url), "ok", f"opens: {text}")
        yield from fetched
        if not remote:
            path = Path(local_path(url))
            yield disk(path if path.is_dir() else path.absolute().parent)
    except MeshfeedError as error:
        yield Finding(without_secrets(url), "bad", str(error))


def _fetched(store: StreamStore) -> Iterator[Finding]:
    """What shuffles cost where the cache is smaller than the store; nothing where it is not."""
    of = store.fetching
    if of is None or of.num_bytes <= of.limit_bytes:
        return
    recipe = mf.Recipe(data=store, sequence=mf.Documents(), batch=mf.Batch(sequences=1), steps=1)
    whole, blocks = (fetched_per_byte(replace(recipe, shuffle=each)) for each in ("global", mf.Blocks()))
    says = (
        f"the cache may hold {of.limit_bytes / of.num_bytes:.1%} of it; for each byte of a document, about "
        f"{whole:.3g} bytes are fetched under shuffle='global', {blocks:.3g} under mf.Blocks()"
    )
    figures = {"per_byte_global": whole, "per_byte_blocks": blocks}
    yield Finding("fetching", "note" if max(whole, blocks) > MUCH else "ok", says, figures)


def _asked(url: str, options: Mapping[str, str]) -> Finding:
    """Requests for the size of an object, and for its first bytes. Raises StoreError where it refuses."""
    root, path = split(url)
    client = Client(root, options, _PATIENCE)
    try:
        name, found = _found(client, path)
        size = min(found.size_bytes, _ASKED_BYTES)
        heads = Times.of([lambda: client.stat(name)] * _ASKED_TIMES)
        bodies = Times.of([lambda: client.read(name, 0, size, found.tag)] * _ASKED_TIMES)
    finally:
        client.close()
    says = f"answers for {name} ({found.size_bytes:,} bytes): head {heads}; first {size:,} bytes {bodies}"
    figures = {"head_p50_s": heads.p50_s, "read_p50_s": bodies.p50_s, "read_p99_s": bodies.p99_s}
    return Finding(without_secrets(root), "ok", says, figures)


def _found(client: Client, path: str) -> tuple[str, Stat]:
    """An object of the store at a path: one of those that its format must have, or the first below it."""
    for suffix in _SUFFIXES:
        with contextlib.suppress(MissingError):
            return path + suffix, client.stat(path + suffix)
    for name, size_bytes in client.list(path):
        if size_bytes:
            return name, client.stat(name)
    raise MissingError(f"{path}: no object there or below it; check the URL")


def _kind_of(folder: Path) -> str:
    """The file system of a folder, by the longest mount above it; "" if unknown."""
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return ""
    best, kind = "", ""
    for line in mounts.read_text().splitlines():
        _, at, of_kind, *_ = line.split(" ")
        if folder.is_relative_to(at) and len(at) >= len(best):
            best, kind = at, of_kind
    return kind
