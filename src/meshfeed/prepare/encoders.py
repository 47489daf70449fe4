"""Values of a column -> columns of tokens: the one place where preparing text and chats differ."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import PrepareError, StoreError
from meshfeed.prepare.chat import ChatEncoder, TrainOn
from meshfeed.prepare.records import Columns
from meshfeed.store.indexed_writer import best_dtype
from meshfeed.store.tokenizer import BYTES, Tokenizer
from meshfeed.store.tokens import Column, Where

TRAINED = "tokenizer.json"
"""What a tokenizer that was trained for a job is called."""
END = "<|endoftext|>"
"""What ends a document there."""
DTYPES = ("uint8", "uint16", "int32")


class Encoder(Protocol):
    """Makes documents of values."""

    @property
    def columns(self) -> Mapping[str, np.dtype[Any]]:
        """Of what comes out: name -> dtype; "tokens" is one."""
        ...

    def encode(self, values: Sequence[Any], where: Where) -> list[Mapping[str, Array]]:
        """Each value's columns, [n] each. Raises StoreError, at its `where`, for one that has none."""
        ...


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Text, or lists of tokens, as documents of one column.

    Attributes:
        column: which one it is in a record, and its tokenizer.
        columns: see Encoder.
        end: the token after each document; None for none.
    """

    column: Column
    columns: Mapping[str, np.dtype[Any]]
    end: int | None

    def encode(self, values: Sequence[Any], where: Where) -> list[Mapping[str, Array]]:
        """See Encoder."""
        dtype = self.columns["tokens"]
        end = np.array([] if self.end is None else [self.end], dtype)
        found = self.column.encoded(values, where)
        most = -1 if self.column.is_text else np.iinfo(dtype).max  # of text, all fit
        for i, tokens in enumerate(found if most >= 0 else ()):
            if tokens.max(initial=0) > most:
                raise StoreError(
                    f"{where(i)}: token {tokens.max()}, which {dtype.name} cannot hold; take a wider --dtype"
                )
        return [{"tokens": np.concatenate((tokens, end), dtype=dtype, casting="unsafe")} for tokens in found]


class Encoding(Protocol):
    """How records become tokens, before anything is loaded: `Text` or `Chats`."""

    @property
    def columns(self) -> Columns:
        """What to take of a record."""
        ...

    @property
    def train_bpe(self) -> int | None:
        """Size of the vocabulary of a tokenizer to train on the inputs; None for none."""
        ...

    def told(self) -> dict[str, Any]:
        """All that decides the tokens, as JSON-able values; "kind" is one of `_KINDS`.

        Raises StoreError, PrepareError where it cannot be.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text, or lists of tokens.

    Attributes:
        tokenizer: of text, as `store.tokenizer.KNOWN` says; None where the column is lists of tokens.
        train_bpe: see Encoding; instead of a tokenizer.
        column: of JSON lines and Parquet; None for "text", or, of token lists, "tokens" or "input_ids".
        eod: the token that ends each document, as text or number; True for the tokenizer's own.
        dtype: of the tokens: "uint8", "uint16" or "int32"; "auto" for the narrowest that holds them all.
    """

    tokenizer: str | None = None
    train_bpe: int | None = None
    column: str | None = None
    eod: str | bool = False
    dtype: str = "auto"

    @property
    def columns(self) -> Columns:
        """See Encoding."""
        is_text = self.tokenizer is not None or self.train_bpe is not None
        return Columns(Column(self.column, BYTES if is_text else None).names)

    def told(self) -> dict[str, Any]:
        """See Encoding."""
        shared = {"kind": "text", "column": self.column, "eod": self.eod, "dtype": self.dtype}
        if self.train_bpe is not None:
            if self.tokenizer is not None:
                raise PrepareError("both a tokenizer and one to train; give one of them")
            return shared | {"train_bpe": self.train_bpe}
        column = Column(self.column, _absolute(self.tokenizer))
        text_encoder(column, eod=self.eod, dtype=self.dtype)  # or it is refused now
        return shared | {"tokenizer": column.tokenizer, "digest": _digest(column, self.eod)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Conversations: tokens and a loss mask, by a tokenizer's chat template; see `chat.ChatEncoder`.

    Attributes:
        tokenizer: a transformers directory, or a tokenizers JSON file with a template.
        template: a file to take instead of the tokenizer's own template.
        train_on: "assistant" for all its messages, "last" for the last one.
        date: that a template is told which asks for today's; None lets it do without, or refuses it.
        column: of JSON lines and Parquet; None for "messages" or "conversation", and "tools" beside them.
        dtype: see Text.
    """

    tokenizer: str
    template: str | None = None
    train_on: TrainOn = "assistant"
    date: datetime.date | None = None
    column: str | None = None
    dtype: str = "auto"
    train_bpe: int | None = field(default=None, init=False)

    @property
    def columns(self) -> Columns:
        """See Encoding."""
        names = ("messages", "conversation") if self.column is None else (self.column,)
        return Columns(names, beside=("tools",), called="messages")

    def told(self) -> dict[str, Any]:
        """See Encoding."""
        told = {
            "kind": "chat",
            "column": self.column,
            "tokenizer": _absolute(self.tokenizer),
            "template": _absolute(self.template),
            "train_on": self.train_on,
            "date": None if self.date is None else self.date.isoformat(),
            "dtype": self.dtype,
        }
        return told | {"digest": _chat_encoder(told).digest}


def encoder_of(told: Mapping[str, Any], folder: Path) -> Encoder:
    """The encoder that a job describes. Raises StoreError, PrepareError.

    told: see `Encoding.told`. folder: of the job, with the tokenizer that was trained for it, if one was.
    """
    kind = _KINDS.get(told["kind"])
    if kind is None:
        raise PrepareError(f"encoder {told['kind']!r}: unknown; this meshfeed is older than the job")
    return kind(told, folder)


def columns_of(told: Mapping[str, Any]) -> Columns:
    """What an encoding takes of a record."""
    names = {"kind", "digest"}
    given = {name: value for name, value in told.items() if name not in names}
    return (Chats if told["kind"] == "chat" else Text)(**given).columns


def _text(told: Mapping[str, Any], folder: Path) -> Encoder:
    trained = told.get("train_bpe") is not None
    column = Column(told["column"], str(folder / TRAINED) if trained else told["tokenizer"])
    if not trained:
        _refuse_changed(told, _digest(column, told["eod"]))
    eod = END if trained and told["eod"] is True else told["eod"]
    return text_encoder(column, eod=eod, dtype=told["dtype"])


def _chat(told: Mapping[str, Any], folder: Path) -> Encoder:
    encoder = _chat_encoder(told)
    _refuse_changed(told, encoder.digest)
    return encoder


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Path], Encoder]] = {"text": _text, "chat": _chat}


def _chat_encoder(told: Mapping[str, Any]) -> ChatEncoder:
    dtype = None if told["dtype"] == "auto" else told["dtype"]
    date = None if told["date"] is None else datetime.date.fromisoformat(told["date"])
    made = ChatEncoder(told["tokenizer"], told["template"], train_on=told["train_on"], dtype=dtype, date=date)
    made.check()
    return made


def _digest(column: Column, eod: str | bool) -> str:
    """All that decides tokens; the own end too, which tokenizer_config.json beside the tokenizer names."""
    own = eod is True and column.is_text
    return f"{column.digest} end {column.encoder.end}" if own else column.digest


def _refuse_changed(told: Mapping[str, Any], digest: str) -> None:
    if digest != told["digest"]:
        raise PrepareError(
            f"{told['tokenizer']}: has changed since this job began; restore it, or start over with "
            f"--overwrite"
        )


def _absolute(name: str | None) -> str | None:
    """A tokenizer's name, the same for a worker that stands elsewhere."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def text_encoder(column: Column, *, eod: str | bool, dtype: str) -> TextEncoder:
    """How text becomes tokens.

    eod: the token that ends each document, as text or number; True for the tokenizer's own, False for none.
    dtype: of the tokens, one of DTYPES; "auto" for the narrowest that Megatron reads, or bytes.

    Raises PrepareError for a tokenizer that has no such token, or more of them than the dtype holds;
    StoreError for one that cannot be loaded.
    """
    column.check()
    end = None if eod is False else _end(column, eod)
    vocab_size = max(column.encoder.vocab_size if column.is_text else 0, 0 if end is None else end + 1)
    if dtype == "auto":
        known = best_dtype(vocab_size if column.is_text else None)
        narrow = np.dtype(np.uint8) if column.is_text and vocab_size <= 256 else known
        return TextEncoder(column, {"tokens": narrow}, end)
    if dtype not in DTYPES:
        raise PrepareError(f"--dtype {dtype}: unknown; it is auto, {', '.join(DTYPES)}")
    chosen = np.dtype(dtype)
    holds = np.iinfo(chosen).max + 1
    if vocab_size > holds:
        raise PrepareError(
            f"{column.tokenizer or '--eod-token'}: {vocab_size} tokens, of which {dtype} holds {holds}; take "
            f"a wider --dtype, or auto"
        )
    return TextEncoder(column, {"tokens": chosen}, end)


def hash_of(value: Any) -> bytes:
    """128 bits that tell a document from every other, by its text."""
    told = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=16).digest()


def _end(column: Column, eod: str | bool) -> int:
    if not column.is_text:
        if isinstance(eod, str) and eod.isdecimal():
            return int(eod)
        raise PrepareError("the token that ends a document: lists of tokens want its number: --eod-token 0")
    tokenizer: Tokenizer = column.encoder
    if eod is True:
        end = 256 if column.tokenizer == BYTES else tokenizer.end
        if end is None:
            raise PrepareError(
                f"{column.tokenizer}: does not say which token ends a document; name it by --eod-token"
            )
        return end
    end = tokenizer.id_of(str(eod))
    if end is None and str(eod).isdecimal():
        end = int(str(eod))
    if end is None or end >= tokenizer.vocab_size:
        raise PrepareError(f"{column.tokenizer}: has no token {eod!r} to end documents with; look at its own")
    return end
