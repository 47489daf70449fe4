"""Writing to storage: put objects, upload files in pieces, delete objects.

An object appears as a whole or not at all. obstore retries each piece of a large file, within `Patience`; the
client retries small objects.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from meshfeed.errors import MissingError, StoreError, UnavailableError
from meshfeed.files.byte_file import typed_errors
from meshfeed.remote.client import Client, store_of
from meshfeed.remote.errors import reason
from meshfeed.remote.retries import Patience, Stat

T = TypeVar("T")

PIECE_BYTES = 8 << 20
_MOST_PIECES = 9_000  # S3 allows 10,000 per object
_AT_ONCE = 8
_PIECE_S = 300.0  # timeout of one piece, which may share a slow connection with others
_TELL_S, _END_S = 0.2, 5.0


class Writer(Client):
    """A Client that also writes, from one thread.

    Args: see Client. Like a Client, it does not survive a fork.
    """

    def __init__(self, root: str, options: Mapping[str, str], patience: Patience | None = None) -> None:
        patience = patience or Patience.of(options)
        super().__init__(root, options, patience)
        retries = {
            "max_retries": 100 if patience.attempts is None else patience.attempts - 1,
            "retry_timeout": timedelta(seconds=patience.give_up_s),
        }
        self._pieces = store_of(root, options, Patience(timeout_s=_PIECE_S), retries)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """As in a Client; MissingError means that the bucket is missing."""
        return self._in_bucket(lambda: Client.list(self, prefix), prefix)

    def put(self, path: str, data: bytes) -> None:
        """Write an object of a few bytes. Raises StoreError."""
        import obstore

        put = partial(obstore.put, self._store, path, data, use_multipart=False)
        self._in_bucket(lambda: self._retry(put, path, self._name(path)), path)

    def delete(self, path: str) -> None:
        """Delete an object; a missing one counts as deleted. Raises StoreError."""
        import obstore

        with suppress(MissingError):
            self._retry(lambda: obstore.delete(self._store, path), path, self._name(path))

    def upload(self, path: str, file: Path, on_bytes: Callable[[int], None]) -> Stat:
        """Upload a file as an object; returns its size and version in storage.

        on_bytes: called repeatedly with the number of bytes sent so far. Raises StoreError.
        """
        with typed_errors(file), file.open("rb") as stream:
            self._in_bucket(lambda: self._uploaded(path, _Watched(stream), on_bytes), path)
            size = stream.seek(0, io.SEEK_END)
        found = self.stat(path)
        if found.size_bytes != size:
            raise UnavailableError(
                f"{self._name(path)}: {found.size_bytes} bytes arrived, {size} were sent; upload it again"
            )
        return found

    def _uploaded(self, path: str, source: _Watched, on_bytes: Callable[[int], None]) -> None:
        """Upload on another thread, so that an interrupt does not wait for the network."""
        done: Future[None] = Future()
        threading.Thread(target=self._send, args=(path, source, done), daemon=True).start()
        try:
            while not wait([done], _TELL_S).done:
                on_bytes(source.num_bytes)
        except BaseException:
            source.is_stopped = True
            wait([done], _END_S)
            raise
        error = done.exception()
        if source.error is not None:
            raise source.error
        if isinstance(error, Exception):
            self._refuse(error, path, self._name(path))
            raise UnavailableError(
                f"{self._name(path)}: not uploaded: {reason(error, path)}; check the network and the storage "
                "service"
            ) from error
        done.result()

    def _send(self, path: str, source: _Watched, done: Future[None]) -> None:
        import obstore

        piece_bytes = max(PIECE_BYTES, -(-source.size_bytes // _MOST_PIECES))
        try:
            obstore.put(self._pieces, path, source, chunk_size=piece_bytes, max_concurrency=_AT_ONCE)  # type: ignore[arg-type]
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def _in_bucket(self, ask: Callable[[], T], path: str) -> T:
        try:
            return ask()
        except MissingError as error:
            raise MissingError(
                f"{self._name(path)}: no such bucket or container; create it, or check the URL"
            ) from error


class _Watched:
    """A file that counts the bytes read, and fails the next read once it is stopped.

    Attributes:
        num_bytes: read so far.
        error: raised by reading it.
        is_stopped: whether to fail the next read.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.num_bytes, self.is_stopped = stream, 0, False
        self.size_bytes = stream.seek(0, io.SEEK_END)
        self.error: OSError | None = None
        stream.seek(0)

    def read(self, size: int = -1) -> bytes:
        if self.is_stopped:
            raise StoreError("stopped")
        try:
            data = self._stream.read(size)
        except OSError as error:
            self.error = error
            raise
        self.num_bytes += len(data)
        return data

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(to, whence)

    def tell(self) -> int:
        return self._stream.tell()
