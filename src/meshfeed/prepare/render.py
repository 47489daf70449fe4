"""Started by path, as a process of its own: renders the conversations that `confined` sends it.

The package's own `__init__` would bring torch, and a limit on memory leaves no room for it; empty ones stand
in for it.
"""

import json
import math
import os
import pickle
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

try:
    import resource
except ImportError:  # not on every system
    resource = None

_STAND_INS = ("meshfeed", "meshfeed.prepare")


def main() -> None:
    """Answer each request, until there are no more."""
    from meshfeed.errors import StoreError
    from meshfeed.prepare.confined import FRAME, received

    asks = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        conversations, memory_bytes, cpu_s = pickle.loads(received(asks))
        _limit("RLIMIT_AS", memory_bytes)
        while True:
            try:
                request = received(asks)
            except EOFError:
                return
            _limit("RLIMIT_CPU", math.ceil(time.process_time()) + cpu_s)
            try:
                what, value = pickle.loads(request)
                told = asdict(conversations.said(value)) if what == "said" else {}
                if what == "check":
                    conversations.check()
                answer = json.dumps(told).encode()
            except StoreError as error:
                answer = json.dumps({"error": str(error)}).encode()
            except MemoryError:
                answer = json.dumps({"error": "too large to be rendered; leave it out"}).encode()
            answers.write(FRAME.pack(len(answer)) + answer)
            answers.flush()


def _limit(name: str, most: int) -> None:
    if resource is not None:
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its names are not top-level ones
    root = Path(__file__).resolve().parents[1]
    for name in _STAND_INS:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    main()
