"""Conversations -> their text by a chat template, and what of it the assistant says.

There are no arrays and no tokens: a process of its own runs this; see `confined`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from meshfeed.errors import StoreError
from meshfeed.prepare.chat_template import DEFAULT, WITH_TOOLS, ChatTemplate, Message, Spans

Tools = list[Any] | None

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text.

    Attributes:
        spans: what the assistant says in it: begin and end in characters, ascending.
        trims: whether white space after a span's last special token is left out of it.
    """

    text: str
    spans: Spans
    trims: bool


@dataclass(frozen=True, slots=True)
class Conversations:
    """How conversations become text.

    Attributes:
        templates: by name.
        last_only: whether only the assistant's last message counts as said.
        path: of the tokenizer, as messages show it.
    """

    templates: Mapping[str, ChatTemplate]
    last_only: bool
    path: str

    def check(self) -> None:
        """Compile the templates. Raises StoreError."""
        for template in self.templates.values():
            template.check()

    def render(self, value: Any) -> Rendered:
        """The text of a conversation. Raises StoreError."""
        messages, tools = _conversation_of(value)
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise StoreError("no message of the assistant, so nothing bears loss; leave it out")
        if self.last_only:
            turns = turns[-1:]
        template = self._template_for(tools)
        text = _whole(template, messages, tools)
        _refuse_printed_parts(messages, text)
        if not template.has_blocks:
            return Rendered(text, [_added(template, messages, tools, k, text) for k in turns], trims=True)
        blocks, earlier = template.blocks(messages, tools, text), 0
        if self.last_only and turns[0]:
            before = messages[: turns[0]]
            earlier = len(template.blocks(before, tools, template.text(before, tools)))
        return Rendered(text, blocks[earlier:], trims=False)

    def _template_for(self, tools: Sequence[Any] | None) -> ChatTemplate:
        name = WITH_TOOLS if tools and WITH_TOOLS in self.templates else DEFAULT
        if name not in self.templates:
            raise StoreError(f"{self.path}: no template {name!r} among {', '.join(self.templates)}")
        return self.templates[name]


def _whole(template: ChatTemplate, messages: list[Message], tools: Tools) -> str:
    """The text of all messages. Raises StoreError that names the first message from which on it has none."""
    try:
        return template.text(messages, tools)
    except StoreError as error:
        sound = range(len(messages) - 1, 0, -1)
        k = next((k for k in sound if _can(template, messages[:k], tools)), 0)
        raise StoreError(f"message {k} ({messages[k]['role']}): {error}") from error


def _refuse_printed_parts(messages: list[Message], text: str) -> None:
    """Refuse content in parts that a template, which knows of text alone, prints as Python would."""
    for k, message in enumerate(messages):
        parts = message.get("content")
        if isinstance(parts, list) and str(cast(list[Any], parts)) in text:
            raise StoreError(
                f"message {k} ({message['role']}): its content is a list of parts, which this template "
                f"does not support; join them to one text"
            )


def _can(template: ChatTemplate, messages: list[Message], tools: Tools) -> bool:
    try:
        template.text(messages, tools)
    except StoreError:
        return False
    return True


def _added(
    template: ChatTemplate, messages: list[Message], tools: Tools, k: int, text: str
) -> tuple[int, int]:
    """What message k adds to the text before it, in characters."""
    try:
        prompt = template.text(messages[:k], tools, prompt=True)
        turn = template.text(messages[: k + 1], tools)
    except StoreError as error:
        raise StoreError(
            f"message {k} (assistant): cannot be rendered without what follows: {error}"
        ) from error
    if not (turn.startswith(prompt) and text.startswith(turn)):
        apart = "the text before it" if not turn.startswith(prompt) else "its text, once messages follow,"
        raise StoreError(
            f"message {k} (assistant): {apart} is another, so the template does not show what the "
            f"assistant says; give a template with {{% generation %}} blocks, or a conversation for each "
            f"answer and train_on='last'"
        )
    return len(prompt), len(turn)


def _conversation_of(value: Any) -> tuple[list[Message], Tools]:
    """Checked messages, as the template sees them, and tools."""
    tools = None
    if isinstance(value, dict):
        given = dict(cast(dict[str, Any], value))
        tools = given.pop("tools", None)
        value = next(iter(given.values())) if len(given) == 1 else given.get("messages")
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise StoreError(f"{found} where a list of messages belongs")
    if not isinstance(tools, list | None):
        raise StoreError(f"tools are {type(tools).__name__}; a list of JSON schemas belongs there")
    return [_message(k, message) for k, message in enumerate(cast(list[Any], value))], tools or None


def _message(k: int, given: Any) -> Message:
    if not isinstance(given, dict):
        raise StoreError(f"message {k}: {type(given).__name__} where an object with role and content belongs")
    # As transformers has it: null is as if the key were not there, and thoughts go by several names.
    message = {name: value for name, value in cast(dict[str, Any], given).items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise StoreError(
            f"message {k}: its role is {role!r}, found keys {', '.join(map(repr, given))}; it needs a role"
        )
    thoughts = next((message[name] for name in _REASONING if name in message), None)
    if content is None and thoughts is None and not message.get("tool_calls"):
        raise StoreError(f"message {k} ({role}): no content; found keys {', '.join(map(repr, given))}")
    if not isinstance(content, str | list | None):
        raise StoreError(f"message {k} ({role}): content is {type(content).__name__}; text belongs there")
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}
