"""What `doctor` checks in storage: the cache folder, and whether stores can be opened."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import meshfeed as mf
from meshfeed.cli.machine import Finding
from meshfeed.errors import MeshfeedError
from meshfeed.fetched import MUCH, fetched_per_byte
from meshfeed.files.url import is_remote, without_secrets
from meshfeed.remote.retries import GIVE_UP
from meshfeed.report.words import counted
from meshfeed.store import StreamStore

_DEFAULT_LIMIT = 64 << 30
_GIVE_UP_S = "20"
"""Who asks a doctor does not wait for three minutes."""
_GIB = 1 << 30
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


def place(url: str, options: Mapping[str, str], cache: mf.Cache) -> Iterator[Finding]:
    """Whether a store can be opened, and what its shuffles fetch."""
    try:
        if is_remote(url):
            options = {GIVE_UP: _GIVE_UP_S, **options}
        with mf.open(url, cache=cache, options=options) as store:
            text = f"{counted(store.num_documents, 'document')}, {counted(store.num_tokens, 'token')}"
            text = f"{store.facts()['format']}, {text}, {store.dtype.name}"
            fetched = [*_fetched(store)]
        yield Finding(without_secrets(url), "ok", f"opens: {text}")
        yield from fetched
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


def _kind_of(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The file system of a folder, by the longest mount above it; "" if unknown."""
    if not mounts.is_file():
        return ""
    folder, best, kind = folder.resolve(), "", ""
    for line in mounts.read_text().splitlines():
        _, at, of_kind, *_ = line.split(" ")
        at = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), at)  # a space is \040
        if folder.is_relative_to(at) and len(at) >= len(best):
            best, kind = at, of_kind
    return kind
