"""What records say of a conversation beside its text: in the tokens and the mask, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
from chats import ASKED, SAID, TEMPLATE, chat_encoder, shown, tokenizer_in
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.cli.main import main
from soak import cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template knows of tools, thoughts and one variable."""
    return tokenizer_in(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize(
    "key",
    [
        *(
            {"weight": 0},
            {"weight": 0.0},
            {"loss": 0},
            {"loss": False},
            {"train": False},
            {"trainable": False},
        ),
        *({"loss_mask": 0}, {"train_on_turn": False}, {"masked": True}, {"masked": 1, "weight": 0}),
    ],
    ids=str,
)
def test_a_turn_that_is_not_to_be_trained_is_not(folder: Path, key: dict[str, Any]) -> None:
    bad = {"role": "assistant", "content": "BAD", **key}
    ((text, said),) = shown(folder, [ASKED, bad, ASKED, SAID])
    assert text == "<|user|>a<|end|><|assistant|>BAD<|end|><|user|>a<|end|><|assistant|>GOOD<|end|>"
    assert said == "GOOD<|end|>"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([ASKED, SAID | {"weight": 0.5}], "weight is 0.5; a message bears loss .1. or not"),
        ([ASKED, SAID | {"weight": "0"}], "weight is '0'; a message bears loss .1. or not"),
        ([ASKED, SAID | {"weight": 1, "masked": True}], "weight and masked contradict"),
        ([ASKED | {"weight": 1}, SAID], "user.: weight says that it is trained"),
        ([ASKED, SAID | {"weight": 0}], "nothing of it is trained"),
        (
            [ASKED, SAID | {"mood": "good"}],
            r"message 1 \(assistant\) has 'mood': nothing reads that.*--ignore-keys mood\)",
        ),
        ("[{", "the messages are text that is no JSON"),
        ({"messages": [ASKED, SAID], "tools": "x"}, "tools are text that is no JSON"),
        ({"messages": [ASKED, SAID], "chat_template_kwargs": [1]}, "chat_template_kwargs are list"),
        (
            {"messages": [ASKED, SAID], "chat_template_kwargs": {"add_generation_prompt": True}},
            "add_generation_prompt: every template has it already",
        ),
        ([ASKED, SAID | {"content": [{"type": "text", "text": "x", "weight": 0}]}], "weight of a part"),
        (
            {"messages": [{"role": "system", "content": "s"}, ASKED, SAID], "system": "t"},
            "more than one system prompt",
        ),
    ],
)
def test_what_contradicts_or_is_lost_is_named(folder: Path, messages: Any, told: str) -> None:
    with pytest.raises(mf.errors.StoreError, match=told):
        chat_encoder(folder).encode([messages])


def test_columns_beside_the_messages_are_in_the_text(folder: Path) -> None:
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "GOOD"}]
    function = {"name": "move", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    rest = "<|user|>a<|end|><|assistant|>GOOD<|end|>"
    texts = [
        text
        for text, _ in shown(
            folder,
            {"messages": sharegpt, "system": "Be brief."},
            {"messages": [ASKED, SAID], "system_prompt": "Be brief."},
            {"messages": [ASKED, SAID], "functions": [function]},
            {"messages": [ASKED, SAID], "tools": json.dumps(tools)},
            {"messages": [ASKED, SAID], "tools": ""},
            {"messages": [ASKED, SAID], "chat_template_kwargs": {"style": "loud"}},
            json.dumps([ASKED, SAID]),
        )
    ]
    assert texts[:2] == [f"<|system|>Be brief.<|end|>{rest}"] * 2
    assert texts[2] == texts[3] == f"<|tool|>{json.dumps(tools[0])}{rest}"
    assert texts[4:] == [rest, f"(loud){rest}", rest]


def test_arguments_as_text_are_those_as_an_object(folder: Path) -> None:
    def called(arguments: Any) -> Any:
        call = {"id": "call1", "type": "function", "function": {"name": "move", "arguments": arguments}}
        answer = {"role": "tool", "tool_call_id": "call1", "content": "done"}
        return [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, answer, SAID]

    told = {"from": "function_call", "value": json.dumps({"name": "move", "arguments": {"x": 0}})}
    sharegpt = [{"from": "human", "value": "a"}, told, {"from": "observation", "value": "done"}]
    first, second, third = shown(
        folder, called({"x": 0}), called('{"x":0}'), [*sharegpt, {"from": "gpt", "value": "GOOD"}]
    )
    assert first == second == third and '"arguments": {"x": 0}}<|end|>' in first[1]


def test_what_a_template_does_not_print_is_refused(folder: Path) -> None:
    thoughts = [ASKED, SAID | {"reasoning_content": "because"}]
    ((_, said),) = shown(folder, thoughts)
    assert said == "[because]GOOD<|end|>"
    silent = {"messages": thoughts, "chat_template_kwargs": {"keeps": False}}
    with pytest.raises(
        mf.errors.StoreError, match=r"message 1 \(assistant\): the template does not print its reasoning"
    ):
        chat_encoder(folder).encode([silent])
    ((_, said),) = shown(folder, silent, ignore=["reasoning_content"])
    assert said == "GOOD<|end|>"


def test_a_call_that_is_not_printed_is_refused_however_it_is_named(folder: Path, tmp_path: Path) -> None:
    """Such as the second of two alike, of which gpt-oss prints the first; the tools name them, too."""
    call = {"type": "function", "function": {"name": "move", "arguments": {"to": 'the "end"'}}}
    talk = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call, call]}, SAID]
    ((_, said),) = shown(folder, talk)
    assert said.count('"move"') == 2
    first = tmp_path / "first.jinja"
    first.write_text(TEMPLATE.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}"))
    record = {"messages": talk, "tools": [{"name": "move"}, {"name": "move"}]}
    with pytest.raises(mf.errors.StoreError, match=r"message 1 .*does not print its tool_calls"):
        chat_encoder(folder, first).encode([record])
    quoted = tmp_path / "quoted.jinja"
    quoted.write_text(
        TEMPLATE.replace("call.function | tojson", "call.function.name + call.function.arguments.to | e")
    )
    ((_, said),) = shown(folder, talk, template=quoted)
    assert said.count("movethe &#34;end&#34;") == 2


def two_tools() -> list[dict[str, Any]]:
    def talk(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {
            "messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, SAID],
            "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
        }

    return [talk("move", {"x": "0", "y": "1"}), talk("say", {"message": "hi"})]


@pytest.mark.parametrize("kind", ["structs", "json"])
def test_tables_say_what_lines_say(folder: Path, tmp_path: Path, kind: str) -> None:
    """Structs of a table have every key of their type; `datasets` 5 writes JSON instead, as a type of its own."""
    rows = two_tools()
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    if kind == "json":
        as_json = {
            name: pa.array([list(map(json.dumps, row[name])) for row in rows], pa.list_(pa.string())).cast(
                pa.list_(pa.json_())
            )
            for name in ("messages", "tools")
        }
        table = pa.table(as_json)
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    with pa.ipc.new_stream(str(tmp_path / "table.arrow"), table.schema) as writer:
        writer.write_table(table)
    made = []
    for name in ("lines.jsonl", "table.parquet", "table.arrow"):
        out = tmp_path / f"of-{name}"
        words = [str(tmp_path / name), "--out", str(out), "--tokenizer", str(folder), "--chat"]
        assert main(["prepare", *words, "--workers", "1"]) == 0
        made.append(documents_of(out))
    assert made[0] == made[1] == made[2] and len(made[0]) == 2


def documents_of(out: Path) -> list[list[int]]:
    with mf.open(out) as store:
        lengths = store.lengths(np.arange(store.num_documents)).tolist()
        return [store.read(n, 0, length).tolist() for n, length in enumerate(lengths)]


def test_variables_and_ignored_keys_by_the_command_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [ASKED, SAID | {"mood": "good"}]}) + "\n")
    words = ["prepare", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1"]
    words += ["--tokenizer", str(folder), "--chat"]
    assert main(words) == 2
    told = capfd.readouterr().err
    assert "--ignore-keys mood" in told and "Traceback" not in told, told
    more = ["--ignore-keys", "mood", "--template-kwargs", '{"style": "loud"}', "--overwrite"]
    assert main([*words, *more]) == 0
    decoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tokens,) = documents_of(tmp_path / "out")
    text = decoder.decode(tokens, skip_special_tokens=False)
    assert text == "(loud)<|user|>a<|end|><|assistant|>GOOD<|end|>"


def test_an_answer_that_the_next_turn_ends(folder: Path, tmp_path: Path) -> None:
    """GLM's templates print nothing at the end of a turn: the header of the next one ends it."""
    (tmp_path / "t.jinja").write_text(
        "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
    )
    talk = [ASKED, SAID, ASKED, SAID]
    ((text, said),) = shown(folder, talk, template=tmp_path / "t.jinja", end=["<|user|>"])
    assert said == "GOOD<|user|>GOOD<|user|>" and text.endswith(said[-12:])
    ((text, said),) = shown(folder, talk[:3], template=tmp_path / "t.jinja", end=["<|user|>"])
    assert said == "GOOD<|user|>" and text.endswith("<|user|>a")
    bad = [*talk[:3], SAID | {"content": "BAD", "weight": 0}]
    assert shown(folder, bad, template=tmp_path / "t.jinja", end=["<|user|>"])[0][1] == "GOOD<|user|>"
    call = {"type": "function", "function": {"name": "move", "arguments": {"x": "0"}}}
    called = [ASKED, {"role": "assistant", "content": "GOOD move 0", "tool_calls": [call]}]
    both: dict[str, Any] = {"template": tmp_path / "t.jinja", "ignore": ["tool_calls"]}
    ((_, said),) = shown(folder, called, end=["<|user|>", "<|tool|>"], **both)
    assert said == "GOOD move 0<|tool|>"
    with pytest.raises(mf.errors.StoreError, match="ends with a tool call, and another token may end that"):
        chat_encoder(folder, end=["<|user|>"], **both).encode([called])
    with pytest.raises(mf.errors.StoreError, match="never learns to stop"):  # <|assistant|> ends nothing
        chat_encoder(folder, tmp_path / "t.jinja", end=["<|user|>"]).encode([[ASKED, SAID, SAID]])
    for bad in ([ASKED, SAID], talk):
        with pytest.raises(mf.errors.StoreError, match=r"conversation 0: .*never learn to stop.*--chat-end"):
            chat_encoder(folder, tmp_path / "t.jinja").encode([bad])
    with pytest.raises(mf.errors.StoreError, match="'a' is no special token; end="):
        chat_encoder(folder, tmp_path / "t.jinja", end=["a"]).check()


def test_an_answer_may_end_by_a_token_that_is_added_and_not_special(tmp_path: Path) -> None:
    """As those of ChatML in some models, beside a special token of their own."""
    marks = ["<|im_start|>", "<|im_end|>"]
    folder = tokenizer_in(
        tmp_path / "chatml",
        "<|user|>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens([tokenizers.AddedToken(each, normalized=False) for each in marks])
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(mf.errors.StoreError, match="name what ends it: end="):
        shown(folder, [ASKED, SAID])
    ((_, said),) = shown(folder, [ASKED, SAID, ASKED, SAID], end=marks[1:])
    assert said == "GOOD<|im_end|>GOOD<|im_end|>"


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOX = "<|tool|>4<|system|>"


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("answers", "loss"),
    [
        (["GOOD", "GOOD"], "GOOD<|user|>GOOD<|user|>"),
        (["GOOD", ""], "GOOD<|user|><|user|>"),
        ([""], "<|user|>"),
        ([BOX, BOX], f"{BOX}<|user|>" * 2),
        ([f"{BOX} so", "GOOD"], f"{BOX} so<|user|>GOOD<|user|>"),
    ],
    ids=str,
)
def test_each_answer_learns_the_named_stop(
    folder: Path, tmp_path: Path, answers: list[str], loss: str, *, blocks: bool
) -> None:
    """Also one that is empty, or that ends in another special token; the user's text bears no loss."""
    template = GLM if blocks else GLM.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "t.jinja").write_text(template)
    talk = [each for said in answers for each in (ASKED, SAID | {"content": said})]
    ((text, said),) = shown(folder, talk, template=tmp_path / "t.jinja", end=["<|user|>"])
    assert said == loss
    assert text == "".join(f"<|user|>a<|assistant|>{each}" for each in answers) + "<|user|>"


def test_an_empty_answer_among_others(folder: Path, tmp_path: Path) -> None:
    """Its stop bears loss, or, where blocks tell what is said and it has none, it is refused."""
    talk = [ASKED, SAID | {"content": ""}, ASKED, SAID]
    (tmp_path / "t.jinja").write_text(GLM)
    with pytest.raises(mf.errors.StoreError, match=r"message 1 .assistant.: empty, and no block"):
        chat_encoder(folder, tmp_path / "t.jinja", end=["<|user|>"]).encode([talk])
    (tmp_path / "t.jinja").write_text(GLM.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    ((_, said),) = shown(folder, talk, template=tmp_path / "t.jinja", end=["<|user|>"])
    assert said == "<|user|>GOOD<|user|>"


def test_a_named_stop_that_ends_no_answer_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(GLM.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    with pytest.raises(mf.errors.StoreError, match=r"ends by none of '<\|user\|>'.*has to name that too"):
        chat_encoder(folder, tmp_path / "t.jinja", end=["<|user|>"]).encode([[ASKED, SAID, SAID]])


def test_blocks_of_a_template_that_prints_the_newest_thoughts_alone(folder: Path, tmp_path: Path) -> None:
    """A turn's own blocks are found, or the conversation is refused: another's never bear loss in their place."""
    (tmp_path / "t.jinja").write_text(
        "{% set asked = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
        "{% if m.reasoning_content and loop.index0 > asked.last %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    how: dict[str, Any] = {"template": tmp_path / "t.jinja", "ignore": ["reasoning_content"]}
    bad, thought = SAID | {"content": "BAD", "weight": 0}, SAID | {"reasoning_content": "because"}
    ((_, said),) = shown(folder, [ASKED, bad, ASKED, thought], **how)
    assert said == "[because]GOOD<|end|>"
    with pytest.raises(
        mf.errors.StoreError, match=r"message 1 .assistant.: the template prints earlier answers"
    ):
        chat_encoder(folder, **how).encode([[ASKED, thought, ASKED, bad]])


KEYS = st.dictionaries(
    st.sampled_from(["weight", "loss", "masked", "mood", "name", "reasoning_content", "id"]),
    st.sampled_from([0, 1, False, True, "text", None, 0.5]),
    max_size=2,
)


@settings(max_examples=cases(80, 1_000), deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["user", "assistant"]), st.text("abc", min_size=1), KEYS),
        min_size=1,
        max_size=5,
    )
)
def test_every_key_is_in_the_text_or_the_mask_or_refused_by_name(
    folder: Path, turns: list[tuple[str, str, dict[str, Any]]]
) -> None:
    """Against a plain loop over the messages."""
    messages = [{"role": role, "content": f"{k}{text}", **keys} for k, (role, text, keys) in enumerate(turns)]
    wanted, refused = "", set[str]()
    for (role, text, keys), k in zip(turns, range(len(turns))):
        given = {name: value for name, value in keys.items() if value is not None}
        for name, value in given.items():
            if name in ("weight", "loss", "masked"):
                bears = bool(value) != (name == "masked") if value in (0, 1) else None
                loses = bears and role == "user" and name != "masked"  # it says that it is not hidden
                refused |= {name} if bears is None or loses else set()
            elif name == "reasoning_content":
                refused |= {name} if value != "text" else set()
            elif name != "id" and (name, role) != ("name", "assistant"):  # what the template reads of some
                refused.add(name)
        said = [
            bool(value) != (name == "masked")
            for name, value in given.items()
            if name in ("weight", "loss", "masked")
        ]
        if role == "assistant" and all(said):
            wanted += f"{given['name']}: " if given.get("name") else ""
            wanted += f"[{given['reasoning_content']}]" if "reasoning_content" in given else ""
            wanted += f"{k}{text}<|end|>"
    try:
        ((_, said_text),) = shown(folder, messages)
    except mf.errors.StoreError as error:
        text = str(error)
        assert any(name in text for name in refused) or re.search(
            "contradict|nothing of it|no message of the assistant", text
        )
        return
    assert said_text == wanted and refused == set()
