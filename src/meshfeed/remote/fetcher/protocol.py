"""How a reading process talks to its fetcher: pickled objects over a socket pair.

A process has one fetcher for all its files, started on first use.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

from meshfeed.errors import StoreError
from meshfeed.forks import at_fork
from meshfeed.remote.errors import without_credentials

T = TypeVar("T")

_LOG_EVERY_S = 10.0
_MOST_FETCHERS = 20
_SCRIPT = Path(__file__).with_name("start.py")
_FRUGAL = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""A fetcher multiplies no matrices, and with one heap its threads reuse each other's memory."""
_log = logging.getLogger("meshfeed")


class LostError(Exception):
    """The fetcher has died, with its state for this process; send the request to the next one."""


class Channel:
    """One end. Any thread may send, even a destructor: only the channel's own thread waits."""

    def __init__(self, end: socket.socket) -> None:
        self._connection = Connection(end.detach())
        self._outgoing: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._send_all, name="meshfeed-send", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Queue a message; it is lost if the other end is gone."""
        self._outgoing.put(ForkingPickler.dumps(message))

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError once the other end is gone."""
        return self._connection.recv()

    def close(self) -> None:
        """Close this end. Not while another thread receives."""
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(message)


class FetcherClient:
    """Sends requests to a fetcher, from any thread, as long as it lives."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.is_lost = False

    def start(self) -> None:
        self._channel.start()
        threading.Thread(target=self._receive_all, name="meshfeed-receive", daemon=True).start()

    def ask(self, request: str, *arguments: Any, what: str) -> Any:
        """The answer to a request. what: for the log. Raises LostError, or the fetcher's error."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self.is_lost:
                raise LostError
            self._futures[number] = future
        self._channel.send(number, request, arguments)
        began = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(_LOG_EVERY_S)
            if not future.done():
                _log.warning("waiting for storage for %.0f s: %s", time.monotonic() - began, what)

    def tell(self, request: str, *arguments: Any) -> None:
        self._channel.send(None, request, arguments)

    def close(self) -> None:
        """Close this end; sends nothing."""
        self._channel.close()

    def _receive_all(self) -> None:
        """The thread that receives, until the fetcher dies."""
        try:
            while True:
                self._handle(*self._channel.receive())
        except (OSError, EOFError):
            pass
        finally:  # whatever went wrong, no thread may wait for an answer that never comes
            with self._lock:
                self.is_lost = True
                futures, self._futures = self._futures, {}
            for future in futures.values():
                future.set_exception(LostError())
            self._channel.close()

    def _handle(self, kind: str, number: int, said: Any) -> None:
        match kind:
            case "answer":
                self._futures.pop(number).set_result(said)
            case "error":
                self._futures.pop(number).set_exception(said)
            case _:
                _log.log(number, "%s", said)


class _Mine:
    """This process's fetcher."""

    def __init__(self) -> None:
        self._client: FetcherClient | None = None
        self.forget_parent()
        at_fork(self)

    def forget_parent(self) -> None:
        """In a forked child: the fetcher is the parent's, and must notice its death."""
        self._lock = threading.Lock()
        if self._client is not None:
            self._client.close()
            self._client = None

    def fetcher(self) -> FetcherClient:
        """This process's fetcher; a new one if there is none or it died. Raises LostError if that dies."""
        with self._lock:
            if self._client is None or self._client.is_lost:
                self._client = _started()
            return self._client


fetcher = _Mine().fetcher


def retried(ask: Callable[[], T]) -> T:
    """Call `ask` again each time a fetcher dies. Raises its errors, except LostError."""
    for _ in range(_MOST_FETCHERS):
        with contextlib.suppress(LostError):
            return ask()
    raise StoreError(
        f"{_MOST_FETCHERS} storage fetchers in a row died; does something end them, such as a limit of "
        f"memory?"
    )


def _started() -> FetcherClient:
    """Start a fetcher. Raises LostError if it is killed meanwhile, StoreError if it cannot be started."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(each for each in sys.path if each)
    try:
        subprocess.run(
            [sys.executable, str(_SCRIPT), str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=without_credentials(os.environ) | {"PYTHONPATH": path} | _FRUGAL,
            pass_fds=(theirs.fileno(),),
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        ours.close()
        if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
            raise LostError from error
        raise StoreError(f"the storage fetcher cannot be started: {error}") from error
    finally:
        theirs.close()
    one = FetcherClient(Channel(ours))
    one.start()
    return one
