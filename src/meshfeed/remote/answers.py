"""What storage has answered, shared by the processes of a node.

The first process to need an answer asks for it while it holds a lock, and the others read its file. If the
storage fails, all that waited raise its error. Answers are removed a day after they were given.

    KIND-KEY           crc32 of an answer, and the answer as JSON
    KIND-KEY.failed    in the same form, when and how the last request for it failed
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshfeed.errors import StoreError, UnavailableError
from meshfeed.files.cache.once import DAY_S, once_per_node, sweep

RECENT_S = 30.0
"""How long an answer is reused if it may change, such as the size of an object."""


def shared(
    folder: Path,
    kind: str,
    of: object,
    ask: Callable[[], Any],
    is_good: Callable[[Any], bool] = lambda said: True,
) -> Any:
    """An answer that one process of the node got; see `once_per_node`. Its own if the disk can keep none.

    of: all that the answer depends on, JSON-able. ask: what it gives is JSON-able. It must not share answers
    of this kind itself. is_good: whether an earlier answer can still be used.
    """
    came, key = time.time(), hashlib.blake2b(json.dumps(of).encode(), digest_size=16).hexdigest()
    path = folder / f"{kind}-{key}"
    failed = path.with_suffix(".failed")

    def make(part: Path) -> None:
        when, text = read_answer(failed) or (0, "")
        if came < when <= time.time():  # another process failed while this one waited
            raise UnavailableError(text)
        sweep(folder, "*-*", DAY_S)
        try:
            said = ask()
        except UnavailableError as error:
            with suppress(OSError):
                write_answer(failed, [time.time(), str(error)])
            raise
        write_answer(part, said)

    # a few locks for any number of answers, since lock files stay; a crash leaves an answer that is no JSON
    lock = folder / f"{kind}-{key[:2]}.lock"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return once_per_node(path, read_answer, make, is_good=is_good, lock=lock, is_durable=False)
    except StoreError:
        raise
    except OSError:
        return ask()


def recent(
    ask: Callable[[], Any], within_s: float | None = None
) -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """`ask` and `is_good` of `shared` for an answer that may change: [answer, when it was asked for]."""
    most_s = RECENT_S if within_s is None else within_s
    return lambda: [ask(), time.time()], lambda said: 0 <= time.time() - said[1] < most_s


def forget(folder: Path, kind: str) -> None:
    """Ask for all answers of a kind again."""
    for path in folder.glob(f"{kind}-*"):
        if not path.suffix:
            path.unlink(missing_ok=True)


def write_answer(path: Path, said: Any) -> None:
    """Write an answer, for this user alone."""
    text = json.dumps(said).encode()
    path.touch(0o600)
    path.write_bytes(b"%08x " % zlib.crc32(text) + text)


def read_answer(path: Path) -> Any:
    """The answer in a file; None if it is missing or damaged."""
    try:
        crc, _, text = path.read_bytes().partition(b" ")
        return json.loads(text) if int(crc, 16) == zlib.crc32(text) else None
    except (FileNotFoundError, ValueError):
        return None
