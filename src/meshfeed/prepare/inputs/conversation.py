"""What a record says of a conversation -> messages, tools and variables as a chat template takes them. Pure.

Messages differ: role and content, or ShareGPT's from and value; tools as objects or as JSON text; a system
prompt among the messages or beside them; a turn that is not to be trained, under one of many names. All
become one form here, and what is not understood is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from meshfeed.errors import StoreError

_ROLE_OF_SPEAKER = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""ShareGPT's name of a speaker -> role."""
TRAINED = ("weight", "loss", "train", "trainable", "loss_mask", "train_on_turn", "masked")
"""Keys of a message that say whether it bears loss: 1 or 0, of `masked` the other way round."""
REASONING = ("reasoning_content", "thinking", "reasoning")
NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that say nothing."""
_BESIDE = ("tools", "functions", "documents", "system", "system_prompt", "chat_template_kwargs")
"""Columns beside the messages that change the text."""
_SCHEMA = ("properties", "$ref", "anyOf", "oneOf", "allOf")
"""Keys of a JSON schema of an object, one of which it has if it does not say so."""
_OWN = {"messages", "tools", "documents", "add_generation_prompt"}
"""What every template is given; a conversation has no other ones."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object, and its JSON for templates that take text, as DeepSeek's do."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, before: str) -> str:
        return before + str(self)

    def __add__(self, after: str) -> str:
        return str(self) + after


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a template takes it.

    Attributes:
        messages: each with a role and what belongs to it.
        trained: whether each message bears loss; None where it does not say so.
        given: what the template is given beside the messages: tools, documents and variables of its own.
        unread: columns of the record that have a value and are none of these.
    """

    messages: list[dict[str, Any]]
    trained: list[bool | None]
    given: Mapping[str, Any]
    unread: Sequence[str] = ()

    def in_parts(self) -> Conversation:
        found = list[dict[str, Any]]()
        for each in self.messages:
            text = each["content"]
            parts = [{"type": "text", "text": text}]
            found.append(each | {"content": parts} if isinstance(text, str) else each)
        return replace(self, messages=found)

    def with_behind(self, behind: Iterator[dict[str, Any] | None]) -> Conversation:
        """With a further item behind each part, in order, or None."""
        found = list[dict[str, Any]]()
        for message in self.messages:
            items = list[Any]()
            for item in message["content"] if parts_in(message) else ():
                more = next(behind) if parts_in({"content": [item]}) else None
                items += [item] if more is None else [item, more]
            found.append({**message, "content": items} if items else message)
        return replace(self, messages=found)

    def each_answer(self) -> list[Conversation]:
        """One for each message of the assistant that bears loss, which is its last; itself without any."""
        found: list[Conversation] = [
            replace(self, messages=self.messages[: k + 1], trained=[False] * k + [self.trained[k]])
            for k, message in enumerate(self.messages)
            if message["role"] == "assistant" and self.trained[k] is not False
        ]
        return found or [self]

    def key(self) -> str:
        """Identifies what is trained on: without columns that nothing reads, such as a number of the row."""
        return json.dumps([self.messages, self.trained, self.given], sort_keys=True, default=repr)


def conversation(value: Any, beside: Mapping[str, Any]) -> Conversation:
    """The conversation of a list of messages, or of its JSON text. beside: a record's other columns.

    Raises StoreError.
    """
    value = parsed(value, "the messages")
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise StoreError(f"{found} where a list of messages belongs")
    read = [_message(k, each) for k, each in enumerate(cast(list[Any], value))]
    told = [beside[name] for name in ("system", "system_prompt") if beside.get(name) not in NOTHING]
    if any(not isinstance(each, str) for each in told):
        raise StoreError("a system prompt that is no text")
    first = read[0][0]
    system = [each for each in told if (first["role"], first["content"]) != ("system", each)]
    if system:
        if len({*system}) > 1 or first["role"] == "system":
            raise StoreError("more than one system prompt; keep one of them")
        read.insert(0, ({"role": "system", "content": system[0]}, None))
    variables = parsed(beside.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise StoreError(f"chat_template_kwargs are {type(variables).__name__}; an object belongs there")
    if own := sorted(_OWN & variables.keys()):
        raise StoreError(
            f"chat_template_kwargs: {', '.join(own)}: every template has it already; leave it out"
        )
    messages, trained = [message for message, _ in read], [bears for _, bears in read]
    variables = {name: each for name, each in cast(dict[str, Any], variables).items() if each not in NOTHING}
    given = {"tools": _tools(beside), "documents": _listed(beside, "documents"), **variables}
    repeated = [*NOTHING, *(message["content"] for message in messages)]
    unread = [name for name, each in beside.items() if name not in _BESIDE and not _is_in(each, repeated)]
    return Conversation(messages, trained, given, sorted(set(unread) - {"id"}))


def _is_in(value: Any, values: list[Any]) -> bool:
    try:
        return value in values
    except ValueError:  # an array, which is none of them
        return False


def with_role(k: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Message k with role and content instead of ShareGPT's from and value.

    Raises StoreError for an unknown speaker: with a wrong role, its text would wrongly bear loss, or not.
    """
    found = dict(message)
    if found.get("role") is not None or found.get("from") is None:
        return found
    speaker = found.pop("from")
    value, beside = found.pop("value", None), [name for name in ("content", "tool_calls") if found.get(name)]
    if speaker == "function_call":
        if beside:
            raise StoreError(
                f"message {k}: {beside[0]} beside the function_call; make it a message of its own"
            )
        calls = parsed(value, f"message {k}: the function_call")
        calls = cast(list[Any], calls) if isinstance(calls, list) else [calls]
        if not calls or not all(isinstance(call, dict) for call in calls):
            raise StoreError(f"message {k}: the function_call is no object, and no list of objects")
        return found | {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
    if not isinstance(speaker, str) or speaker not in _ROLE_OF_SPEAKER:
        raise StoreError(
            f"message {k}: from {speaker!r} is not one of {', '.join(_ROLE_OF_SPEAKER)}; write role and "
            f"content as the chat template knows them"
        )
    if value and "content" in beside and value != found["content"]:
        raise StoreError(f"message {k}: content beside value; keep one of them")
    return found | {"role": _ROLE_OF_SPEAKER[speaker], "content": found.get("content") or value}


def texts_of(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What of a message must be in its conversation's text: each with the message's key."""
    content = message.get("content")
    for part in cast(list[Any], content) if isinstance(content, list) else [content]:
        values = cast(dict[str, Any], part).items() if isinstance(part, dict) else [("text", part)]
        for text in [value for name, value in values if name != "type" and isinstance(value, str)]:
            # a template may print thoughts elsewhere, and drop what is before them
            *thought, said = re.split("</think>", text)
            for each in thought:
                before, _, thoughts = each.rpartition("<think>")
                yield "content", before
                yield REASONING[0], thoughts
            yield "content", said
    thoughts = next((text for name in REASONING if (text := message.get(name))), None)
    if isinstance(thoughts, str):
        yield REASONING[0], thoughts
    for call in cast(list[Any], message.get("tool_calls") or []):
        function = cast(dict[str, Any], call).get("function", call) if isinstance(call, dict) else {}
        arguments = cast(dict[str, Any], function).get("arguments")
        values = arguments.values() if isinstance(arguments, dict) else ()
        for said in (cast(dict[str, Any], function).get("name"), *values):
            if isinstance(said, str):
                yield "tool_calls", said


def parts_in(message: Mapping[str, Any]) -> list[str]:
    """Kinds of the images and the like among a message's content."""
    content = message.get("content")
    items = cast(list[Any], content) if isinstance(content, list) else []
    kinds = [str(cast(dict[str, Any], each).get("type")) for each in items if isinstance(each, dict)]
    return [kind for each in kinds if (kind := each.removesuffix("_url")) in ("image", "audio", "video")]


def _tools(beside: Mapping[str, Any]) -> list[Any] | None:
    tools = _listed(beside, "tools")
    if functions := _listed(beside, "functions"):
        if tools:
            raise StoreError("functions beside tools; give one list of JSON schemas, as tools")
        return [{"type": "function", "function": _tool(k, each)} for k, each in enumerate(functions)]
    return tools and [_tool(k, each) for k, each in enumerate(tools)]


def _tool(k: int, given: Any) -> dict[str, Any]:
    """A tool, whose objects may be JSON text. Raises StoreError for one that templates print in part."""
    tool = parsed(given, f"tool {k}")
    if not isinstance(tool, dict):
        raise StoreError(f"tool {k}: {type(tool).__name__} where an object with name and parameters belongs")
    found = cast(dict[str, Any], tool)
    if "function" in found:
        return found | {"function": _tool(k, found["function"])}
    if "parameters" not in found:
        return found
    schema = parsed(found["parameters"], f"tool {k}: its parameters")
    is_schema = isinstance(schema, dict) and (schema.get("type") == "object" or {*_SCHEMA} & schema.keys())
    if schema not in NOTHING and not is_schema:
        raise StoreError(
            f"tool {k}: its parameters are no JSON schema, such as "
            f'{{"type": "object", "properties": {{...}}}}; templates would leave them out'
        )
    return found | {"parameters": schema}


def _listed(beside: Mapping[str, Any], name: str) -> list[Any] | None:
    """A column of objects, as such or as JSON text; None without any."""
    found = beside.get(name)
    found = None if isinstance(found, str) and not found.strip() else parsed(found, name)
    if not isinstance(found, list | None):
        raise StoreError(f"{name} are {type(found).__name__}; a list of objects belongs there")
    return cast(list[Any], found) or None


def _message(k: int, given: Any) -> tuple[dict[str, Any], bool | None]:
    """A checked message, and whether it bears loss."""
    if not isinstance(given, dict):
        raise StoreError(f"message {k}: {type(given).__name__} where an object with role and content belongs")
    # As transformers has it: null is as if the key were not there, and thoughts go by several names.
    named = with_role(k, cast(dict[str, Any], given))
    message = {name: value for name, value in named.items() if name == "content" or value not in NOTHING}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise StoreError(
            f"message {k}: its role is {role!r}, found keys {', '.join(map(repr, given))}; it needs a role"
        )
    named_thoughts = {name: message.pop(name) for name in REASONING if name in message}
    thoughts = next((text for text in named_thoughts.values() if text), "" if named_thoughts else None)
    if any(text not in ("", thoughts) for text in named_thoughts.values()):
        raise StoreError(
            f"message {k} ({role}): {' and '.join(named_thoughts)} have different thoughts; keep one of them"
        )
    if content is None and thoughts is None and not message.get("tool_calls"):
        raise StoreError(f"message {k} ({role}): no content; found keys {', '.join(map(repr, given))}")
    if not isinstance(content, str | list | None):
        raise StoreError(f"message {k} ({role}): content is {type(content).__name__}; text belongs there")
    if not isinstance(thoughts, str | None):
        names = " or ".join(REASONING)
        raise StoreError(f"message {k} ({role}): {names} is {type(thoughts).__name__}; text belongs there")
    for part in cast(list[Any], content) if isinstance(content, list) else ():
        if isinstance(part, dict) and (keys := sorted({*TRAINED} & cast(dict[str, Any], part).keys())):
            raise StoreError(f"message {k} ({role}): {keys[0]} of a part; a message bears loss as a whole")
    trained = _trained(k, role, message)
    if "tool_calls" in message:
        calls = parsed(message["tool_calls"], f"message {k}: its tool_calls")
        calls = cast(list[Any], calls) if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(f"message {k}: call {i}", each) for i, each in enumerate(calls)]
    if content is None:
        message["content"] = ""  # as templates that join it to a call need it
    if thoughts is not None:
        message |= dict.fromkeys(("thinking", *named_thoughts, "reasoning_content"), thoughts)
    return message, trained


def _trained(k: int, role: str, message: dict[str, Any]) -> bool | None:
    """Whether a message says that it bears loss, by keys that are taken out of it."""
    said = dict[str, bool]()
    for name in TRAINED:
        if name in message:
            value = message.pop(name)
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise StoreError(
                    f"message {k} ({role}): {name} is {value!r}; a message bears loss (1) or not (0)"
                )
            if name != "masked" or role == "assistant" or value:
                said[name] = bool(value) != (name == "masked")
    if len({*said.values()}) > 1:
        raise StoreError(
            f"message {k} ({role}): {' and '.join(said)} contradict each other; keep one of them"
        )
    trained = next(iter(said.values()), None)
    if trained and role != "assistant":
        raise StoreError(
            f"message {k} ({role}): {next(iter(said))} says that it is trained; only what the assistant says "
            f"bears loss: leave the key out"
        )
    return trained


def _call(where: str, given: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object; both may be JSON text, as chat APIs have it."""
    call = parsed(given, where)
    if not isinstance(call, dict):
        raise StoreError(f"{where}: {type(call).__name__} where an object with name and arguments belongs")
    found = cast(dict[str, Any], call)
    if "function" in found:
        return found | {"function": _call(where, found["function"])}
    if not isinstance(found.get("name"), str) or not found["name"]:
        raise StoreError(f"{where}: no name; found keys {', '.join(map(repr, found)) or 'none'}")
    if "arguments" not in found and "parameters" in found:  # as Llama writes its calls
        found = {{"parameters": "arguments"}.get(name, name): each for name, each in found.items()}
    text = found.get("arguments")
    nothing = text is None or (isinstance(text, str) and not text.strip())
    made = {} if nothing else parsed(text, f"{where}: its arguments")
    if not isinstance(made, dict):
        raise StoreError(f"{where}: its arguments are {type(made).__name__}; an object belongs there")
    return found | {"arguments": Arguments(made)}


def parsed(given: Any, what: str) -> Any:
    """What text says as JSON; anything else as it is."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise StoreError(f"{what} are text that is no JSON: {error}") from error
