"""A chat template run in a process of its own, with a limit on memory and on time.

A template comes with a tokenizer that someone published. jinja2's sandbox keeps it from files and code, but a
line of it may ask for a terabyte or for a year.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from meshfeed.errors import StoreError
from meshfeed.prepare.conversation import Conversations, Said

MEMORY_BYTES = 1 << 30
"""Of the process, its Python included."""
CPU_S = 10
"""Of a conversation: CPU time, so a busy machine changes nothing."""
_FRAME = struct.Struct(">Q")

try:
    import resource
except ImportError:  # not on every system
    resource = None

_BARE = Path(__file__).with_name("bare.py")


class Confined:
    """`Conversations` in a process that is started when it is first needed, and again where it died.

    All methods raise StoreError. They may be called by several threads, one after the other.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def check(self) -> None:
        """See Conversations."""
        self._asked("check", None)

    def said(self, value: Any) -> Said:
        """See Conversations."""
        told = self._asked("said", value)
        spans = [(int(begin), int(end)) for begin, end in told["spans"]]
        return Said(told["text"], spans, told["trims"])

    def _asked(self, what: str, value: Any) -> dict[str, Any]:
        try:
            request = pickle.dumps((what, value))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"not plain values: {error}; give lists, objects, text and numbers") from error
        with self._lock:
            if self._process is None or self._process.owner != os.getpid():  # a fork shares its pipes
                self._process = _Process(self._conversations)
            try:
                told = self._process.ask(request)
            except StoreError:
                self._process = None
                raise
        if "error" in told:
            raise StoreError(told["error"])
        return told


class _Process:
    """One such process. owner: the process that started it."""

    def __init__(self, conversations: Conversations) -> None:
        self.owner, self._where = os.getpid(), conversations.path
        started = subprocess.Popen(
            [sys.executable, str(_BARE), __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if started.stdin is None or started.stdout is None:
            raise StoreError(f"{self._where}: a process without pipes; start it again")
        self._process, self._asks, self._answers = started, started.stdin, started.stdout
        self._end = weakref.finalize(self, _ended, self.owner, started)
        self._setup = pickle.dumps((conversations, MEMORY_BYTES, CPU_S))

    def ask(self, request: bytes) -> dict[str, Any]:
        """What it answers. Raises StoreError where it died."""
        try:
            for frame in (self._setup, request):
                if frame:
                    self._asks.write(_FRAME.pack(len(frame)) + frame)
            self._setup = b""
            self._asks.flush()
            return json.loads(_received(self._answers))
        except (BrokenPipeError, EOFError):
            raise self._died() from None
        except BaseException:  # an answer may be half read
            self._end()
            raise

    def _died(self) -> StoreError:
        self._process.wait()
        status = self._process.returncode
        self._end()
        if status == -signal.SIGXCPU:
            what = f"its chat template took more than {CPU_S} s of CPU time"
        elif status < 0:
            what = f"the process that renders its chat template died of {signal.Signals(-status).name}"
        else:
            what = f"the process that renders its chat template ended with status {status}, see above"
        return StoreError(f"{self._where}: {what}; leave the conversation out, or use another template")


def _ended(owner: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def _received(stream: IO[bytes]) -> bytes:
    """The next frame. Raises EOFError where the stream ends."""
    head = stream.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise EOFError
    (size,) = _FRAME.unpack(head)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return body


# -- in the process of its own ----------------------------------------------------------------------------


def main() -> None:
    """Answer each request on standard input, until there are no more."""
    requests = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a template prints is not an answer
        conversations, memory_bytes, cpu_s = pickle.loads(_received(requests))
        _limit("RLIMIT_AS", memory_bytes)
        with contextlib.suppress(EOFError):
            while True:
                request = _received(requests)
                _limit("RLIMIT_CPU", math.ceil(time.process_time()) + cpu_s)
                answer = json.dumps(_answer(conversations, request)).encode()
                answers.write(_FRAME.pack(len(answer)) + answer)
                answers.flush()


def _answer(conversations: Conversations, request: bytes) -> dict[str, Any]:
    try:
        what, value = pickle.loads(request)
        if what == "said":
            return asdict(conversations.said(value))
        conversations.check()
        return {}
    except StoreError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "too large to be rendered; leave it out"}


def _limit(name: str, most: int) -> None:
    if resource is not None:
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
