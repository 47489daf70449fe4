"""Conversations -> their text by a chat template, and the spans that the assistant says.

Templates come with tokenizers: jinja2, sandboxed, in the dialect of transformers. There are no arrays and no
tokens here, because a separate process runs it; see `chat_process`.
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from meshfeed.errors import StoreError
from meshfeed.extras import install
from meshfeed.prepare.inputs.sharegpt import with_role

Message = Mapping[str, Any]
Tools = list[Any] | None
Spans = list[tuple[int, int]]

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates, if there are several."""
MOST_CHARACTERS = 16 << 20
"""Limit of a conversation's text: tokenizing it takes a hundred times as much memory."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around what a template says to be generated. Unicode reserves both for such use: no text has them."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_NOW = "strftime_now"
_OPEN_NAME, _CLOSE_NAME = "meshfeed_open", "meshfeed_close"


@dataclass(frozen=True)
class ChatTemplate:
    """A template, compiled when it is first used.

    Attributes:
        source: in jinja2.
        variables: further names for it, such as bos_token; JSON values.
        where: what messages call it.
        date: for `strftime_now`; None leaves that undefined, and many templates then use a fixed date. The
            day on which a conversation is prepared must not decide its tokens.

    All methods raise StoreError.
    """

    source: str
    variables: Mapping[str, Any]
    where: str
    date: datetime.date | None

    def check(self) -> None:
        """Compile it."""
        _ = self._compiled

    @property
    def has_blocks(self) -> bool:
        """Whether the template has {% generation %} blocks."""
        return self._compiled[1]

    def text(
        self,
        messages: list[Message],
        tools: Tools,
        *,
        prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """All messages as one text.

        prompt: followed by what comes before the assistant's next message. marks: put around what is in
        {% generation %} blocks.
        """
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        named = dict(zip((_OPEN_NAME, _CLOSE_NAME), marks))
        compiled, _ = self._compiled
        try:
            return _bounded(compiled.generate(**{**self.variables, **given, **named}))
        except MemoryError:
            raise StoreError(f"{self.where}: takes too much memory; use another template") from None
        except Exception as error:  # a template may fail in any way on foreign messages
            asks = "; it uses today's date: give one as date= (--chat-date)"
            hint = asks if _NOW in str(error) else ""
            raise StoreError(f"{self.where}: {error or type(error).__name__}{hint}") from error

    def blocks(self, messages: list[Message], tools: Tools, text: str) -> Spans:
        """Begin and end, in characters of `text`, of each {% generation %} block in it that is not empty."""
        if _OPEN in text or _CLOSE in text:
            raise StoreError("the text has a character that Unicode keeps for programs (U+FDD0); remove it")
        marked = self.text(messages, tools, marks=(_OPEN, _CLOSE))
        spans: Spans = []
        at = begin = depth = 0
        for part in re.split(f"([{_OPEN}{_CLOSE}])", marked):
            if part == _OPEN:
                begin, depth = begin if depth else at, depth + 1
            elif part == _CLOSE:
                depth -= 1
                if not depth and begin < at:
                    spans.append((begin, at))
            else:
                at += len(part)
        whole = marked.replace(_OPEN, "").replace(_CLOSE, "")
        if whole != text or depth:
            raise StoreError(
                f"{self.where}: what it does to the text of a generation block changes with where the block "
                f"ends; put {{% generation %}} next to what is printed"
            )
        return spans

    @cached_property
    def _compiled(self) -> tuple[Any, bool]:
        environment = _environment(self.where, self.date)
        try:
            return environment.from_string(self.source), environment.has_blocks
        except environment.jinja.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise StoreError(
                f"{self.where}{f', line {line}' if line else ''}: not a template: {error}"
            ) from error


def _bounded(pieces: Iterator[str]) -> str:
    found, size = list[str](), 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > MOST_CHARACTERS:
            raise ValueError(f"its text has more than {MOST_CHARACTERS:,} characters; leave it out")
    return "".join(found)


def _environment(where: str, date: datetime.date | None) -> Any:
    """jinja2's sandbox, with what transformers adds to it."""
    try:
        jinja = importlib.import_module("jinja2")
        sandbox = importlib.import_module("jinja2.sandbox")
        extension, nodes = importlib.import_module("jinja2.ext"), jinja.nodes
    except ImportError as missing:
        raise StoreError(f"{where}: chat templates need jinja2: {install('prepare')}") from missing

    class Generation(extension.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            """{% generation %}...{% endgeneration %}: what is inside, between two marks."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            self.environment.has_blocks = True
            marks = [nodes.Output([nodes.Name(name, "load")]) for name in (_OPEN_NAME, _CLOSE_NAME)]
            return nodes.Scope([marks[0], *body, marks[1]]).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja.TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extension.loopcontrols]
    )
    made.extend(has_blocks=False, jinja=jinja)
    made.filters["tojson"] = as_json
    made.globals["raise_exception"] = refuse
    if date is not None:
        made.globals[_NOW] = date.strftime
    return made


# -- conversations ----------------------------------------------------------------------------------------


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
    """Turns conversations into text.

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
        name = WITH_TOOLS if tools and WITH_TOOLS in self.templates else DEFAULT
        if name not in self.templates:
            raise StoreError(f"{self.path}: no template {name!r} among {', '.join(self.templates)}")
        template = self.templates[name]
        text = _whole(template, messages, tools)
        _refuse_printed_parts(messages, text)
        if not template.has_blocks:
            return Rendered(text, [_added(template, messages, tools, k, text) for k in turns], trims=True)
        blocks, earlier = template.blocks(messages, tools, text), 0
        if self.last_only and turns[0]:
            before = messages[: turns[0]]
            earlier = len(template.blocks(before, tools, template.text(before, tools)))
        return Rendered(text, blocks[earlier:], trims=False)


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
            f"answer and train_on='last' (--train-on last)"
        )
    _refuse_header(template, messages, tools, k, prompt, turn)
    return len(prompt), len(turn)


def _refuse_header(
    template: ChatTemplate, messages: list[Message], tools: Tools, k: int, prompt: str, turn: str
) -> None:
    """Refuse a template that prints a header before an answer, but not as its generation prompt.

    The header would bear loss. What such a prompt is followed by, as by an empty thought, is the answer's.
    """
    content = messages[k].get("content")
    if not isinstance(content, str) or not content.strip():
        return
    header, found, _ = turn[len(prompt) :].partition(content.strip())
    if found and header.strip() and template.text(messages[:k], tools) == prompt:
        raise StoreError(
            f"message {k} (assistant): the template prints {header!r} before what the assistant says, and "
            f"nothing for add_generation_prompt, so that would bear loss; print it there, too: "
            f"{{% if add_generation_prompt %}}{header}{{% endif %}}, or put {{% generation %}} around answers"
        )


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
    named = with_role(k, cast(dict[str, Any], given))
    message = {name: value for name, value in named.items() if value is not None}
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
