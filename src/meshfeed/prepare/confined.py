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
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from meshfeed.errors import StoreError
from meshfeed.prepare.conversation import Conversations, Rendered

MEMORY_BYTES = 1 << 30
"""Of the process, its Python included."""
CPU_S = 10
"""Of a conversation: CPU time, so a busy machine changes nothing."""

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
        self._ask("check", None)

    def render(self, value: Any) -> Rendered:
        """See Conversations."""
        response = self._ask("render", value)
        spans = [(int(begin), int(end)) for begin, end in response["spans"]]
        return Rendered(response["text"], spans, response["trims"])

    def _ask(self, what: str, value: Any) -> dict[str, Any]:
        try:
            request = pickle.dumps((what, value))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"not plain values: {error}; give lists, objects, text and numbers") from error
        with self._lock:
            if self._process is None or self._process.owner != os.getpid():  # a fork shares its pipes
                self._process = _Process(self._conversations)
            try:
                response = self._process.ask(request)
            except StoreError:
                self._process = None
                raise
        if "error" in response:
            raise StoreError(response["error"])
        return response


class _Process:
    """One such process. Requests are pickles; responses, which it may be made to forge, are lines of JSON.

    Attributes:
        owner: the process that started it.
    """

    def __init__(self, conversations: Conversations) -> None:
        self.owner, self._where = os.getpid(), conversations.path
        command = [sys.executable, str(_BARE), __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self.owner, self._process)
        self._setup = pickle.dumps((conversations, MEMORY_BYTES, CPU_S))

    def ask(self, request: bytes) -> dict[str, Any]:
        """Its response. Raises StoreError where it died."""
        requests, responses = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        try:
            requests.write(self._setup + request)
            self._setup = b""
            requests.flush()
            line = responses.readline()
            if line.endswith(b"\n"):
                return json.loads(line)
            raise BrokenPipeError
        except BrokenPipeError:
            raise self._died() from None
        except BaseException:  # a response may be half read
            self._end()
            raise

    def _died(self) -> StoreError:
        status = self._process.wait()
        self._end()
        if status == -signal.SIGXCPU:
            how = f"its chat template took more than {CPU_S} s of CPU time"
        elif status < 0:
            how = f"the process that renders its chat template died of {signal.Signals(-status).name}"
        else:
            how = f"the process that renders its chat template ended with status {status}, see above"
        return StoreError(f"{self._where}: {how}; leave the conversation out, or use another template")


def _end(owner: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            cast(IO[bytes], pipe).close()


# -- in the process of its own ----------------------------------------------------------------------------


def main() -> None:
    """Respond to each request on standard input, until there are no more."""
    requests = sys.stdin.buffer
    with os.fdopen(os.dup(1), "w") as responses:
        os.dup2(2, 1)  # what a template prints is not a response
        conversations, memory_bytes, cpu_s = pickle.load(requests)
        _limit("RLIMIT_AS", memory_bytes)
        with contextlib.suppress(EOFError):
            while True:
                what, value = pickle.load(requests)
                _limit("RLIMIT_CPU", math.ceil(time.process_time()) + cpu_s)
                responses.write(_response(conversations, what, value) + "\n")
                responses.flush()


def _response(conversations: Conversations, what: str, value: Any) -> str:
    try:
        if what == "render":
            return json.dumps(asdict(conversations.render(value)))
        conversations.check()
        return "{}"
    except StoreError as error:
        return json.dumps({"error": str(error)})
    except MemoryError:
        return json.dumps({"error": "too large to be rendered; leave it out"})


def _limit(name: str, most: int) -> None:
    if resource is not None:
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
