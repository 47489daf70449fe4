"""What the rest of meshfeed asks of a token store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from meshfeed.files import FileStats

I64 = npt.NDArray[np.int64]


class Store(Protocol):
    """Tokens by document. All but the attributes needs `with store:`; all may raise StoreError."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        ...

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content, the same wherever the store lies."""
        ...

    def lengths(self, documents: I64) -> I64:
        """Tokens of each document; int64 [n] -> int64 [n]."""
        ...

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start..stop of one document; [stop - start] of `dtype`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class StreamStore(Store, Protocol):
    """A store whose documents lie back to back: one unshuffled stream of tokens.

    It may also have:

    - `shard_ends`, where its shards end in documents, int64 [num_shards], the last one num_documents. Then
      they decide a shuffle by blocks, so that its fingerprint must tell of them.
    - `wants_ahead` (bool): whether to announce reads many steps ahead, as a store far away needs it.
    - `forget_needs()`: what was announced and is not read yet will not be.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        ...

    def read_stream(self, starts: I64, stops: I64, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Tokens of the ranges, back to back; int64 [m] twice -> [sum(stops - starts)] of `dtype`."""
        ...

    def document_starts(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        """Offsets of documents strictly inside each range, int64 [total], and their counts, int64 [m]."""
        ...

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce ranges that are going to be read, each once; reading one with `read_stream` settles it."""
        ...


class OpenedStore(StreamStore, Protocol):
    """What `mf.open` gives, whatever lies at a path."""

    @property
    def path(self) -> str:
        """Where it lies, as messages name it."""
        ...

    @property
    def stats(self) -> FileStats:
        """What reading has cost so far."""
        ...

    def __len__(self) -> int:
        """Documents; of a dataset of samples, those."""
        ...

    def offsets(self, documents: I64) -> I64:
        """Stream offset of each document's first token; int64 [n] -> int64 [n]."""
        ...

    def facts(self) -> dict[str, Any]:
        """What its format says of it beside counts, as JSON-able values; "format" is one."""
        ...

    def verify(self) -> Iterator[float]:
        """Check all that can be checked, yielding the part done, in (0, 1]."""
        ...
