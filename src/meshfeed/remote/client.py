"""The storage client: stat, ranges and listing over obstore, with the retries of `retries`.

Only the fetcher and `prepare`, which writes, use it: obstore's runtime does not survive a fork.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfeed.errors import ChangedError, OptionError, StoreError
from meshfeed.extras import install
from meshfeed.files.byte_file import typed_errors
from meshfeed.files.url import AUTHORIZATION, credentials_of, is_hub, split
from meshfeed.remote.errors import REPLACED, reason, refuse_other_size, refuses_method, refuses_range
from meshfeed.remote.hub import HubClient
from meshfeed.remote.listing import Listing
from meshfeed.remote.retries import GIVE_UP, Patience, Retries, Stat

_log = logging.getLogger("meshfeed")

_UNSORTED = "--x-s3"  # ends the names of S3's directory buckets
_MODIFIED, _SIZE = "modified ", "size "  # begin a tag that is not an ETag


class Client(Retries):
    """Reads the objects under one root. Threads share one. All methods may raise StoreError.

    Args:
        root: such as s3://bucket or https://host.
        options: obstore's names: `endpoint`, `region`, `skip_signature`, credentials and so on; the cloud's
            usual credential chain supplies the rest. And GIVE_UP.
        patience: timeouts and retries; None for those of the options.
    """

    def __init__(self, root: str, options: Mapping[str, str], patience: Patience | None = None) -> None:
        super().__init__(split(root.rstrip("/"))[0], patience or Patience.of(options))
        self._has_warned = False
        self._store = store_of(self._root, credentials_of(root) | dict(options), self._patience)

    def stat(self, path: str) -> Stat:
        """Size and version. Raises MissingError, or another StoreError."""
        return self._retry(lambda: self._stat(path), path, self._name(path))

    def glance(self, path: str, num_bytes: int) -> tuple[Stat, Any]:
        """Size and version, with the first bytes as a buffer, in one request.

        num_bytes: at least 1; a shorter object gives all of its bytes. Raises what `stat` raises.
        """
        import obstore

        def get() -> tuple[Stat, Any]:
            try:
                answer = obstore.get(self._store, path, options={"range": (0, num_bytes)})
            except Exception as error:
                if not refuses_range(error) or (stat := self._stat(path)).size_bytes:
                    raise
                return stat, b""  # no range fits an empty object
            data, meta = answer.bytes(), answer.meta
            if len(data) != (expected := min(num_bytes, meta["size"])):
                raise ConnectionError(f"received {len(data)} of {expected} bytes")
            tag = _tag_of(meta)  # without one, as `stat` finds it
            return self._stat(path) if tag is None else Stat(meta["size"], tag), data

        return self._retry(get, path, self._name(path))

    def _stat(self, path: str) -> Stat:
        import obstore

        def get() -> Any:
            return obstore.get(self._store, path, options={"range": (0, 1)}).meta

        try:
            found: Any = obstore.head(self._store, path)
        except Exception as error:
            if not refuses_method(error):
                raise
            found = get()
        if _tag_of(found) is None and found["size"]:
            found = get()  # some servers send it only with the bytes
        return Stat(found["size"], _tag_of(found) or self._unnamed(path, found["size"]))

    def _unnamed(self, path: str, size_bytes: int) -> str:
        """A version for an object whose server sends none; logged once."""
        with self._lock:
            had_warned, self._has_warned = self._has_warned, True
        if not had_warned:
            _log.warning(
                "%s: the server sends neither ETag nor Last-Modified, so nobody will notice if an object is "
                "replaced by one of its size; have it send one of them",
                self._name(path),
            )
        return f"{_SIZE}{size_bytes}"

    def read(self, path: str, begin: int, end: int, tag: str, size_bytes: int | None = None) -> Any:
        """Exactly the bytes [begin, end) of the version `tag`, as a buffer.

        size_bytes: of that version; None if unknown.
        """
        if begin == end:
            return b""
        import obstore

        # A weak tag never matches (RFC 9110, 13.1.1); it is compared with the answer's.
        condition = {} if tag.startswith((_MODIFIED, _SIZE, "W/")) else {"if_match": tag}

        def get(where: str) -> Any:
            options: Any = {"range": (begin, end), **condition}
            answer = obstore.get(self._store, path, options=options)
            if not _is_version(answer.meta, tag):
                raise ChangedError(f"{where}: {REPLACED}")
            refuse_other_size(where, size_bytes, answer.meta["size"])
            return answer.bytes()

        return self._read(get, path, begin, end)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(path, size) of all objects below a prefix, sorted and complete; see `Listing`."""
        shown, give_up_s = self._name(prefix), self._patience.give_up_s
        if self._root.startswith("http"):
            raise StoreError(f"{shown}: HTTP has no listing; name the file itself")
        is_azure = self._root.startswith(("az", "abfs"))
        listing = Listing(self._store, prefix, shown, give_up_s, begins_anywhere=not is_azure)
        is_proved = not self._root.endswith(_UNSORTED)

        def ask() -> list[tuple[str, int]]:  # this thread may have an event loop of its own
            return self._pool.submit(listing.complete, proved=is_proved).result()

        return self._retry(ask, prefix, shown)


class LocalReader:
    """Reads files of this machine, by absolute path, as a Client reads objects."""

    def stat(self, path: str) -> Stat:
        with typed_errors(path):
            found = Path(path).stat()
        return Stat(found.st_size, f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}")

    def read(self, path: str, begin: int, end: int, tag: str, size_bytes: int | None = None) -> bytes:
        with typed_errors(path), Path(path).open("rb", buffering=0) as stream:
            data = os.pread(stream.fileno(), end - begin, begin)
        if len(data) != end - begin or self.stat(path).tag != tag:
            raise ChangedError(f"{path}: bytes {begin}..{end}: {REPLACED}")
        return data


Reader = Client | HubClient | LocalReader


def _tag_of(meta: Any) -> str | None:
    """The version in an answer; None without one."""
    if meta["e_tag"]:
        return str(meta["e_tag"])
    modified = meta["last_modified"]  # obstore: 1970 where the server does not say
    return f"{_MODIFIED}{modified.isoformat()} {meta['size']}" if modified.timestamp() else None


def _is_version(meta: Any, tag: str) -> bool:
    """Whether an answer may be of a version: not if it names another one."""
    if tag.startswith(_SIZE):
        return tag == f"{_SIZE}{meta['size']}"
    return _tag_of(meta) in (tag, None)


def store_of(
    root: str, options: Mapping[str, str], patience: Patience, retries: Mapping[str, Any] | None = None
) -> Any:
    """obstore's store of a root. retries: obstore's retry_config; None for none. Raises StoreError."""
    if is_hub(root):
        raise StoreError(f"{root}: the Hub can only be read; write to a path or to object storage")
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StoreError(
            f"{root}: this process was forked from one that has used object storage, so requests would hang "
            f"here; start it with spawn"
        )
    try:
        from obstore.store import from_url
    except ImportError as missing:
        raise StoreError(f"{root}: remote storage needs obstore: {install('remote')}") from missing
    lower = {name.lower(): value for name, value in options.items() if name != GIVE_UP}
    authorization = lower.pop(AUTHORIZATION, None)
    given: Any = {name: value for name, value in lower.items() if _plain(name) not in _OF_CLIENT}
    endpoint = next((value for name, value in given.items() if "endpoint" in name), root)
    most_s = max(min(_MOST_TIMEOUTS * patience.timeout_s, patience.give_up_s), patience.timeout_s)
    client: Any = {
        "timeout": f"{most_s * 1e3:.0f}ms",  # a slow answer may take this long while it makes progress
        "read_timeout": f"{patience.timeout_s * 1e3:.0f}ms",
        "connect_timeout": f"{min(patience.timeout_s, 5.0) * 1e3:.0f}ms",
        "allow_http": endpoint.startswith("http://"),
    } | {_plain(name): value for name, value in lower.items() if _plain(name) in _OF_CLIENT}
    if authorization is not None:
        client["default_headers"] = {AUTHORIZATION: authorization}
    try:
        retry: Any = retries or {"max_retries": 0}
        return from_url(root, config=given or None, client_options=client, retry_config=retry)
    except BaseException as error:  # it panics on unknown options
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise OptionError(f"{root}: {reason(error)}; check the URL and the storage options") from error


_MOST_TIMEOUTS = 4
"""The longest that an answer may take in all."""
_process: int | None = None
"""The process that has used obstore."""


def _plain(name: str) -> str:
    return name.removeprefix("aws_").removeprefix("azure_").removeprefix("google_")


_OF_CLIENT = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "read_timeout",
    "timeout",
    "proxy_url",
    "user_agent",
)
