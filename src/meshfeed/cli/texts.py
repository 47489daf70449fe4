"""The beginnings of some documents, as a tokenizer reads them, or as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshfeed.errors import MeshfeedError
from meshfeed.formats.tokenizer import BYTES, tokenizer_file
from meshfeed.store import StreamStore

Decode = Callable[[Sequence[int]], str]

_MOST_TOKENS = 256


def beginnings(store: StreamStore, count: int, decode: Decode | None) -> list[tuple[int, str]]:
    """(document, how it begins) of documents spread evenly over a store; token ids without a decoder.

    Raises StoreError, or MeshfeedError for tokens that the tokenizer does not know.
    """
    found: list[tuple[int, str]] = []
    with store:
        num = store.num_documents
        for document in np.unique(np.linspace(0, num - 1, min(count, num)).astype(np.int64)).tolist():
            length = int(store.lengths(np.array([document]))[0])
            tokens = store.read(document, 0, min(length, _MOST_TOKENS)).tolist()
            text = " ".join(map(str, tokens)) if decode is None else decode(tokens)
            found.append((document, text + (" …" if length > _MOST_TOKENS else "")))
    return found


def decoder(tokenizer: str) -> Decode:
    """How tokens are read as text. tokenizer: `formats.tokenizer.KNOWN`. Raises StoreError for another."""
    made = tokenizer_file(tokenizer).load()
    size = made.vocab_size + (tokenizer == BYTES)  # what ends a document there is no byte

    def decode(tokens: Sequence[int]) -> str:
        strange = next((token for token in tokens if not 0 <= token < size), None)
        if strange is not None:
            raise MeshfeedError(
                f"--tokenizer {tokenizer}: knows tokens below {size:,}, the store has {strange:,}; it is "
                f"another's"
            )
        return made.decode(tokens)

    return decode
