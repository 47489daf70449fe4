"""The encoding of a job: as the user gives it, and as job.json stores it."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfeed.errors import PrepareError
from meshfeed.prepare.encoding.chat import ChatEncoder, Chats
from meshfeed.prepare.encoding.multimodal import Multimodal, MultimodalEncoder
from meshfeed.prepare.encoding.text import TRAINED, Text, TextEncoder
from meshfeed.prepare.inputs.conversation import Conversation
from meshfeed.prepare.inputs.samples import Sample

Encoding = Text | Chats | Multimodal
"""How records become tokens; nothing is loaded yet."""
Encoder = TextEncoder | ChatEncoder | MultimodalEncoder
"""Turns values into documents."""


def encoding_of(request: Mapping[str, Any]) -> Encoding:
    """The encoding whose `request` this is."""
    given: dict[str, Any] = {name: value for name, value in request.items() if name not in ("kind", "digest")}
    if request["kind"] == "text":
        return Text(**given)
    if request["kind"] == "multimodal":
        text = encoding_of(given.pop("text"))
        if isinstance(text, Multimodal):
            raise PrepareError("a job of another version of meshfeed; start over with --overwrite")
        return Multimodal(text=text, **given)
    if given["date"] is not None:
        given["date"] = datetime.date.fromisoformat(given["date"])
    return Chats(**given)


def encoder_of(request: Mapping[str, Any], folder: Path) -> Encoder:
    """The encoder of a job. Its folder has the tokenizer if one was trained for it.

    Raises StoreError, and PrepareError if the tokenizer has changed.
    """
    encoder = encoding_of(request).encoder(folder / TRAINED)
    if encoder.digest != request.get("digest", encoder.digest):
        raise PrepareError(
            f"{request.get('text', request)['tokenizer']}: has changed since this job began; restore it, or "
            f"start over with --overwrite"
        )
    return encoder


def expanded(encoder: Encoder, value: Any) -> list[Any]:
    """The documents' values of a record's value: several where each answer of a chat becomes one."""
    inner = encoder.inner if isinstance(encoder, MultimodalEncoder) else encoder
    expands = isinstance(inner, ChatEncoder) and inner.how.train_on == "each"
    return value.each_answer() if expands else [value]


def hash_of(value: Any) -> bytes:
    """128 bits that identify a document by its text and its parts."""
    if isinstance(value, Sample | Conversation):
        value = value.key()
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
