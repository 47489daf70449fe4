"""The beginnings of some documents, as a tokenizer reads them, or as token ids."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshfeed.errors import MeshfeedError
from meshfeed.store import OpenedStore

Decode = Callable[[Sequence[int]], str]

_MOST_TOKENS = 256


def beginnings(store: OpenedStore, count: int, decode: Decode | None) -> list[tuple[int, str]]:
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
    """How tokens are read as text.

    tokenizer: "bytes", a `tokenizers` JSON file, or a folder that has one as tokenizer.json, as
    transformers saves it. Raises MeshfeedError for anything else, or without the package.
    """
    if tokenizer == "bytes":
        return lambda tokens: bytes(token & 255 for token in tokens).decode("utf-8", "replace")
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError as missing:
        raise MeshfeedError(
            f"--tokenizer {tokenizer}: needs the package tokenizers: pip install 'meshfeed[tables]'"
        ) from missing
    try:
        made = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise MeshfeedError(f"--tokenizer {path}: {error.strerror or error}") from error
    except Exception as error:  # the package raises Exception itself
        raise MeshfeedError(
            f"--tokenizer {path}: no tokenizer: {error}; give a JSON file as `tokenizers` saves it"
        ) from error
    size = int(made.get_vocab_size())

    def decode(tokens: Sequence[int]) -> str:
        strange = next((token for token in tokens if not 0 <= token < size), None)
        if strange is not None:
            raise MeshfeedError(
                f"--tokenizer {path}: knows tokens below {size:,}, the store has {strange:,}; it is another's"
            )
        return str(made.decode(list(tokens), skip_special_tokens=False))

    return decode
