"""Runs a chat template in a separate process, with limits on memory and time.

A template comes with a tokenizer that someone published. jinja2's sandbox keeps it from files and code, but
one line of it can take a terabyte of memory or a year.
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
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import IO, Any, cast

from meshfeed.errors import StoreError
from meshfeed.prepare.encoding.chat_template import Conversations, Rendered
from meshfeed.prepare.inputs.conversation import Conversation
from meshfeed.prepare.without_torch import command

MEMORY_BYTES = 1 << 30
"""Memory limit of the process, including Python."""
CPU_S = 10
"""Limit for a conversation, in CPU time, so that a busy machine changes nothing."""

try:
    import resource
except ImportError:  # not on every system
    resource = None


class Confined:
    """`Conversations` in a process that starts when it is first needed, and again after it died.

    All methods raise StoreError. Several threads may call them; calls run one at a time.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def check(self) -> None:
        with self._lock:
            self._started()

    def render(self, talk: Conversation) -> Rendered:
        try:
            request = pickle.dumps(talk)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"not plain values: {error}; give lists, objects, text and numbers") from error
        with self._lock:
            return Rendered(**self._started().ask(request))

    def _started(self) -> _Process:
        if self._process is None or not self._process.is_usable:
            self._process = _Process(self._conversations)
        return self._process


class _Process:
    """Such a process. Requests are pickles; responses are lines of JSON, as a template could forge them."""

    def __init__(self, conversations: Conversations) -> None:
        self._owner, self._where = os.getpid(), conversations.path
        self._process = subprocess.Popen(command(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self._owner, self._process)
        self.ask(pickle.dumps((conversations, MEMORY_BYTES, CPU_S)))

    @property
    def is_usable(self) -> bool:
        """Whether it is alive, and was started by this process: a fork shares its pipes."""
        return self._end.alive and self._owner == os.getpid()

    def ask(self, request: bytes) -> dict[str, Any]:
        """Its response. Raises StoreError for an error, or if it died."""
        requests, responses = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        line = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                requests.write(request)
                requests.flush()
                line = responses.readline()
        except BaseException:  # a response may be read in part
            self._end()
            raise
        if not line.endswith(b"\n"):
            raise self._died()
        response = json.loads(line)
        if "error" in response:
            raise StoreError(response["error"])
        return response

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


# -- in the separate process ------------------------------------------------------------------------------


def main() -> None:
    """Compile the templates, then render each request on standard input, until there are no more."""
    requests = sys.stdin.buffer
    # the run may end at any time: then nobody asks, or reads what is told
    with contextlib.suppress(EOFError, BrokenPipeError), os.fdopen(os.dup(1), "w") as responses:
        os.dup2(2, 1)  # a template's own prints are not responses
        conversations, memory_bytes, cpu_s = pickle.load(requests)
        _limit("RLIMIT_AS", memory_bytes)
        work = conversations.check
        while True:
            _limit("RLIMIT_CPU", math.ceil(time.process_time()) + cpu_s)
            responses.write(_response(work) + "\n")
            responses.flush()
            work = partial(conversations.render, pickle.load(requests))


def _response(work: Callable[[], Rendered | None]) -> str:
    try:
        rendered = work()
        return json.dumps({} if rendered is None else asdict(rendered))
    except StoreError as error:
        return json.dumps({"error": str(error)})
    except MemoryError:
        return json.dumps({"error": "too large to be rendered; leave it out"})


def _limit(name: str, most: int) -> None:
    if resource is not None:
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
