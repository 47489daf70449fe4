"""What tells a cached object from any other, and so names its folder."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from meshfeed.errors import StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.client import Stat
from meshfeed.files.sums import ANEW, Sums
from meshfeed.files.url import without_secrets


def name_of(said: dict[str, Any]) -> str:
    """The URL that a client asks for, as messages show it."""
    return without_secrets(f"{said['root']}/{said['path']}") if said["root"] else said["path"]


def facts_of(said: dict[str, Any], stat: Stat, content: Content | None, sums: Sums | None) -> dict[str, Any]:
    """What the folder says of the object. Raises StoreError for one of another size than is said of it.

    said: what a client that opens it asks. What was fetched unchecked is another object than what is checked.
    """
    size, block_bytes = stat.size_bytes, said["block_bytes"]
    if content is not None:
        if content.stored_bytes not in (None, size):
            raise StoreError(
                f"{name_of(said)}: {size} bytes, its index says {content.stored_bytes}; copy it again"
            )
        size = size if content.raw_bytes is None else content.raw_bytes
        block_bytes = max(size, 1)
    facts: dict[str, Any] = {"url": name_of(said), "tag": stat.tag, "size_bytes": size}
    if sums is not None:
        guard = sums.files[said["sums"][1]]
        if guard.size_bytes != size:
            raise StoreError(
                f"{name_of(said)}: {size} bytes, its .sums was made for {guard.size_bytes}; copy the file "
                f"again; as for the .sums, {ANEW}"
            )
        block_bytes = -(-block_bytes // guard.block_bytes) * guard.block_bytes  # whole checksums
        facts["sums"] = hashlib.blake2b(guard.sums.tobytes(), digest_size=16).hexdigest()
    return facts | {"block_bytes": block_bytes, "content": None if content is None else _plain(content)}


def key_of(said: dict[str, Any], facts: dict[str, Any]) -> str:
    """The name of its folder."""
    secret = [said["options"].get("endpoint"), said["path"]]  # a query may tell objects apart, too
    text = json.dumps([facts, secret], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(content: Content) -> dict[str, Any]:
    plain = {name: getattr(content, name) for name in ("codec", "stored_bytes", "raw_bytes")}
    hashes = {name: dict(getattr(content, name)) for name in ("stored_hashes", "raw_hashes")}
    return plain | hashes
