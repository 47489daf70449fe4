"""Requests that open an object, and the facts that identify it and so name its cache folder."""

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


def name_of(request: dict[str, Any]) -> str:
    """The requested URL, for messages."""
    return without_secrets(f"{request['root']}/{request['path']}") if request["root"] else request["path"]


def facts_of(
    request: dict[str, Any], stat: Stat, content: Content | None, sums: Sums | None
) -> dict[str, Any]:
    """The facts stored in an object's folder. Raises StoreError if its size differs from the declared one.

    request: the client's request to open it. Unchecked and checked contents count as different objects.
    """
    size, block_bytes = stat.size_bytes, request["block_bytes"]
    if content is not None:
        if content.stored_bytes not in (None, size):
            raise StoreError(
                f"{name_of(request)}: {size} bytes, its index says {content.stored_bytes}; copy it again"
            )
        size = size if content.raw_bytes is None else content.raw_bytes
        block_bytes = max(size, 1)
    facts: dict[str, Any] = {"url": name_of(request), "tag": stat.tag, "size_bytes": size}
    if sums is not None:
        guard = sums.files[request["sums"][1]]
        if guard.size_bytes != size:
            raise StoreError(
                f"{name_of(request)}: {size} bytes, its .sums was made for {guard.size_bytes}; copy the file "
                f"again; as for the .sums, {ANEW}"
            )
        block_bytes = -(-block_bytes // guard.block_bytes) * guard.block_bytes  # whole checksums
        facts["sums"] = hashlib.blake2b(guard.sums.tobytes(), digest_size=16).hexdigest()
    return facts | {"block_bytes": block_bytes, "content": None if content is None else _plain(content)}


def open_request(
    url: str,
    block_bytes: int,
    options: Mapping[str, str],
    content: Content | None,
    sums: tuple[str, int] | None,
) -> dict[str, Any]:
    """A client's request to open an object, with its environment's credentials. Raises StoreError."""
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


def key_of(request: dict[str, Any], facts: dict[str, Any]) -> str:
    """The name of an object's folder."""
    secret = [request["options"].get("endpoint"), request["path"]]  # objects may differ only in these
    text = json.dumps([facts, secret], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(content: Content) -> dict[str, Any]:
    plain = {name: getattr(content, name) for name in ("codec", "stored_bytes", "raw_bytes")}
    hashes = {name: dict(getattr(content, name)) for name in ("stored_hashes", "raw_hashes")}
    return plain | hashes
