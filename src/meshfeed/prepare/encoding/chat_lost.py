"""What of a conversation is not in its text: refused by name, since it would be lost without a word. Pure.

`Noted` messages know which of their keys a template has read; what they say is then looked for in the text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from meshfeed.errors import StoreError
from meshfeed.prepare.inputs.conversation import NOTHING, REASONING, Arguments, Conversation, texts_of

_PLUMBING = {"role", "content", "tool_call_id", "id", "type", "index"}
"""Keys of messages that need not be in the text."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""What templates print by their name."""


class Noted(dict[str, Any]):
    """An object that knows which of its keys a template has read, as do the objects in it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__((name, _noted(value)) for name, value in given.items())
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:  # without it, dict(...) would read past this class
        return iter([*super().keys()])

    def _whole(self) -> Noted:
        self.read |= {*super().keys()}
        return self

    def items(self) -> Any:
        return super(Noted, self._whole()).items()

    def values(self) -> Any:
        return super(Noted, self._whole()).values()

    def __repr__(self) -> str:
        return super(Noted, self._whole()).__repr__()

    def unread(self) -> Iterator[str]:
        """The keys, here and in objects that were read, whose values nobody has read and which have one."""
        for name, value in super().items():
            if name in self.read:
                for each in cast(list[Any], value) if isinstance(value, list) else [value]:
                    inside = each.unread() if isinstance(each, Noted) else ()
                    yield from (key for key in inside if key != "name")  # a call's may be within its id
            elif value not in NOTHING:
                yield name


class _NotedArguments(Noted, Arguments):
    pass


def _noted(value: Any) -> Any:
    if isinstance(value, list):
        return [_noted(each) for each in cast(list[Any], value)]
    if isinstance(value, dict):
        return (_NotedArguments if isinstance(value, Arguments) else Noted)(cast(dict[str, Any], value))
    return value


def refuse_unread(
    talk: Conversation, messages: Sequence[Noted], names: set[str], ignore: Sequence[str]
) -> None:
    """Refuse what neither the template nor prepare has read. names: variables that the template reads."""
    known = _PLUMBING.union(ignore)
    if any(message.read & {*REASONING} for message in messages):
        known |= {*REASONING}  # those of an earlier answer may be dropped, whatever its branch reads
    else:
        known |= {*REASONING[1:]}
    unread = {
        name: f"message {k} ({dict.get(message, 'role')}) has {name!r}"
        for k, message in reversed([*enumerate(messages)])
        for name in {*message.unread()} - known
        if (dict.get(message, "role"), name) != ("tool", "name")  # that of the call
    }
    unread |= {name: f"the record has {name!r}" for name in talk.unread if name not in ignore}
    unread |= {
        name: f"the record has {name!r}"
        for name, value in talk.given.items()
        if value is not None and name not in names and name not in ignore
    }
    if unread:
        keys = sorted({*ignore, *unread})
        raise StoreError(
            f"{', '.join(unread[name] for name in sorted(unread))}: nothing reads that, so it would be "
            f"lost; if that is right, give ignore={keys} (--ignore-keys {','.join(keys)})"
        )


def refuse_unknown_roles(source: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse roles that many templates print like any other, so that what they say bears no loss.

    source: of the template.
    """
    for k, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES and not any(f"{mark}{role}{mark}" in source for mark in "'\""):
            raise StoreError(
                f"message {k}: role {role!r} is none of {', '.join(_ROLES)}, and the template does not name "
                f"it; rename it, and make a call a message of the assistant with tool_calls"
            )


def refuse_printed_parts(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse content in parts that a template, which knows of text alone, prints as Python or JSON would."""
    for k, message in enumerate(messages):
        parts = message["content"]
        for each in [parts, *cast(list[Any], parts)] if isinstance(parts, list) and parts else []:
            if isinstance(each, list | dict) and (str(each) in text or _as_json(each) in text):
                raise StoreError(
                    f"message {k} ({message['role']}): its content is a list of parts, which this template "
                    f"does not support; join them to one text"
                )


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def refuse_lost(
    messages: Sequence[Mapping[str, Any]], loss: Mapping[int, str], text: str, ignore: Sequence[str]
) -> None:
    """Refuse a message of which the template prints nothing: its text, thoughts or call would be lost.

    loss: what bears it, of messages that do. Thoughts matter in these alone: templates that know of them
    drop earlier ones.
    """
    found = [[(key, said.strip()) for key, said in texts_of(each)] for each in messages]
    contents = "\0".join(said for each in found for key, said in each if key == "content")

    def refuse(k: int, key: str) -> NoReturn:
        cure = f", or give ignore=[{key!r}] (--ignore-keys {key})" * (key == REASONING[0])
        raise StoreError(
            f"message {k} ({messages[k]['role']}): the template does not print its {key}, so it would be "
            f"lost; use a template that does{cure}"
        )

    for k, pieces in enumerate(found):
        for (key, said), times in Counter(each for each in pieces if each[1]).items():
            if key == REASONING[0] and (key in ignore or k not in loss):
                continue
            if key == "tool_calls" and key in ignore and messages[k]["content"]:
                continue
            if not _is_printed(key, said, loss.get(k, text), times):
                refuse(k, key)
    for k, pieces in enumerate(found):
        for said in {said for key, said in pieces if key == "content" and said}:
            if not _is_printed("content", said, text, contents.count(said)):  # it is only part of another's
                refuse(k, "content")


def _is_printed(key: str, said: str, where: str, times: int) -> bool:
    # templates quote what a call is given in many ways
    pieces = re.split(r"[\"'\\\s]+", said) if key == "tool_calls" else [said]
    return where.count(_as_json(said)[1:-1]) >= times or all(where.count(each) >= times for each in pieces)
