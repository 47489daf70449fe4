"""Tokenizers by name: text -> tokens without special tokens, by any library."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from meshfeed.arrays import Array
from meshfeed.errors import MissingError, StoreError
from meshfeed.files import typed_errors
from meshfeed.plugins import TOKENIZERS, named, registered
from meshfeed.store.format import tokenizer_name
from meshfeed.summary import code_of

BYTES = "bytes"
KNOWN = (
    "'bytes'; the path of a tokenizers JSON file, of a transformers directory, of a sentencepiece .model, or "
    "of NAME.ENCODING.tiktoken; or tiktoken:ENCODING"
)
TIKTOKEN = "tiktoken:"
END = "<|endoftext|>"
"""The end of a document, where a tokenizer has no other special token, as those that meshfeed trains."""


class Tokenizer(ABC):
    """Text -> tokens. Entry points of the group `meshfeed.tokenizers` are called with a `TokenizerFile`.

    Attributes:
        vocab_size: one more than the largest id.
        end: the token that ends a document, if the tokenizer has one.
    """

    vocab_size: int
    end: int | None = None

    def __init__(self, file: TokenizerFile) -> None:
        self.file = file

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of each text; whole numbers [n]. Only `tokenizers` makes special tokens of text."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """A token's id, including special ones; None for an unknown token."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer's name and the bytes of its file; both are pickled.

    Attributes:
        name: one of KNOWN.
        kind: the entry point that makes it, such as "bytes" or "sentencepiece".
        content: the bytes of its file; empty if the name is enough.
        config: the bytes of tokenizer_config.json beside it, in a directory.
    """

    name: str
    kind: str
    content: bytes = b""
    config: bytes = b""

    @property
    def digest(self) -> str:
        """Digest of all that decides its tokens: its file, and the code of a class that is not meshfeed's."""
        own = hashlib.blake2b(self.content, digest_size=16).hexdigest() if self.content else self.name
        code = "" if self.kind == BYTES else code_of(_maker_of(self))
        return f"{own} {code}" if code else own

    @property
    def settings(self) -> dict[str, Any]:
        """The content of tokenizer_config.json. Raises StoreError."""
        try:
            found: Any = json.loads(self.config or b"{}")
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.name}: tokenizer_config.json: not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(f"{self.name}: tokenizer_config.json: not a JSON object; copy it again")
        return cast(dict[str, Any], found)

    def load(self) -> Tokenizer:
        """The tokenizer. Raises StoreError for a damaged one, or a package that is missing."""
        return _loaded(self)


def tokenizer_file(name: str) -> TokenizerFile:
    """The file of a named tokenizer, read but not loaded. Raises StoreError if there is none.

    name: text or a path; `tokenizer_name` handles what else users give.
    """
    name = tokenizer_name(name)
    if name == BYTES:
        return TokenizerFile(name, BYTES)
    kind, colon, rest = name.partition(":")
    if colon and kind in {point.name for point in registered(TOKENIZERS)}:
        with typed_errors(rest):
            return TokenizerFile(name, kind, Path(rest).read_bytes() if "/" in rest else b"")
    with typed_errors(name):
        path, config = Path(name), b""
        if not path.exists():
            raise MissingError(
                f'{name}: missing; give its path on this node, or "bytes"; names are not looked up on a hub'
            )
        if path.is_dir():
            settings = path / "tokenizer_config.json"
            config = settings.read_bytes() if settings.exists() else b""
            inside = [path / "tokenizer.json", path / "tokenizer.model"]
            there = [each for each in inside if each.exists()]
            if not there:
                raise StoreError(
                    f"{name}: no tokenizer.json and no tokenizer.model in it; save a fast tokenizer there"
                )
            path = there[0]
        kind = {".model": "sentencepiece", ".tiktoken": "tiktoken"}.get(path.suffix, "tokenizers")
        return TokenizerFile(name, kind, path.read_bytes(), config)


@lru_cache(maxsize=1)
def _loaded(file: TokenizerFile) -> Tokenizer:
    """Cached: large vocabularies take seconds to load, and most processes have one."""
    return _maker_of(file)(file)


def _maker_of(file: TokenizerFile) -> Any:
    return named(TOKENIZERS, file.kind)
