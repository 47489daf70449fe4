"""Shapes of conversations in records, columns that nothing reads, and a conversation for each answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from chats import ASKED, SAID, chat_encoder, decoded, encoder_of, lines, shown, stored, tokenizer_in
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import Here

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.prepare import Chats, prepare
from meshfeed.prepare.inputs.conversation import TRAINED
from soak import cases

TEXT = "<|user|>a<|end|><|assistant|>GOOD<|end|>"
FORGETS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.index0 > ns.last %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3's: thoughts of answers before the last question are gone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_in(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def forgets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_in(tmp_path_factory.mktemp("forgets"), FORGETS)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "completion": "GOOD"},
        {"prompt": "a", "response": "GOOD"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "completion": "GOOD"},
        {"instruction": "a", "input": "", "output": "GOOD"},
        {"instruction": "a", "input": None, "output": "GOOD"},
        {"instruction": "", "input": "a", "output": "GOOD"},
        {"instruction": "a", "context": "", "response": "GOOD"},
        {"prompt": "a", "messages": [ASKED, SAID]},
        {"id": 5, "messages": [ASKED, SAID], "notes": None, "tags": [], "title": ""},
        {"conversation": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "GOOD"}]},
    ],
    ids=str,
)
def test_one_conversation_in_many_shapes(folder: Path, record: Any) -> None:
    assert shown(folder, record) == [(TEXT, "GOOD<|end|>")]


def test_what_an_instruction_is_applied_to_follows_it(folder: Path) -> None:
    ((text, said),) = shown(folder, {"instruction": "Add.", "input": "1 1", "output": "2", "system": "s"})
    assert text == "<|system|>s<|end|><|user|>Add.\n1 1<|end|><|assistant|>2<|end|>" and said == "2<|end|>"


def test_answers_in_a_prompt_bear_no_loss_unless_they_say_so(folder: Path) -> None:
    bad = SAID | {"content": "BAD"}
    ((_, said),) = shown(folder, {"prompt": [ASKED, bad, ASKED], "completion": [SAID, ASKED, SAID]})
    assert said == "GOOD<|end|>GOOD<|end|>"
    ((_, said),) = shown(folder, {"prompt": [ASKED, bad | {"weight": 1}, ASKED], "completion": "GOOD"})
    assert said == "BAD<|end|>GOOD<|end|>"
    for name in TRAINED:  # null, as Parquet has it where other messages say so, says nothing
        ((_, said),) = shown(folder, {"prompt": [ASKED, bad | {name: None}, ASKED], "completion": "GOOD"})
        assert said == "GOOD<|end|>"
    ((_, said),) = shown(folder, {"prompt": [ASKED, bad | {"masked": False}, ASKED], "completion": "GOOD"})
    assert said == "BAD<|end|>GOOD<|end|>"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"messages": [ASKED, SAID], "score": 0}, r"the record has 'score': .*--ignore-keys score\)"),
        ({"messages": [ASKED, SAID], "weight": 0}, "the record has 'weight'"),
        (
            {"messages": [ASKED, SAID | {"mood": "x"}], "b": [1], "a": "text", "id": 1},
            r"^conversation 0: the record has 'a', the record has 'b', message 1 \(assistant\) has 'mood': .*"
            r"ignore=\['a', 'b', 'mood'\] \(--ignore-keys a,b,mood\)$",
        ),
        ({"messages": [ASKED, SAID], "documents": [{"text": "x"}]}, "the record has 'documents'"),
        ({"messages": [ASKED, SAID], "chat_template_kwargs": {"loud": 1}}, "the record has 'loud'"),
        ({"prompt": "a"}, "no 'messages' or 'conversations' or 'conversation', found 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"'chosen' and 'rejected' are a pair"),
        ({"prompt": {"x": 1}, "completion": "GOOD"}, "message 0 .user.: content is dict"),
        ({"instruction": "a", "input": 0, "output": "GOOD"}, "'input' is int; text belongs there"),
        ({"instruction": "a", "input": False, "output": "GOOD"}, "'input' is bool; text belongs there"),
        ({"instruction": "a", "input": {"x": 1}, "output": "GOOD"}, "'input' is dict; text belongs there"),
        ({"instruction": "a", "context": [], "output": "GOOD"}, "'context' is list; text belongs there"),
        ({"instruction": "a", "input": "", "output": None}, "^conversation 0: 'output' without a value"),
        ({"instruction": None, "input": "", "output": "a"}, "^conversation 0: 'instruction' without a value"),
        ({"prompt": "a", "completion": None}, "^conversation 0: 'completion' without a value"),
    ],
)
def test_what_nothing_reads_is_refused_by_name(folder: Path, record: Any, told: str) -> None:
    with pytest.raises(mf.errors.StoreError, match=told):
        chat_encoder(folder).encode([record])


def test_tools_of_a_template_without_tools_and_misspelled_variables(forgets: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(mf.errors.StoreError, match=r"the record has 'tools'.*--ignore-keys tools"):
        chat_encoder(forgets).encode([{"messages": [ASKED, SAID], "tools": tools}])
    with pytest.raises(mf.errors.StoreError, match="no chat template of it reads enable_thinkin;"):
        chat_encoder(forgets, variables={"enable_thinkin": False}).check()


COLUMNS = st.dictionaries(
    st.sampled_from(["id", "source", "system", "weight", "tags", "prompt_id"]),
    st.sampled_from(["x", "a", "", 0, 1.5, None, [], ["x"], {"k": 1}]),
    max_size=3,
)
SHAPES = {
    "messages": lambda asked, said: {"messages": [asked, said]},
    "sharegpt": lambda asked, said: {
        "conversations": [
            {"from": "human", "value": asked["content"]},
            {"from": "gpt", "value": said["content"]},
        ]
    },
    "prompt": lambda asked, said: {"prompt": asked["content"], "completion": said["content"]},
    "completion": lambda asked, said: {"prompt": [asked], "completion": [said]},
    "alpaca": lambda asked, said: {"instruction": asked["content"], "output": said["content"]},
    "text": lambda asked, said: {"messages": json.dumps([asked, said])},
}


@settings(max_examples=cases(60, 1_000), deadline=None)
@given(columns=COLUMNS, shape=st.sampled_from(sorted(SHAPES)), said=st.text('bc{}" ', min_size=1))
def test_every_column_is_in_the_text_or_refused_by_name(
    folder: Path, columns: dict[str, Any], shape: str, said: str
) -> None:
    """In every shape; and what is ignored leaves the text as it is."""
    record = SHAPES[shape](ASKED, SAID | {"content": said}) | columns
    told = {name: value for name, value in columns.items() if value not in (None, "", [])}
    system = told.pop("system", "")
    lost = {name for name, value in told.items() if name != "id" and value not in ("a", said, system or "a")}
    wanted = f"<|system|>{system}<|end|>" if system else ""
    wanted = f"{wanted}<|user|>a<|end|><|assistant|>{said}<|end|>", f"{said}<|end|>"
    if not isinstance(system, str):
        with pytest.raises(mf.errors.StoreError, match="a system prompt that is no text"):
            encoder_of(folder).encode([record])
        return
    if lost:
        names = re.escape(",".join(sorted(lost)))
        with pytest.raises(mf.errors.StoreError, match=rf"\(--ignore-keys {names}\)$"):
            encoder_of(folder).encode([record])
    made = Chats(tokenizer=str(folder), ignore=sorted(lost))
    (columns_of,) = encoder_of(folder).encode([made.columns.value(record)])
    assert decoded(folder, columns_of["tokens"], columns_of["loss_mask"]) == wanted


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_command_that_goes_on_is_in_the_refusal(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], suffix: str
) -> None:
    rows = [{"prompt": "a", "completion": "GOOD", "source": "web", "score": 3}]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        lines(path, rows)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    words = ["prepare", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    words += ["--tokenizer", str(folder), "--chat"]
    assert main(words) == 2
    told = capfd.readouterr().err
    assert told.count("--ignore-keys score,source") == 1 and "Traceback" not in told, told
    assert "ignore=" not in told  # which is the cure in Python
    assert main([*words, "--ignore-keys", "score,source"]) == 0
    assert stored(folder, tmp_path / "out") == [(TEXT, "GOOD<|end|>")]


# -- a conversation for each answer -------------------------------------------------------------------------

REASONING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "one", "reasoning_content": "think one"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "two", "reasoning_content": "think two"},
]


def test_each_answer_is_trained_as_it_is_sampled(forgets: Path) -> None:
    with pytest.raises(mf.errors.StoreError, match=r'train_on="each" \(--train-on each\)'):
        chat_encoder(forgets).encode([REASONING])
    asked, told = "<|user|>a<|end|><|assistant|>", "<|end|><|user|>b<|end|><|assistant|>"
    assert shown(forgets, REASONING, train_on="each") == [
        (f"{asked}[think one]one<|end|>", "[think one]one<|end|>"),
        (f"{asked}one{told}[think two]two<|end|>", "[think two]two<|end|>"),
    ]
    quiet = [REASONING[0], REASONING[1] | {"weight": 0}, *REASONING[2:]]
    assert len(shown(forgets, quiet, train_on="each")) == 1


@settings(max_examples=cases(40, 500), deadline=None)
@given(
    said=st.lists(
        st.tuples(st.text("abc", min_size=1), st.sampled_from([None, 0, 1])), min_size=1, max_size=4
    )
)
def test_each_and_all_train_the_same_where_no_history_is_rewritten(folder: Path, said: Any) -> None:
    talk = [
        message
        for text, weight in said
        for message in (ASKED, {"role": "assistant", "content": text, "weight": weight})
    ]
    if all(weight == 0 for _, weight in said):
        with pytest.raises(mf.errors.StoreError, match="nothing of it is trained"):
            shown(folder, talk, train_on="each")
        return
    ((_, together),) = shown(folder, talk)
    apart = shown(folder, talk, train_on="each")
    assert "".join(said for _, said in apart) == together
    assert [said for _, said in apart] == [f"{text}<|end|>" for text, weight in said if weight != 0]
    assert all(text.endswith(said) for text, said in apart)


def test_answers_of_a_record_stay_together(forgets: Path, tmp_path: Path) -> None:
    """On one side of a validation set; repetitions are those of records."""
    talks = [[each | {"content": f"{each['content']} {n}"} for each in REASONING] for n in range(40)]
    broken = [*REASONING[:3], {"role": "assistant"}]
    rows = [{"messages": talk, "id": n} for n, talk in enumerate([*talks, *talks[:5], broken])]
    lines(tmp_path / "a.jsonl", rows)
    chats = Chats(tokenizer=str(forgets), train_on="each")
    made = prepare(
        [tmp_path / "a.jsonl"],
        tmp_path / "out",
        chats,
        engine=Here(),
        dedup=True,
        validation=0.5,
        max_errors=1,
    )
    assert (made.manifest["num_duplicates"], made.manifest["num_malformed"]) == (10, 1)
    sides = [stored(forgets, tmp_path / "out" / side) for side in ("train", "validation")]
    numbers = [{json.dumps(said).rstrip('<|end>"').split()[-1] for _, said in side} for side in sides]
    assert all(sides) and not numbers[0] & numbers[1] and sum(map(len, sides)) == 80


# -- two of one kind ----------------------------------------------------------------------------------------

CALL = '{"name": "move", "arguments": {"x": 0}}'


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (SAID | {"thinking": "so", "reasoning": "thus"}, "thinking and reasoning have different thoughts"),
        ({"from": "gpt", "value": "GOOD", "content": "x"}, "message 1: content beside value"),
        (
            {"from": "function_call", "value": CALL, "content": "x"},
            "message 1: content beside the function_call",
        ),
        ({"from": "function_call", "value": "[1]"}, "message 1: the function_call is no object"),
        ({"from": "function_call", "value": "[]"}, "message 1: the function_call is no object"),
        ({"from": "function_call"}, "message 1: the function_call is no object"),
    ],
    ids=str,
)
def test_one_of_two_never_vanishes(folder: Path, message: Any, told: str) -> None:
    with pytest.raises(mf.errors.StoreError, match=told):
        encoder_of(folder).encode([[ASKED, message, SAID]])


def test_several_calls_of_sharegpt_and_thoughts_of_two_names(folder: Path) -> None:
    calls = {"from": "function_call", "value": f"[{CALL}, {CALL}]"}
    assert shown(folder, [ASKED, calls])[0][1] == f"{CALL}{CALL}<|end|>"
    thinks = SAID | {"thinking": "", "reasoning": "so"}
    assert shown(folder, [ASKED, thinks])[0][1] == "[so]GOOD<|end|>"


def test_an_array_as_a_column_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(mf.errors.StoreError, match="the record has 'emb'"):
        encoder_of(folder).encode([{"messages": [ASKED, SAID], "emb": np.zeros(3)}])
