"""Storage fetchers that hedge nothing, for tests that count bytes: on a busy machine any request may be slow.

As a script, this is such a fetcher; see meshfeed/remote/fetcher/start.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def unhedged() -> Iterator[None]:
    """This process has such a fetcher, begun here."""
    from meshfeed.remote.fetcher import protocol

    mine: Any = protocol.fetcher.__self__
    before = mine._client, protocol._SCRIPT
    mine._client, protocol._SCRIPT = None, Path(__file__)
    try:
        yield
    finally:
        if mine._client is not None:
            _leave(mine._client)
        mine._client, protocol._SCRIPT = before


def _leave(client: Any) -> None:
    """End the connection for both sides; the thread that receives then closes this one."""
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(client._channel._connection.fileno())) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    spec = importlib.util.find_spec("meshfeed")
    assert spec is not None and spec.submodule_search_locations
    package = ModuleType("meshfeed")  # imports no torch
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["meshfeed"] = package
    from meshfeed.remote.client import Client

    Client._may_hedge = lambda self, num_bytes: False
    runpy.run_path(f"{package.__path__[0]}/remote/fetcher/start.py", run_name="__main__")
