"""What storage has answered, shared by the processes of a node.

The first process to need an answer asks for it while it holds a lock, and the others read its file. If the
storage fails, all that waited raise its error.

    KIND-KEY           an answer, as JSON
    KIND-KEY.failed    when and how the last request for it failed
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshfeed.errors import UnavailableError
from meshfeed.files.cache.once import once_per_node

RECENT_S = 30.0
"""How long an answer is reused if it may change, such as the size of an object."""


def shared(
    folder: Path,
    kind: str,
    of: object,
    ask: Callable[[], Any],
    is_good: Callable[[Any], bool] = lambda said: True,
) -> Any:
    """An answer that one process of the node got; see `once_per_node`.

    of: all that the answer depends on, JSON-able. ask: what it gives is JSON-able. It must not share answers
    of this kind itself. is_good: whether an earlier answer can still be used.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    came, key = time.time(), hashlib.blake2b(json.dumps(of).encode(), digest_size=16).hexdigest()
    path = folder / f"{kind}-{key}"
    failed = path.with_suffix(".failed")

    def make(part: Path) -> None:
        when, text = _json_of(failed) or (0, "")
        if came < when <= time.time():  # another process failed while this one waited
            raise UnavailableError(text)
        try:
            said = ask()
        except UnavailableError as error:
            _write(failed, [time.time(), str(error)])
            raise
        _write(part, said)

    # a few locks for any number of answers, since lock files stay; a crash leaves an answer that is no JSON
    lock = folder / f"{kind}-{key[:2]}.lock"
    return once_per_node(path, _json_of, make, is_good=is_good, lock=lock, is_durable=False)


def recent(ask: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """`ask` and `is_good` of `shared` for an answer that may change: [answer, when it was asked for]."""
    return lambda: [ask(), time.time()], lambda said: 0 <= time.time() - said[1] < RECENT_S


def forget(folder: Path, kind: str) -> None:
    """Ask for all answers of a kind again."""
    for path in folder.glob(f"{kind}-*"):
        if not path.suffix:
            path.unlink(missing_ok=True)


def _write(path: Path, said: Any) -> None:
    path.touch(0o600)
    path.write_text(json.dumps(said))


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
