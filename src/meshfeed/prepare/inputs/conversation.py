"""What a record says of a conversation -> messages, tools and variables as a chat template takes them. Pure.

Records differ: role and content, or ShareGPT's from and value; tools as objects or as JSON text; a system
prompt among the messages or beside them; a turn that is not to be trained, under one of many names. All
become one form here, and what is not understood is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from meshfeed.errors import StoreError

_ROLE_OF_SPEAKER = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""ShareGPT's name of a speaker -> role."""
_TRAINED = ("weight", "loss", "train", "trainable", "loss_mask", "train_on_turn", "masked")
"""Keys of a message that say whether it bears loss: 1 or 0, of `masked` the other way round."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PLUMBING = ("role", "content", "tool_call_id", "id")
"""Keys that need not be in the text."""
_OWN = {"messages", "tools", "documents", "add_generation_prompt"}
"""What every template is given; a conversation has no other ones."""
BESIDE = ("tools", "functions", "system", "system_prompt", "chat_template_kwargs")
"""Columns beside the messages that change the text."""


class Turn(dict[str, Any]):
    """A message that knows which of its keys a template has read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def _whole(self) -> Turn:
        self.read |= {*super().keys()}
        return self

    def items(self) -> Any:
        return super(Turn, self._whole()).items()

    def values(self) -> Any:
        return super(Turn, self._whole()).values()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a template takes it.

    Attributes:
        messages: each with a role and what belongs to it.
        trained: whether each message bears loss; None where it does not say so.
        tools: JSON schemas; None without any.
        variables: further names for the template, of this conversation alone.
    """

    messages: list[Turn]
    trained: list[bool | None]
    tools: list[Any] | None
    variables: Mapping[str, Any]

    def refuse_unread(self, ignore: Iterable[str]) -> None:
        """Raises StoreError for a key of a message that neither the template nor this module has read."""
        read = set[str]().union(*(message.read for message in self.messages), _PLUMBING, ignore)
        read |= {*_REASONING} if read & {*_REASONING} else set()
        for k, message in enumerate(self.messages):
            for name in message.keys() - read:
                raise StoreError(
                    f"message {k} ({dict.get(message, 'role')}): nothing reads its key {name!r}, so it would "
                    f"be lost; leave it out, or say that it may be: ignore=[{name!r}] (--ignore-keys {name})"
                )


def conversation_of(value: Any) -> Conversation:
    """The conversation of a record: a list of messages, or an object with it and with columns of BESIDE.

    Raises StoreError.
    """
    given: dict[str, Any] = {}
    if isinstance(value, dict):
        given = dict(cast(dict[str, Any], value))
        value = next(iter(given.values())) if len(given) == 1 else given.get("messages")
    value = _parsed(value, "the messages")
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise StoreError(f"{found} where a list of messages belongs")
    read = [_message(k, each) for k, each in enumerate(cast(list[Any], value))]
    system = [given[name] for name in ("system", "system_prompt") if given.get(name)]
    if system:
        if len(system) > 1 or not isinstance(system[0], str) or dict.get(read[0][0], "role") == "system":
            raise StoreError("more than one system prompt, or one that is no text; keep one of them")
        read.insert(0, (Turn({"role": "system", "content": system[0]}), None))
    variables = _parsed(given.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise StoreError(f"chat_template_kwargs are {type(variables).__name__}; an object belongs there")
    if own := sorted(_OWN & variables.keys()):
        raise StoreError(
            f"chat_template_kwargs: {', '.join(own)}: every template has it already; leave it out"
        )
    messages, trained = [message for message, _ in read], [bears for _, bears in read]
    return Conversation(messages, trained, _tools(given), cast(dict[str, Any], variables))


def with_role(k: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Message k with role and content instead of ShareGPT's from and value.

    Raises StoreError for an unknown speaker: with a wrong role, its text would wrongly bear loss, or not.
    """
    found = dict(message)
    if found.get("role") is not None or found.get("from") is None:
        return found
    speaker = found.pop("from")
    if speaker == "function_call":
        call = _parsed(str(found.pop("value", "")), f"message {k}: the function_call")
        return found | {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        }
    if not isinstance(speaker, str) or speaker not in _ROLE_OF_SPEAKER:
        raise StoreError(
            f"message {k}: from {speaker!r} is not one of {', '.join(_ROLE_OF_SPEAKER)}; write role and "
            f"content as the chat template knows them"
        )
    return found | {"role": _ROLE_OF_SPEAKER[speaker], "content": found.pop("value", None)}


def texts_of(message: Turn) -> Iterator[tuple[str, str]]:
    """What of a message must be in its conversation's text: each with what errors call it."""
    content = dict.get(message, "content")
    for part in cast(list[Any], content) if isinstance(content, list) else [content]:
        text = cast(dict[str, Any], part).get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and text.strip():
            yield "content", text.rpartition("</think>")[2]  # a template may print thoughts elsewhere
    thoughts = next((text for name in _REASONING if (text := dict.get(message, name))), None)
    if isinstance(thoughts, str):
        yield "reasoning", thoughts
    for call in cast(list[Any], dict.get(message, "tool_calls") or []):
        function = cast(dict[str, Any], call).get("function", call) if isinstance(call, dict) else {}
        if isinstance(name := cast(dict[str, Any], function).get("name"), str):
            yield "tool call", name


def _tools(given: Mapping[str, Any]) -> list[Any] | None:
    tools = given.get("tools")
    tools = None if isinstance(tools, str) and not tools.strip() else _parsed(tools, "tools")
    if not isinstance(tools, list | None):
        raise StoreError(f"tools are {type(tools).__name__}; a list of JSON schemas belongs there")
    if given.get("functions"):
        functions = _parsed(given["functions"], "functions")
        if tools or not isinstance(functions, list):
            raise StoreError(
                "functions beside tools, or that are no list; give a list of JSON schemas as tools"
            )
        tools = [{"type": "function", "function": each} for each in cast(list[Any], functions)]
    return cast(list[Any], tools) or None


def _message(k: int, given: Any) -> tuple[Turn, bool | None]:
    """A checked message, and whether it bears loss."""
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
    if not isinstance(thoughts, str | None):
        names = " or ".join(_REASONING)
        raise StoreError(f"message {k} ({role}): {names} is {type(thoughts).__name__}; text belongs there")
    for part in cast(list[Any], content) if isinstance(content, list) else ():
        if isinstance(part, dict) and (keys := sorted({*_TRAINED} & cast(dict[str, Any], part).keys())):
            raise StoreError(f"message {k} ({role}): {keys[0]} of a part; a message bears loss as a whole")
    trained = _trained(k, role, message)
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(k, each) for each in cast(list[Any], calls)]
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return Turn(message), trained


def _trained(k: int, role: str, message: dict[str, Any]) -> bool | None:
    """Whether a message says that it bears loss, by keys that are taken out of it."""
    said = dict[str, bool]()
    for name in _TRAINED:
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


def _call(k: int, given: Any) -> Any:
    """A tool call with its arguments as an object, which chat APIs give as JSON text."""
    if not isinstance(given, dict):
        return given
    call = cast(dict[str, Any], given)
    function = call.get("function")
    if isinstance(function, dict):
        return call | {"function": _call(k, function)}
    if isinstance(text := call.get("arguments"), str) and text.strip():
        return call | {"arguments": _parsed(text, f"message {k}: the arguments of a tool call")}
    return call


def _parsed(given: Any, what: str) -> Any:
    """What text says as JSON; anything else as it is."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise StoreError(f"{what} are text that is no JSON: {error}") from error
