"""Paths and URLs: which are remote, and which file names an untrusted index may use."""

from __future__ import annotations

import base64
import os
import re
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from meshfeed.errors import StoreError

AUTHORIZATION = "authorization"
"""Option of the storage client: a header of every request."""
HUB = "hf://datasets/"
"""How the URL of a dataset on the Hugging Face Hub begins."""
_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "http", "https", "hf")
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://")


def split_url(url: str) -> SplitResult:
    """The parts of a URL. A # belongs to the name of an object; in a web address, a fragment follows it."""
    return urlsplit(url, allow_fragments=is_http(url))


def is_remote(url: str) -> bool:
    """Whether a URL belongs to a storage service; paths and file:// do not.

    Raises StoreError for an unknown scheme.
    """
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1].lower() == "file":
        return False
    if scheme[1].lower() not in _SCHEMES:
        raise StoreError(
            f"{without_secrets(url)}: scheme {scheme[1]!r} is unknown; use {', '.join(_SCHEMES)}"
        )
    return True


def is_http(url: str) -> bool:
    """Whether a URL belongs to a web server, which has no listing."""
    return url.lower().startswith(("http://", "https://"))


def is_hub(url: str) -> bool:
    """Whether a URL belongs to the Hugging Face Hub."""
    return url.startswith("hf://")


def local_path(url: str) -> str:
    """The path of a local URL: file:///data/x -> /data/x; a path is returned unchanged."""
    return unquote(split_url(url).path) if url.startswith("file://") else url


def split(url: str) -> tuple[str, str]:
    """A remote URL as (root, path): s3://bucket and the rest, https://host and the rest.

    In a web address %20 means a space; in the name of an object it is literal. User and password of a web
    address are removed; see `credentials_of`. Raises StoreError for a query.
    """
    parts = split_url(url)
    if parts.query:
        raise StoreError(
            f"{without_secrets(url)}: URLs with a query, such as presigned ones, are not supported; give the "
            f"plain URL, and credentials in options= or the environment"
        )
    path = parts.path.lstrip("/")
    if is_http(url):
        path = unquote(path)
    netloc = parts.netloc.rpartition("@")[2] if is_http(url) else parts.netloc
    return f"{parts.scheme.lower()}://{netloc}", path


def credentials_of(url: str) -> dict[str, str]:
    """User and password of a web address as an option of the storage client; {} without them."""
    named, at, _ = split_url(url).netloc.rpartition("@")
    if not at or not is_http(url):
        return {}
    basic = base64.b64encode(unquote(named).encode()).decode()
    return {AUTHORIZATION: f"Basic {basic}"}


def join(base: str, name: str) -> str:
    """The relative `name` below a folder or URL. A query of the base stays at the end.

    Raises StoreError for a name that an index must not use: absolute, with "..", or encoded to hide that.
    """
    plain = unquote(name)
    bad = not plain or "\\" in plain or "\0" in plain or _SCHEME.match(plain) or plain.startswith(("/", "~"))
    if bad or any(part in ("", ".", "..") for part in plain.split("/")):
        raise StoreError(
            f"{without_secrets(base)}: names the file {name!r}; an index may name only files beside or below "
            f"itself, without '..'; recreate it, or do not trust its origin"
        )
    if not is_remote(base):
        return os.path.join(local_path(base), name)  # noqa: PTH118
    parts, name = split_url(base), name.replace("#", "%23") if is_http(base) else name
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def parent(url: str) -> tuple[str, str]:
    """(folder, name) of a file's path or URL."""
    if not is_remote(url):
        folder, name = os.path.split(local_path(url))
        return folder or ".", name
    parts = split_url(url)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=folder)), name


def without_secrets(url: str) -> str:
    """A URL for messages: without user, password and query. Azure's container@account stays."""
    if _SCHEME.match(url) is None:
        return url
    parts = split_url(url)
    named, at, host = parts.netloc.rpartition("@")
    container = f"{named}{at}" if parts.scheme in ("abfs", "abfss") and ":" not in named else ""
    return urlunsplit(parts._replace(netloc=f"{container}{host}", query=""))
