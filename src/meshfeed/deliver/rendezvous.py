"""A job's rendezvous through a torch.distributed store: the first text written under a key counts.

If the host of a store is stopped or unreachable, a call on it never returns. So calls run on a thread that
may be abandoned. Another thread waits on its own connection until a *notice* arrives. There is one such
connection per process and store, opened off the critical path and kept: opening one can take seconds if
names resolve slowly. A thread that waits on a connection blocks it for all others, so nothing waits on the
user's own connection.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import queue
import threading
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshfeed.errors import DeliveryError
from meshfeed.forks import of_parent

T = TypeVar("T")

FAILURES = (RuntimeError, dist.DistError)  # what a store raises; DeliveryError is among them

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None]

_WITHOUT_CONNECTION = (dist.FileStore, dist.HashStore)  # pyright: ignore[reportPrivateImportUsage]
_NO_TIMEOUT = timedelta(days=30)
_POLL_EVERY_S = 2.0  # for stores without a separate connection to wait on
_END_S = 5.0
_LOG_AFTER_S = 10.0

_log = logging.getLogger("meshfeed")


def key_of(text: str) -> str:
    """A text of any length as a part of a key."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Watcher(Protocol):
    """Is called when notices arrive."""

    def on_notice(self, append: Callable[[str, str], object]) -> None:
        """New notices have arrived; called on the client's own thread.

        append: adds a text to that under a key, even while the user's thread waits on the store.
        """
        ...


class Rendezvous:
    """One process's side of a store, with a timeout on every call. Create it with `rendezvous_of`.

    Attributes:
        process: its pid; a forked child needs another one.
        notices: those read so far, by number.
    """

    def __init__(self, store: Store) -> None:
        self.notices: dict[int, str] = {}
        self._store = weakref.ref(store)  # a strong reference would keep its server's port in use
        self._where = _where(store)
        self.process = os.getpid()
        self._calls = _Calls()
        self._overdue: Future[Any] | None = None
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._watched = threading.Event()
        self._ending = threading.Event()
        self._listener: threading.Thread | None = None
        self._wake_key = f"meshfeed/wake/{uuid.uuid4().hex}"

    def start(self) -> None:
        """Start the thread that makes the calls; it ends with this object."""
        serve = threading.Thread(target=_serve, args=(self._calls,), name="meshfeed-store", daemon=True)
        serve.start()
        _started.add(self)
        weakref.finalize(self, self._calls.put, None).atexit = False

    # -- calls ----------------------------------------------------------------------------------------

    def call(self, operation: Callable[[Any], T], within_s: float) -> T:
        """Run an operation on the store. Raises DeliveryError if the store fails or does not answer in time.

        After a call that timed out, others fail at once until it returns.
        """
        if self._overdue is not None and not self._overdue.done():
            raise DeliveryError(
                f"the rendezvous store {self._where} still does not answer; is its host up and reachable?"
            )
        given_up = threading.Event()
        future: Future[Any] = self.later(lambda store: None if given_up.is_set() else operation(store))
        wait([future], min(within_s, _LOG_AFTER_S))
        if not future.done() and within_s > _LOG_AFTER_S:
            _log.warning(
                "the rendezvous store %s has not answered for %g s; this rank waits %g s at most",
                self._where,
                _LOG_AFTER_S,
                within_s,
            )
            wait([future], within_s - _LOG_AFTER_S)
        if not future.done():
            given_up.set()
            self._overdue = future
            raise DeliveryError(
                f"the rendezvous store {self._where} has not answered for {within_s:g} s; is the machine "
                f"that hosts it up and reachable, and the process running?"
            )
        if error := future.exception():
            raise DeliveryError(
                f"the rendezvous store {self._where} failed: {error}; is its host up?"
            ) from error
        return future.result()

    def say(self, key: str, text: str, within_s: float, num_speakers: int | None = None) -> str:
        """Write a text under a key unless a rank already has. Returns the first text written.

        num_speakers: how many ranks write here, each its own text; the last one deletes the key. None keeps
        it. Raises DeliveryError as `call` does.
        """

        def say(store: Any) -> str:
            first = first_text(store, key, text)
            if num_speakers is None or first == text:
                return first
            if store.add(f"{key}/heard", 1) == num_speakers - 1:
                store.delete_key(key)
                store.delete_key(f"{key}/heard")
            return first

        return self.call(say, within_s)

    def later(self, operation: Callable[[Any], T]) -> Future[T]:
        """Run an operation on the store, after those before it, without waiting for it."""
        future = Future[T]()
        # may run during garbage collection, so it must take no lock
        self._calls.put((future, operation, self._store()))
        return future

    # -- notices --------------------------------------------------------------------------------------

    def read_notices(self, within_s: float) -> None:
        """Read new notices. Raises DeliveryError as `call` does."""
        self.call(self._read, within_s)

    def add_notice(self, text: str, within_s: float) -> bool:
        """Publish a notice as the next one. False if another rank's came first; nothing is written then."""

        def add(store: Any) -> bool:
            self._read(store)
            won = first_text(store, _notice(len(self.notices)), text) == text
            if won:
                keys = store.get(_WAKE_KEYS).decode().split() if store.check([_WAKE_KEYS]) else []
                store.multi_set(keys, ["1"] * len(keys))
            self._read(store)
            return won

        return self.call(add, within_s)

    def watch(self, watcher: Watcher) -> None:
        """Call a watcher for each new notice, until `unwatch`."""
        self._watchers.add(watcher)
        self._watched.set()
        if self._listener is None or not self._listener.is_alive():  # its connection may have been lost
            self._listener = threading.Thread(target=self._listen, name="meshfeed-notices", daemon=True)
            self._listener.start()

    def unwatch(self, watcher: Watcher) -> None:
        """Stop calling a watcher. The listener pauses when none is left."""
        self._watchers.discard(watcher)
        if not self._watchers and self.process == os.getpid():
            self.later(self._wake_listener)

    def _wake_listener(self, store: Any) -> None:
        store.set(self._wake_key, "1")

    def _append(self, key: str, text: str) -> None:
        self.later(lambda store: store.append(key, text))

    def _read(self, store: Any) -> None:
        while store.check([_notice(number := len(self.notices))]):
            self.notices.setdefault(number, store.get(_notice(number)).decode())

    def _listen(self) -> None:
        with contextlib.suppress(*FAILURES):
            own = _clone(self._store())
            if own is not None:
                own.append(_WAKE_KEYS, f"{self._wake_key} ")
            append = self._append if own is None else own.append
            num_read = 0
            while True:
                self._watched.wait()
                if self._ending.is_set():
                    return
                if own is None:
                    self._ending.wait(_POLL_EVERY_S)
                    # a short timeout would make the training loop's own calls fail
                    self.read_notices(_NO_TIMEOUT.total_seconds())
                else:
                    self._read(own)
                if len(self.notices) > num_read:
                    num_read = len(self.notices)
                    for watcher in list(self._watchers):
                        watcher.on_notice(append)
                if own is not None and self._watchers:
                    own.wait([self._wake_key], _NO_TIMEOUT)
                    own.delete_key(self._wake_key)
                if not self._watchers:
                    self._watched.clear()
                    if self._watchers or self._ending.is_set():
                        self._watched.set()

    def rest(self) -> None:
        """Let both threads come to rest before the interpreter exits.

        One that returns from a call on the store during the exit would abort the process.
        """
        self._ending.set()
        self._watched.set()
        if self._overdue is not None and not self._overdue.done():
            return
        listener = self._listener
        # without the store nothing wakes it, unless the last `unwatch` has
        can_wake = listener is not None and self._store() is not None
        last = self.later(self._wake_listener if can_wake else lambda store: None)
        wait([last], _END_S)
        if listener is not None and (can_wake or not self._watchers):
            listener.join(_END_S)


def first_text(store: Any, key: str, text: str) -> str:
    """Write a text under a key unless there is one. Returns the first one written."""
    return store.compare_set(key, "", text).decode()


_WAKE_KEYS = "meshfeed/wake-keys"
_all: weakref.WeakKeyDictionary[Store, Rendezvous] = weakref.WeakKeyDictionary()
_all_lock = threading.Lock()
_started: weakref.WeakSet[Rendezvous] = weakref.WeakSet()  # one whose store is gone may still listen


@atexit.register  # at import, so that it runs after the feeds of the process have closed, which use the store
def _end_all() -> None:
    for client in list(_started):
        if client.process == os.getpid():
            client.rest()


def default_store() -> Store | None:
    """The store of the default process group; None if torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _after_fork() -> None:
    """In a forked child: note the stores whose one connection it and its parent would write to."""
    global _all_lock
    _all_lock = threading.Lock()
    of_parent.update(store for store in _all if not isinstance(_base(store), _WITHOUT_CONNECTION))


os.register_at_fork(after_in_child=_after_fork)


def rendezvous_of(store: Store) -> Rendezvous:
    """This process's side of a store. Raises DeliveryError for its parent's store."""
    if store in of_parent:
        raise DeliveryError(
            f"the rendezvous store {_where(store)} belongs to the parent of this forked process, which is "
            f"not a rank of that job; iterate the feed in the parent, or pass this process its own store, "
            f"mf.Transport(rendezvous=...)"
        )
    one = _all.get(store)  # without the lock: garbage collection under it may get here again
    if one is None or one.process != os.getpid():
        with _all_lock:
            one = _all.get(store)
            if one is None or one.process != os.getpid():
                one = Rendezvous(store)
                one.start()
                _all[store] = one
    return one


def within(seconds: float, function: Callable[[], T]) -> T:
    """Run a function that may hang, on a thread. Raises TimeoutError, or the function's own error."""
    future, calls = Future[T](), _Calls()
    calls.put((future, lambda _: function(), None))
    calls.put(None)
    threading.Thread(target=_serve, args=(calls,), name="meshfeed-connect", daemon=True).start()
    wait([future], seconds)
    if not future.done():
        raise TimeoutError(f"no answer for {seconds:g} s")
    return future.result()


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, operation, store = call
        try:
            future.set_result(operation(store))
        except Exception as error:
            future.set_exception(error)
        del call, future, operation, store  # they would keep the caller's objects alive


def _notice(number: int) -> str:
    return f"meshfeed/notice/{number}"


def _base(store: Store) -> Any:
    base: Any = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    return base


def _where(store: Store) -> str:
    base = _base(store)
    if isinstance(base, dist.TCPStore):  # pyright: ignore[reportPrivateImportUsage]
        return f"at {base.host}:{base.port}"
    return f"({type(base).__name__})"


def _clone(store: Any) -> Any:
    """A connection of its own to the same store; None without one."""
    # a FileStore waits by polling in a busy loop
    if isinstance(_base(store), dist.FileStore) or not hasattr(store, "clone"):  # pyright: ignore[reportPrivateImportUsage]
        return None
    try:
        return store.clone()
    except FAILURES:  # of a store written in Python
        return None
