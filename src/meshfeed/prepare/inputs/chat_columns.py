"""Shapes of a conversation in a record: messages, a prompt and a completion, or Alpaca's columns. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from meshfeed.errors import StoreError
from meshfeed.formats.jsonl import value_in
from meshfeed.prepare.inputs.conversation import TRAINED, Conversation, conversation, parts_in

CHAT_KEYS = ("messages", "conversations", "conversation")
"""Columns of a list of messages; the first that a record has counts."""
_ANSWERS = {
    "prompt": ("completion", "response"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
    "inputs": ("targets",),
}
"""Column of a question -> columns of its answer, where there is no list of messages."""
_INPUTS = ("input", "context")
"""What Alpaca and Dolly have an instruction applied to; it follows the instruction, on a line of its own."""


@dataclass(frozen=True, slots=True)
class ChatColumns:
    """How records are read as conversations.

    Attributes:
        column: of the messages; None for the usual shapes.
        ignore: columns that are not read.
    """

    column: str | None = None
    ignore: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of which a record has one."""
        answers = dict.fromkeys(name for names in _ANSWERS.values() for name in names)
        return (*CHAT_KEYS, *answers) if self.column is None else (self.column,)

    def wanted(self, there: Sequence[str]) -> list[str]:
        """Those of a table's columns that are read: what no template reads is refused by name."""
        return [name for name in there if name not in self.ignore]

    def value(self, record: Mapping[str, Any]) -> Conversation:
        """The conversation of a record of text alone. Raises StoreError."""
        talk = conversation(*self.parted(record))
        for k, message in enumerate(talk.messages):
            for kind in parts_in(message):
                raise StoreError(
                    f"message {k} ({message['role']}): {kind}, which would be lost; prepare it by Multimodal "
                    f"(--multimodal)"
                )
        return talk

    def parted(self, record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The messages of a record in any shape, and its other columns. Raises StoreError."""
        beside = {name: record[name] for name in self.wanted([*record]) if record[name] is not None}
        names = CHAT_KEYS if self.column is None else (self.column,)
        if name := next((name for name in names if name in beside), None):
            return beside.pop(name), beside
        for question, answers in _ANSWERS.items() if self.column is None else ():
            answer = next((name for name in answers if name in beside), None)
            if question in beside and answer is not None:
                asked, said = beside.pop(question), beside.pop(answer)
                for name in _INPUTS if question == "instruction" and isinstance(asked, str) else ():
                    more = beside.pop(name, "")
                    if not isinstance(more, str):
                        raise StoreError(f"{name!r} is {type(more).__name__}; text belongs there")
                    asked = "\n".join(text for text in (asked, more) if text)
                return [*_unless_said(asked), *_as_messages(said, "assistant")], beside
        for question, answers in _ANSWERS.items() if self.column is None else ():
            nulls = [name for name in (question, *answers) if name in record and record[name] is None]
            if nulls and any(name in beside for name in (question, *answers)):
                raise StoreError(
                    f"{' and '.join(map(repr, nulls))} without a value; a question and its answer belong "
                    f"together: leave the record out"
                )
        return value_in(beside, names, lambda: "the record"), beside  # raises


def conversation_of(value: Any) -> Conversation:
    """The conversation of an object in any shape, or of a list of messages. Raises StoreError."""
    if isinstance(value, Conversation):
        return value
    if isinstance(value, dict):
        return ChatColumns().value(cast(dict[str, Any], value))
    return conversation(value, {})


def _as_messages(value: Any, role: str) -> list[Any]:
    """A prompt or a completion: messages already, also as JSON text, or the text of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            found = json.loads(value)
            if found and all(isinstance(each, dict) and "role" in each for each in found):
                return found
    return cast(list[Any], value) if isinstance(value, list) else [{"role": role, "content": value}]


def _unless_said(prompt: Any) -> list[Any]:
    """The messages of a prompt, which bear no loss unless they say so."""
    return [
        {**cast(dict[str, Any], each), "weight": 0} if isinstance(each, dict) and not _says(each) else each
        for each in _as_messages(prompt, "user")
    ]


def _says(message: Any) -> bool:
    """Whether a message says if it bears loss; null says nothing."""
    return any(message.get(name) is not None for name in TRAINED)
