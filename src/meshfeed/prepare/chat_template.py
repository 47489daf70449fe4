"""A chat template: messages -> text, and which of its characters the model is to say.

Templates are what tokenizers bring along: jinja2, sandboxed, in the dialect that transformers gives them.
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from meshfeed.errors import StoreError
from meshfeed.extras import install

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates, where there are several."""
MOST_CHARACTERS = 16 << 20
"""Of a conversation's text: tokenizing it takes a hundred times as much memory."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around what a template says to be generated. Unicode reserves both for such use: no text has them."""
_NOW = "strftime_now"
_OPEN_NAME, _CLOSE_NAME = "meshfeed_open", "meshfeed_close"


class ChatTemplate:
    """A compiled template.

    Args:
        source: in jinja2.
        variables: what it may name beside the messages, such as bos_token; JSON values.
        where: what messages call it.
        date: what `strftime_now` tells; None leaves that undefined, and many templates then have a date of
            their own. The day on which a conversation is prepared must not decide its tokens.

    Attributes:
        has_blocks: whether it says by {% generation %} blocks what is generated.

    All methods raise StoreError.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any], where: str, date: datetime.date | None
    ) -> None:
        self._source, self._variables, self._where, self._date = source, dict(variables), where, date

    def check(self) -> None:
        """Compile it."""
        _ = self._compiled

    @property
    def has_blocks(self) -> bool:
        """Whether the template has {% generation %} blocks."""
        return self._compiled[1]

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """All messages as one text. prompt: followed by what comes before the assistant's next message."""
        return self._rendered(messages, tools, prompt, "", "")

    def blocks(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> Spans:
        """Begin and end, in characters of `text`, of each {% generation %} block in it that is not empty."""
        if _OPEN in text or _CLOSE in text:
            raise StoreError("the text has a character that Unicode keeps for programs (U+FDD0); remove it")
        marked = self._rendered(messages, tools, False, _OPEN, _CLOSE)
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
                f"{self._where}: what it does to the text of a generation block changes with where the block "
                f"ends; put {{% generation %}} next to what is printed"
            )
        return spans

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool, *marks: str
    ) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        named = dict(zip((_OPEN_NAME, _CLOSE_NAME), marks))
        compiled, _ = self._compiled
        try:
            return _bounded(compiled.generate(**{**self._variables, **given, **named}))
        except MemoryError:
            raise StoreError(f"{self._where}: takes too much memory; use another template") from None
        except Exception as error:  # whatever a template stumbles over in foreign messages
            hint = (
                "; it asks for today's date: say by date= (--chat-date) which one"
                if _NOW in str(error)
                else ""
            )
            raise StoreError(f"{self._where}: {error or type(error).__name__}{hint}") from error

    @cached_property
    def _compiled(self) -> tuple[Any, bool]:
        environment = _environment(self._where, self._date)
        try:
            return environment.from_string(self._source), environment.has_blocks
        except environment.jinja.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise StoreError(
                f"{self._where}{f', line {line}' if line else ''}: not a template: {error}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}


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
