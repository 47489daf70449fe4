"""Built-in tokenizers: UTF-8 bytes, and those of three libraries."""

from __future__ import annotations

import base64
import contextlib
import importlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Array
from meshfeed.errors import StoreError
from meshfeed.extras import install
from meshfeed.formats.quick_bpe import quick_bpe
from meshfeed.store.tokenizer import END, TIKTOKEN, Tokenizer, TokenizerFile


class Bytes(Tokenizer):
    """UTF-8, byte by byte."""

    vocab_size = 256

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def id_of(self, token: str) -> int | None:
        raw = token.encode()
        return raw[0] if len(raw) == 1 else None


def fast_tokenizer(file: TokenizerFile) -> Any:
    """A `tokenizers.Tokenizer`, which neither pads nor truncates. Raises StoreError."""
    package = _package("tokenizers", file.name)
    with _made(file.name, "give a JSON file as `tokenizers` saves it"):
        found = package.Tokenizer.from_buffer(file.content)
        found.no_padding()
        found.no_truncation()
        return found


def _end_named(file: TokenizerFile) -> Any:
    """The token that tokenizer_config.json says ends a document; None if it says none."""
    end = file.settings.get("eos_token")
    return cast(dict[str, Any], end).get("content") if isinstance(end, dict) else end


class Fast(Tokenizer):
    """A tokenizer of the package `tokenizers`."""

    def __init__(self, file: TokenizerFile) -> None:
        super().__init__(file)
        self._own = fast_tokenizer(file)
        self._quick = quick_bpe(file.content, self._own)
        self.vocab_size = 1 + max(self._own.get_vocab(with_added_tokens=True).values(), default=-1)
        end = _end_named(file)
        if end is None and [each.content for each in self._own.get_added_tokens_decoder().values()] == [END]:
            end = END
        self.end = None if end is None else self.id_of(end)

    def encode(self, texts: Sequence[str]) -> list[Array]:
        found = [None if self._quick is None else self._quick.encode(text) for text in texts]
        rest = [text for text, tokens in zip(texts, found) if tokens is None]
        others = iter(self._own.encode_batch_fast(rest, add_special_tokens=False))
        return [np.array(next(others).ids, np.int64) if each is None else each for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._own.decode(list(tokens), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self._own.token_to_id(token)


class SentencePiece(Tokenizer):
    """A tokenizer of the package `sentencepiece`."""

    def __init__(self, file: TokenizerFile) -> None:
        super().__init__(file)
        package = _package("sentencepiece", file.name)
        self._own: Any = package.SentencePieceProcessor()
        with _made(file.name, "give a .model as sentencepiece trains it"):
            self._own.LoadFromSerializedProto(file.content)
        self.vocab_size = int(self._own.get_piece_size())
        self.end = int(self._own.eos_id()) if self._own.eos_id() >= 0 else None
        if (end := _end_named(file)) is not None:
            self.end = self.id_of(end)

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [np.array(ids, np.int64) for ids in self._own.encode(list(texts), out_type=int)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._own.decode([int(token) for token in tokens])

    def id_of(self, token: str) -> int | None:
        found = int(self._own.piece_to_id(token))
        return found if self._own.id_to_piece(found) == token else None


class Tiktoken(Tokenizer):
    """An encoding of the package `tiktoken`, or ranks from a file with the pattern of an encoding."""

    def __init__(self, file: TokenizerFile) -> None:
        super().__init__(file)
        package = _package("tiktoken", file.name)
        with _made(file.name, "give tiktoken:ENCODING that it knows, or a file of ranks"):
            if file.content:
                self._own: Any = package.Encoding(**_ranks(file))
            else:
                self._own = package.get_encoding(file.name.removeprefix(TIKTOKEN))
        self.vocab_size = int(self._own.max_token_value) + 1
        self.end = self.id_of("<|endoftext|>")

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [np.array(self._own.encode_ordinary(text), np.int64) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._own.decode([int(token) for token in tokens])

    def id_of(self, token: str) -> int | None:
        with contextlib.suppress(KeyError):
            return int(self._own.encode_single_token(token))
        return None


_ENDINGS = r"'(?i:[sdmt]|ll|ve|re)"
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    _ENDINGS
    + r"""|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PATTERNS = {"gpt2": _GPT2, "r50k_base": _GPT2, "cl100k_base": _CL100K, "o200k_base": _O200K}
"""Encoding -> pattern that cuts text into words; a file of ranks does not have it."""


def _ranks(file: TokenizerFile) -> dict[str, Any]:
    encoding = Path(file.name).stem.rpartition(".")[2]
    if encoding not in _PATTERNS:
        raise StoreError(
            f"{file.name}: its ranks do not say how text is cut into words; call it NAME.ENCODING.tiktoken, "
            f"with the encoding that it was trained for: {', '.join(_PATTERNS)}"
        )
    pairs = (line.split() for line in file.content.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    # OpenAI's own files leave an id out before the end.
    end = {100_256: 100_257, 199_998: 199_999}.get(len(ranks), max(ranks.values(), default=-1) + 1)
    return {
        "name": file.name,
        "pat_str": _PATTERNS[encoding],
        "mergeable_ranks": ranks,
        "special_tokens": {"<|endoftext|>": end},
    }


def _package(name: str, tokenizer: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise StoreError(
            f"{tokenizer}: a tokenizer needs the package {name}: {install('prepare')}"
        ) from missing


@contextlib.contextmanager
def _made(name: str, hint: str) -> Generator[None, None, None]:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # tokenizers raises Exception itself, the others various types
        raise StoreError(f"{name}: no tokenizer: {' '.join(str(error).split())}; {hint}") from error
