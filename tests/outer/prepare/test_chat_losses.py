"""What stock templates leave out of a conversation, or print otherwise than it was meant: refused by name, or repaired."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from chats import decoded
from families import CALL, TODAY, TOOL, TOOLS, Family, Room, asked, said
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import meshfeed as mf
from meshfeed.prepare import Chats, Multimodal
from soak import cases

TALK = [asked("one?"), said("first."), asked("two?"), said("second.")]
Shown = Callable[..., str]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """The text of a record by a stock template; what bears loss follows in brackets."""

    @cache
    def room(name: str) -> Path:
        tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
        return Room(Family(name, name, [], variables=tokens), tmp_path_factory.mktemp(name) / "it").folder

    @cache
    def chats(name: str, ignore: tuple[str, ...], template: Path | None, how: Any) -> Any:
        made = Chats(
            tokenizer=str(room(name)),
            template=template and str(template),
            train_on=how,
            date=TODAY,
            ignore=ignore,
            end=("<|user|>", "<|observation|>") if name == "glm4moe" else (),
        )
        return made, made.encoder()

    def show(name: str, record: Any, *ignore: str, template: Path | None = None, how: str = "all") -> str:
        made, encoder = chats(name, ignore, template, how)
        value = made.columns.value(record if isinstance(record, dict) else {"messages": record})
        (columns,) = encoder.encode([value])
        text, bears = decoded(room(name), columns["tokens"], columns["loss_mask"])
        return f"{text}[[{bears}]]"

    show.room = room  # pyright: ignore[reportFunctionMemberAccess]
    return show


def called(call: Any, **more: Any) -> list[dict[str, Any]]:
    return [
        asked("go"),
        said("", tool_calls=call, **more),
        {"role": "tool", "content": "done"},
        said("I went."),
    ]


SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
PAPER = {"type": "document", "source": {"type": "base64", "data": "AAAA"}}
PLAIN = {"name": "f", "parameters": {"city": {"type": "str", "description": "where"}}}


@pytest.mark.parametrize(
    ("template", "record", "told"),
    [
        ("qwen3", [asked("a"), said("KEEP ME <think>hm</think>x.")], "1 .assistant.: .* not print its content"),
        ("qwen3", [asked("a"), said("The <think> opens, the </think> ends")], "not print its .*content"),
        ("qwen3", [asked("a"), said("<think>A</think>MIDDLE<think>A</think>x.")], "not print its .*content"),
        ("nemotron_3_nano", called([None]), "message 1: call 0: NoneType where an object"),
        ("nemotron_3_nano", called(5), "message 1: call 0: int where an object"),
        ("nemotron_3_nano", called([{"function": None}]), "message 1: call 0: NoneType where an object"),
        ("qwen3", called([{"arguments": {}}]), "message 1: call 0: no name; found keys 'arguments'"),
        ("qwen3", called([{"name": "f", "arguments": [1]}]), "its arguments are list; an object"),
        ("gptoss", {"messages": TALK[:2], "tools": [PLAIN]}, "tool 0: its parameters are no JSON schema"),
        ("gptoss", {"messages": TALK[:2], "tools": [5]}, "tool 0: int where an object"),
        ("qwen3_vl", [{"role": "user", "content": [SOUND]}, said("x")], "message 0 .user. has 'input_audio'"),
        ("gemma4_v5", [{"role": "user", "content": [SOUND]}, said("x")], "message 0 .user. has 'input_audio'"),
        ("qwen3_vl", [{"role": "user", "content": [PAPER]}, said("x")], "message 0 .user. has 'source'"),
        ("qwen3_vl", [*called([CALL])[:2], {"role": "tool", "content": [{"temp": 3}]}, said("x")], "has 'temp'"),
        ("glm4moe", [{"role": "user", "content": [{"temp": 3}]}, said("x")], "has 'temp'"),
        ("qwen2_5", [{"role": "developer", "content": "be brief"}, asked("Please be brief. q"), said("x")],
         "message 0 .developer.: the template does not print its content"),
        ("llama3_1", [asked("a"), {"role": "tool_call", "content": "CALL"}, said("x")],
         "message 1: role 'tool_call' is none of .*, and the template does not name it"),
        ("qwen3", TALK[1:], "message 0 .assistant.: the template has no prompt without a question before it"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_lost_is_refused(shown: Shown, template: str, record: Any, told: str) -> None:
    with pytest.raises(mf.errors.StoreError, match=told):
        shown(template, record)


@pytest.mark.parametrize(
    "template", ["qwen3_vl", "nemotron_3_nano", "llama3_1", "gemma4_v5", "deepseekv3", "lfm2_2_5"]
)
def test_empty_keys_say_nothing(shown: Shown, template: str) -> None:
    """As Nemotron's sets have them: an empty list of calls on every message."""
    empty = {"tool_calls": [], "name": "", "reasoning_content": "", "audio": {}}
    beside = {"tools": [], "chat_template_kwargs": {"xml_tools": [], "custom_instructions": ""}}
    assert shown(template, {"messages": [each | empty for each in TALK]} | beside) == shown(template, TALK)


@pytest.mark.parametrize("template", ["qwen3_5_think", "nemotron_3_nano", "gemma4_v5"])
def test_calls_and_tools_in_any_form_are_the_same(shown: Shown, template: str) -> None:
    """As objects, as JSON text at any depth, and with `parameters` for arguments, as Llama writes them."""
    plain = shown(template, {"messages": called([CALL]), "tools": TOOLS})
    assert "move" in plain and "integer" in plain.lower()
    calls: list[Any] = [
        json.dumps([CALL]),
        [json.dumps(CALL)],
        CALL,
        [CALL | {"function": json.dumps(CALL["function"])}],
    ]
    calls.append([CALL | {"function": {"name": "move", "parameters": {"x": 1}}}])
    texts: list[Any] = [
        json.dumps(TOOLS),
        [json.dumps(TOOLS[0])],
        [TOOLS[0] | {"function": json.dumps(TOOL)}],
    ]
    texts.append([TOOLS[0] | {"function": TOOL | {"parameters": json.dumps(TOOL["parameters"])}}])
    for call in calls:
        assert shown(template, {"messages": called(call), "tools": TOOLS}) == plain
    for tools in texts:
        assert shown(template, {"messages": called([CALL]), "tools": tools}) == plain


def test_what_a_call_is_given_is_read_however_deep_it_is(shown: Shown, tmp_path: Path) -> None:
    body = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}[WHAT]{% endfor %}"
    body += "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    deep = [CALL | {"function": {"name": "move", "arguments": {"x": 7, "y": {"z": [{"deep": 1}]}}}}]
    for what, told in (
        ("{{ c.function.name }}", "has 'arguments'"),
        ("{{ c.function.name }}{{ c.function.arguments.x }}", "has 'y'"),
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", ""),
        ("{{ c.function.name }}{{ c.function.arguments }}", ""),
        ("{{ c.function.name }}{{ dict(**c.function.arguments) }}", ""),
        ("{{ c.function }}", ""),
    ):
        template = tmp_path / f"{len(what)}.jinja"
        template.write_text(body.replace("WHAT", what))
        if told:
            with pytest.raises(mf.errors.StoreError, match=told):
                shown("qwen3", called(deep), template=template)
        else:
            assert "deep" in shown("qwen3", called(deep), template=template)


def test_what_is_ignored_is_no_licence_for_an_empty_answer(shown: Shown) -> None:
    with pytest.raises(
        mf.errors.StoreError, match=r"message 1 .assistant.: the template does not print its tool_calls"
    ):
        shown("llama3", called([CALL]), "tool_calls")
    assert "going" in shown("llama3", [asked("go"), said("going", tool_calls=[CALL])], "tool_calls")
    with pytest.raises(
        mf.errors.StoreError, match=r"message 0 .developer.: the template does not print its content"
    ):
        record = {"messages": [{"role": "developer", "content": "be brief"}, *TALK], "content": "other"}
        shown("qwen2_5", record, "content")


def test_a_block_that_ends_before_the_stop_is_refused(shown: Shown, tmp_path: Path) -> None:
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}{% endgeneration %}"
    )
    (tmp_path / "t.jinja").write_text(body + "<|im_end|>\n{% endfor %}")
    with pytest.raises(
        mf.errors.StoreError, match=r"block ends before '<.im_end.>'.*--chat-end '<.im_end.>'"
    ):
        shown("qwen3", TALK, template=tmp_path / "t.jinja")


def test_a_greeting_of_weight_0_may_come_first(shown: Shown) -> None:
    assert shown("qwen2_5", [said("Hello!", weight=0), *TALK]).endswith(
        "[[first.<|im_end|>second.<|im_end|>]]"
    )


def test_a_system_prompt_said_twice_is_one(shown: Shown) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *TALK]
    assert shown("qwen2_5", {"messages": talk, "system": "Be brief."}) == shown("qwen2_5", talk)
    with pytest.raises(mf.errors.StoreError, match="more than one system prompt"):
        shown("qwen2_5", {"messages": talk, "system": "Be long."})


@pytest.mark.parametrize("shape", [{"question": "one?", "answer": "first."}, {"inputs": "one?", "targets": "first."},
                                   {"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:2])}], ids=str)  # fmt: skip
def test_further_shapes(shown: Shown, shape: Any) -> None:
    assert shown("qwen2_5", shape) == shown("qwen2_5", TALK[:2])


@pytest.mark.parametrize("template", ["llava_next", "smolvlm", "idefics3"])
def test_a_template_that_takes_parts_alone_gets_them(shown: Shown, template: str) -> None:
    """LLaVA's sets have text with <image> in it, and answers that are text."""
    room: Path = shown.room(template)  # pyright: ignore[reportFunctionMemberAccess]
    how = Multimodal(text=Chats(tokenizer=str(room)), tokens={"image": "<image>"})
    (file := io.BytesIO(), Image.new("RGB", (4, 4)).save(file, "PNG"))
    record = {"messages": [asked("<image>\nwhat?"), said("a cat."), *TALK], "images": [file.getvalue()]}
    (columns,) = how.encoder().encode([how.columns.sample(record, lambda _: b"")], "it".format)
    text, bears = decoded(room, columns["tokens"], columns["loss_mask"])
    assert text.count("<image>") == 1 and all(each in text for each in ("what?", "a cat.", "one?", "two?"))
    assert all(each in bears for each in ("a cat.", "first.", "second.")) and "one?" not in bears


@st.composite
def talks(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, bool]]]:
    """Messages, and each word that must be in their text, with whether it bears loss."""
    messages, words, number = list[dict[str, Any]](), list[tuple[str, bool]](), count()

    def word(bears: bool) -> str:
        words.append((f"w{next(number)}w", bears))
        return words[-1][0]

    def anywhere(given: dict[str, Any], name: str) -> dict[str, Any]:
        """With a key beside that no template knows, sometimes."""
        return given | ({name: word(False)} if draw(st.integers(0, 15)) == 0 else {})

    for _ in range(draw(st.integers(1, 3))):
        messages.append(anywhere(asked(word(False)), "mood"))
        weight = draw(st.sampled_from([0, 1, None, None]))
        loss, kind = weight != 0, draw(st.sampled_from(["text", "thought", "call", "thought and call"]))
        more: dict[str, Any] = {"weight": weight}
        if "thought" in kind:
            more["reasoning_content"] = word(loss) if loss else "before"
        if "call" in kind:
            value: Any = draw(st.sampled_from([word(loss), {"deep": word(loss)}, [word(loss)]]))
            words[:] = [each for each in words if f'"{each[0]}"' in json.dumps([messages, more, value])]
            function = anywhere({"name": "move", "arguments": {"x": value}}, "strict")
            as_text = draw(st.booleans())
            if as_text:
                function["arguments"] = json.dumps(function["arguments"])
            call = anywhere({"id": "call00001", "type": "function", "function": function}, "cached")
            messages.append(said("", tool_calls=[call], **more))
            messages.append(
                {"role": "tool", "tool_call_id": "call00001", "name": "move", "content": word(False)}
            )
            weight = draw(st.sampled_from([0, 1, None, None]))
            messages.append(said(word(weight != 0), weight=weight))
        else:
            messages.append(said(word(loss), **more))
    return messages, words


@settings(max_examples=cases(60, 2_000), deadline=None)
@given(
    made=talks(),
    template=st.sampled_from(
        ["qwen3", "qwen3_5_think", "nemotron_3_nano", "glm4moe", "gptoss", "llama3_1", "gemma4_v5"]
    ),
    how=st.sampled_from(["all", "last"]),
)
def test_every_word_is_in_the_text_with_its_loss_or_the_record_is_refused(
    shown: Shown, made: Any, template: str, how: Any
) -> None:
    messages, words = made
    try:
        text = shown(template, messages, how=how)
    except mf.errors.StoreError as error:
        assert "message" in str(error) or "nothing of it is trained" in str(error)
        return
    text, _, bears = text.partition("[[")
    last = max(k for k, each in enumerate(messages) if each["role"] == "assistant")
    for each, loss in words:
        bears_it = loss and (how == "all" or each in json.dumps(messages[last]))
        is_thought = any(each == message.get("reasoning_content") for message in messages)
        assert each in text or (is_thought and not bears_it)  # templates drop earlier thoughts
        assert (each in bears) == bears_it
