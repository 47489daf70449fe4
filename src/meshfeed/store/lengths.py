"""The lengths index: where each document lies and how long it is, for formats that do not say.

One process of a node makes it, once, while the others wait on a file lock (see `index_cache`); all map it. It
is made part by part, and a part is an entry of its own until the whole is published: who comes after a killed
builder goes on where that one was.

    <key>.parts/<i>/   part i, until the whole is there
    <key>/             the whole
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshfeed.columns import Array
from meshfeed.store.index_cache import cached_arrays

Part = TypeVar("Part")

_SAY_EVERY_S = 10.0
_log = logging.getLogger("meshfeed")


def built_in_parts(
    folder: Path,
    key: str,
    parts: Callable[[], Sequence[Part]],
    build: Callable[[Part], Mapping[str, Array]],
    join: Callable[[Sequence[Part], Sequence[Mapping[str, Array]]], Mapping[str, Array]],
) -> dict[str, Array]:
    """The arrays of `key`, mapped read-only: each part built on its own, then joined.

    Everything that the arrays depend on is in the key, how it is cut into parts too. What `build` raises
    passes through, and finished parts stay for the next process. Raises StoreError as `cached_arrays` does.
    """
    of_parts = folder / f"{key}.parts"

    def whole() -> Mapping[str, Array]:
        cut, arrays, said = parts(), list[Mapping[str, Array]](), time.monotonic()
        for i, part in enumerate(cut):
            arrays.append(cached_arrays(of_parts, str(i), lambda part=part: build(part)))
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                _log.info("%s: made %d of %d parts", of_parts, i + 1, len(cut))
        return join(cut, arrays)

    arrays = cached_arrays(folder, key, whole)
    if of_parts.exists():
        shutil.rmtree(of_parts, ignore_errors=True)  # another process may be at it, too
    return arrays


def joined(arrays: Sequence[Mapping[str, Array]], name: str, dtype: Any = np.int64) -> Array:
    """One array of all parts, back to back; empty where there is no part."""
    return np.concatenate([part[name] for part in arrays] or [np.zeros(0, dtype)])
