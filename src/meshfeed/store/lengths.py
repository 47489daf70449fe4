"""The lengths index: how long documents are and where they lie, for formats that do not say.

Made once per node, by whoever comes first, while the others wait on a file lock, and kept under a digest of
all that decides it. Each part (a shard, a stretch of a file) is an entry of its own, so that a builder that
is killed leaves what it has finished to the next.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

import numpy as np

from meshfeed.store.index_cache import Array, cached_arrays, key_of_parts

_SAY_EVERY_S = 10.0
_log = logging.getLogger("meshfeed")


def lengths_index(
    folder: str | os.PathLike[str],
    num_parts: int,
    build: Callable[[int], Mapping[str, Array]],
    **decides: int | float | str | bool | None,
) -> dict[str, Array]:
    """The arrays of all parts, one after the other, mapped.

    build: the arrays of one part, the same names for each. decides: everything that the arrays depend on,
    such as the content's fingerprint, the column, the tokenizer's digest and a version of the code.

    Raises what `build` raises, and StoreError for a folder that cannot be written.
    """

    def whole() -> Mapping[str, Array]:
        parts: list[dict[str, Array]] = []
        said = time.monotonic()
        for part in range(num_parts):
            key = key_of_parts(part=part, num_parts=num_parts, **decides)
            parts.append(cached_arrays(folder, key, lambda part=part: build(part)))
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                _log.info("lengths index of %s: %d of %d parts", decides, part + 1, num_parts)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    if num_parts == 1:
        return cached_arrays(folder, key_of_parts(part=0, num_parts=1, **decides), lambda: build(0))
    return cached_arrays(folder, key_of_parts(**decides), whole)
