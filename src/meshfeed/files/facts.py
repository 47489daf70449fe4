"""What is said of an object: to open it, and what tells it from any other and so names its folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfeed.errors import StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.client import Stat
from meshfeed.files.refusals import options_of_environment
from meshfeed.files.sums import ANEW, Sums
from meshfeed.files.url import credentials_of, is_remote, local_path, split, without_secrets


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


def told_of(
    url: str,
    block_bytes: int,
    options: Mapping[str, str],
    content: Content | None,
    sums: tuple[str, int] | None,
) -> dict[str, Any]:
    """What a client says to open an object, its environment's credentials included. Raises StoreError."""
    told: dict[str, Any] = {
        "block_bytes": block_bytes,
        "content": None if content is None else _plain(content),
        "sums": None if sums is None else (split(sums[0])[1], sums[1]),
    }
    if not is_remote(url):
        return told | {"root": "", "path": str(Path(local_path(url)).absolute()), "options": {}}
    root, path = split(url)
    return told | {
        "root": root,
        "path": path,
        "options": options_of_environment(root, os.environ) | credentials_of(url) | dict(options),
    }


def key_of(said: dict[str, Any], facts: dict[str, Any]) -> str:
    """The name of its folder."""
    secret = [said["options"].get("endpoint"), said["path"]]  # a query may tell objects apart, too
    text = json.dumps([facts, secret], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(content: Content) -> dict[str, Any]:
    plain = {name: getattr(content, name) for name in ("codec", "stored_bytes", "raw_bytes")}
    hashes = {name: dict(getattr(content, name)) for name in ("stored_hashes", "raw_hashes")}
    return plain | hashes
