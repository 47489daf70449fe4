"""Conversations -> their text by a chat template, and the spans that the assistant says.

Templates come with tokenizers: jinja2, sandboxed, in the dialect of transformers. There are no arrays and no
tokens here, because a separate process runs it; see `chat_process`.
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from meshfeed.errors import StoreError
from meshfeed.extras import install
from meshfeed.prepare.encoding.chat_lost import (
    Noted,
    refuse_lost,
    refuse_printed_parts,
    refuse_unknown_roles,
    refuse_unread,
)
from meshfeed.prepare.inputs.conversation import REASONING, Conversation, texts_of

Beside = Mapping[str, Any]
"""What a conversation gives its template beside the messages; see `Conversation.given`."""
TrainOn = Literal["all", "last", "each"]
Spans = list[tuple[int, int]]

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates, if there are several."""
MOST_CHARACTERS = 16 << 20
"""Limit of a conversation's text: tokenizing it takes a hundred times as much memory."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around what a template says to be generated. Unicode reserves both for such use: no text has them."""
_NOW, _THINKS = "strftime_now", "enable_thinking"
_EACH = 'make a conversation for each answer by train_on="each" (--train-on each)'
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
        _ = self._compiled

    @property
    def has_blocks(self) -> bool:
        return self._compiled[1]

    @property
    def reads(self) -> set[str]:
        """The variables that its source names."""
        return self._compiled[2]

    @cached_property
    def sound(self) -> set[Any]:
        """Shapes of conversations whose answers have nothing foreign around them; see `_refuse_foreign`."""
        return set()

    @cached_property
    def takes_parts_alone(self) -> bool:
        """Whether it prints content that is a list of parts, and no content that is text, as LLaVA's do."""
        word = "meshfeed"
        forms: tuple[Any, Any] = word, [{"type": "text", "text": word}]
        plain, parts = (_tried(self, [Noted({"role": "user", "content": each})], {}) for each in forms)
        return word in (parts or "") and word not in (plain or "")

    def text(
        self,
        messages: list[Noted],
        beside: Beside,
        *,
        prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """All messages as one text.

        prompt: followed by what comes before the assistant's next message. marks: put around what is in
        {% generation %} blocks.
        """
        given = {"messages": messages, "add_generation_prompt": prompt, **beside}
        named = dict(zip((_OPEN_NAME, _CLOSE_NAME), marks))
        compiled = self._compiled[0]
        try:
            return _bounded(compiled.generate(**{**self.variables, **given, **named}))
        except MemoryError:
            raise StoreError(f"{self.where}: takes too much memory; use another template") from None
        except Exception as error:  # a template may fail in any way on foreign messages
            asks = "; it uses today's date: give one as date= (--chat-date)"
            hint = asks if _NOW in str(error) else ""
            raise StoreError(f"{self.where}: {error or type(error).__name__}{hint}") from error

    def blocks(self, messages: list[Noted], beside: Beside) -> tuple[str, Spans]:
        """All messages as one text, and begin and end, in characters, of each {% generation %} block in it
        that is not empty."""
        marked = self.text(messages, beside, marks=(_OPEN, _CLOSE))
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
        return marked.replace(_OPEN, "").replace(_CLOSE, ""), spans

    @cached_property
    def _compiled(self) -> tuple[Any, bool, set[str]]:
        environment = _environment(self.where, self.date)
        try:
            names = environment.jinja.meta.find_undeclared_variables(environment.parse(self.source))
            return environment.from_string(self.source), environment.has_blocks, names
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
    importlib.import_module("jinja2.meta")
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
        train_on: see `Chats`; of "each", a conversation has one answer.
        ignore: keys of messages that may be lost.
        variables: names that the user has given all templates.
        end: see `Chats`.
        special: the tokenizer's special tokens, longer ones first.
        path: of the tokenizer, as messages show it.
    """

    templates: Mapping[str, ChatTemplate]
    train_on: TrainOn
    ignore: Sequence[str]
    variables: Sequence[str]
    end: Sequence[str]
    special: Sequence[str]
    path: str

    def check(self) -> None:
        """Compile the templates. Raises StoreError, also for a variable that none of them reads."""
        for template in self.templates.values():
            template.check()
        read = set[str]().union(*(template.reads for template in self.templates.values()))
        if unread := sorted({*self.variables} - read):
            raise StoreError(
                f"{self.path}: no chat template of it reads {', '.join(unread)}; leave it out of variables= "
                f"(--template-kwargs)"
            )

    def render(self, talk: Conversation) -> Rendered:
        """The text of a conversation. Raises StoreError."""
        messages, beside = [Noted(each) for each in talk.messages], {"documents": None, **talk.given}
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise StoreError("no message of the assistant, so nothing bears loss; leave it out")
        said = [k for k in turns[-1 if self.train_on == "last" else 0 :] if talk.trained[k] is not False]
        if not said:
            raise StoreError("its messages say that nothing of it is trained; leave it out")
        name = WITH_TOOLS if talk.given["tools"] and WITH_TOOLS in self.templates else DEFAULT
        if name not in self.templates:
            raise StoreError(f"{self.path}: no template {name!r} among {', '.join(self.templates)}")
        template = self.templates[name]
        if template.takes_parts_alone:
            talk = talk.in_parts()
            messages = [Noted(each) for each in talk.messages]
        refuse_unknown_roles(template.source, talk.messages)
        text = _whole(template, messages, beside)
        refuse_printed_parts(talk.messages, text)
        try:
            if template.has_blocks:
                spans = _blocks_of(template, messages, beside, text, None if said == turns else said)
            else:
                spans = [_added(template, messages, beside, k, text, self.special) for k in said]
        except StoreError as error:
            if self.train_on != "each":
                raise
            raise StoreError(str(error).replace(_EACH, "leave it out, or use another template")) from error
        if template.has_blocks and self.end:
            for k in said:
                if k < len(messages) - 1 and not any(text for _, text in texts_of(talk.messages[k])):
                    raise StoreError(f"message {k} (assistant): empty, and no block tells its end; remove it")
        pieces = [text[begin:end] for begin, end in spans]
        own = dict.fromkeys(said, "".join(pieces)) if template.has_blocks else dict(zip(said, pieces))
        refuse_lost(talk.messages, own, text, self.ignore)
        refuse_unread(talk, messages, template.reads, self.ignore)
        end = self._end_of(messages[-1])
        if turns[-1] == len(messages) - 1 and not text.rstrip().endswith(end):
            text += end
            if end and said[-1] == turns[-1]:
                # An empty answer has no block, so the last block may be that of another answer.
                begin = len(text) - len(end) if template.has_blocks else spans.pop()[0]
                spans.append((begin, len(text)))
        return Rendered(text, spans, trims=not template.has_blocks)

    def _end_of(self, message: Noted) -> str:
        """What ends a last answer, or a last call. Raises StoreError for a call of which that is unknown."""
        if not self.end or not dict.get(message, "tool_calls"):
            return self.end[0] if self.end else ""
        if len(self.end) == 1:
            raise StoreError(
                "it ends with a tool call, and another token may end that; name both, as "
                "end=['<|user|>', '<|observation|>'] (--chat-end '<|user|>,<|observation|>')"
            )
        return self.end[1]


def _blocks_of(
    template: ChatTemplate, messages: list[Noted], beside: Beside, text: str, said: Sequence[int] | None
) -> Spans:
    """A template's blocks, or those of messages `said`. Raises StoreError if prefixes do not tell them."""
    if _OPEN in text or _CLOSE in text:
        raise StoreError("the text has a character that Unicode keeps for programs (U+FDD0); remove it")
    whole, blocks = template.blocks(messages, beside)
    if whole != text:
        raise StoreError(
            f"{template.where}: what it does to the text of a generation block changes with where the block "
            f"ends; put {{% generation %}} next to what is printed"
        )
    if said is None:
        return blocks
    num_blocks = {0: 0, len(messages): len(blocks)}
    for k in sorted({edge for at in said for edge in (at, at + 1)} - num_blocks.keys()):
        now, found = template.blocks(messages[:k], beside)
        end = found[-1][1] if found else 0
        if found != blocks[: len(found)] or now[:end] != text[:end]:
            raise StoreError(
                f"message {k - 1} ({messages[k - 1]['role']}): the template prints earlier answers otherwise "
                f"once messages follow, so nothing tells which of its {{% generation %}} blocks are whose; "
                f"{_EACH}"
            )
        num_blocks[k] = len(found)
    return [block for k in said for block in blocks[num_blocks[k] : num_blocks[k + 1]]]


def _whole(template: ChatTemplate, messages: list[Noted], beside: Beside) -> str:
    """The text of all messages. Raises StoreError that names the first message from which on it has none."""
    try:
        return template.text(messages, beside)
    except StoreError as error:
        sound = range(len(messages) - 1, 0, -1)
        k = next((k for k in sound if _tried(template, messages[:k], beside) is not None), 0)
        has_parts = isinstance(messages[k].get("content"), list)
        cure = "; its content is a list of parts, join them to one text" if has_parts else ""
        raise StoreError(f"message {k} ({messages[k]['role']}): {error}{cure}") from error


def _tried(template: ChatTemplate, messages: list[Noted], beside: Beside) -> str | None:
    """The text; None if it has none."""
    try:
        return template.text(messages, beside)
    except StoreError:
        return None


def _added(
    template: ChatTemplate, messages: list[Noted], beside: Beside, k: int, text: str, special: Sequence[str]
) -> tuple[int, int]:
    """What message k adds to the text before it, in characters."""
    try:
        turn = template.text(messages[: k + 1], beside)
        thoughts = dict.get(messages[k], REASONING[0])
        thinks = thoughts is not None and thoughts.strip() in turn
        prompts = _prompts(template, messages[:k], beside, thinks=thinks)
        prompt = next((each for each in prompts if turn.startswith(each)), None)
    except StoreError as error:
        if not k:
            raise StoreError(
                "message 0 (assistant): the template has no prompt without a question before it; give it "
                "weight 0, or leave it out"
            ) from error
        raise StoreError(
            f"message {k} (assistant): cannot be rendered without what follows: {error}"
        ) from error
    if prompt is not None:
        _refuse_foreign(template, messages, beside, k, prompt, turn, special)
    if not text.startswith(turn):
        raise StoreError(
            f"message {k} (assistant): its text, once messages follow, is another, so it is not what the "
            f"assistant says; {_EACH}"
        )
    if prompt is None:
        raise StoreError(
            f"message {k} (assistant): the text before it is another than the template's prompt for it, so "
            f"nothing tells what the assistant says; put {{% generation %}} around answers in the template"
        )
    return len(prompt), len(turn)


def _prompts(template: ChatTemplate, messages: list[Noted], beside: Beside, *, thinks: bool) -> Iterator[str]:
    """Texts that an answer may follow: the template's prompt; for an answer without thoughts also the prompt
    for one, and the prompt without the <think> at its end."""
    yield (prompt := template.text(messages, beside, prompt=True))
    if not thinks and _THINKS in template.reads and _THINKS not in beside:
        yield template.text(messages, {**beside, _THINKS: False}, prompt=True)
    if not thinks:
        yield re.sub(r"<think>\s*$", "", prompt)


def _refuse_foreign(
    template: ChatTemplate,
    messages: list[Noted],
    beside: Beside,
    k: int,
    prompt: str,
    turn: str,
    special: Sequence[str],
) -> None:
    """Refuse a template that prints around an answer what the assistant does not say, so that it would bear
    loss: this one's header, if it is not the generation prompt; the next one's, or text, behind the last one.

    What is before and behind an answer is seen of another one in its place, which no header holds, and which
    has no thoughts: what opens these is the answer's. What ends the last answer alone may be special tokens.
    Messages with the same keys have the same around their answers, so one answer of a shape is looked at. A
    shape has no order and no number of earlier messages: shapes are kept, and calls come in any order.
    """
    said = [(each["role"], *(key for key, value in dict.items(each) if value)) for each in messages[: k + 1]]
    shape = (frozenset(said[:-2]), *said[-2:], *(name for name, value in beside.items() if value))
    if shape in template.sound:
        return
    before, word = messages[:k], "meshfeed"
    bare = _tried(template, before, beside)
    prompts = bare is None or not bare.startswith(prompt)
    plain = [{"type": "text", "text": word}] if template.takes_parts_alone else word
    without = ("tool_calls", *REASONING)
    other = {name: value for name, value in dict.items(messages[k]) if name not in without}
    talk = [*before, Noted(other | {"content": plain})]
    shown = (_tried(template, talk, beside) or "") if prompts else template.text(talk, beside)
    shown = shown.removeprefix(prompt)
    header, end = shown.partition(word)[0], shown.rpartition(word)[2]
    if not prompts and header != shown and re.sub(r"<think>\s*(</think>\s*)?$", "", header).strip():
        raise StoreError(
            f"message {k} (assistant): the template prints {header!r} before what the assistant says, and "
            f"nothing for add_generation_prompt, so that would bear loss; print it there, too: "
            f"{{% if add_generation_prompt %}}{header}{{% endif %}}, or put {{% generation %}} around answers"
        )
    followed = _tried(template, [*talk, Noted({"role": "user", "content": plain})], beside) or ""
    pieces = followed.removeprefix(prompt).rsplit(word, 2)
    at = _num_common(end, pieces[1]) if len(pieces) == 3 else len(end)
    tokens = re.compile("|".join(map(re.escape, special)))
    at = next((each.start() for each in tokens.finditer(end) if each.start() < at < each.end()), at)
    more = end[at:] if turn.endswith(end[at:]) else ""
    if more.strip() and prompt[: _num_common(bare or prompt, prompt)].endswith(more):
        raise StoreError(
            f"message {k} (assistant): the template prints {end!r} behind what the assistant says, the next "
            f"answer's header in it with and without add_generation_prompt, so that would bear loss; print "
            f"the header only in {{% if add_generation_prompt %}}, or put {{% generation %}} around answers"
        )
    if tokens.sub("", more).strip():
        raise StoreError(
            f"message {k} (assistant): the template prints {more!r} behind the last answer and no other, so "
            f"that would bear loss; leave it out of the template, or put {{% generation %}} around answers"
        )
    template.sound.add(shape)


def _num_common(text: str, other: str) -> int:
    """Characters with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
