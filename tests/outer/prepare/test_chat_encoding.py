"""Conversations -> tokens and masks: against transformers, and against bytes counted by hand."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from chats import chat_encoder, shown, tokenizer_in
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import meshfeed as mf
from meshfeed.errors import StoreError
from meshfeed.prepare.encoding.chat import ChatEncoder
from soak import cases, some

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
TEXTS = [
    "a plain question about tokens",
    "the answer is 42 , of course",
    "systems are strict",
    "ünïcödé ☃ 🎉",
]

CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """
{{- bos_token }}
{%- if tools %}
    {{- '<|head|>tools<|/head|>\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{% endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|head|>' + m['role'] + '<|/head|>\\n\\n' }}
    {%- if m['role'] == 'assistant' %}
        {%- generation %}
        {%- if m.tool_calls %}
            {%- for call in m.tool_calls %}{{- call.function | tojson }}{% endfor %}
        {%- else %}{{- m['content'] | trim }}{% endif %}
        {{- '<|eot|>' }}
        {%- endgeneration %}
    {%- elif m['role'] in ('user', 'system', 'tool') %}{{- m['content'] | trim + '<|eot|>' }}
    {%- else %}{{- raise_exception('nobody is called ' + m['role']) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}
"""
FORGETFUL = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.thinking is defined and loop.last %}{{- '[' + m.thinking + ']' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def plain(template: str) -> str:
    """The same template, as most are: it does not say what is generated."""
    for tag in ("generation", "endgeneration"):
        template = template.replace("{% " + tag + " %}", "").replace("{%- " + tag + " %}", "")
    return template


TEMPLATES = {"chatml": CHATML, "llama": LLAMA}


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS * 4, "\n\n\n", "  \n", "assistant\n", "user\n\n"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1])


@pytest.fixture(scope="module")
def folders(theirs: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, found = tmp_path_factory.mktemp("tokenizers"), dict[str, Path]()
    for name, template in TEMPLATES.items():
        for kind, source in (("blocks", template), ("plain", plain(template))):
            theirs.chat_template = source
            found[f"{name} {kind}"] = base / f"{name}-{kind}"
            theirs.save_pretrained(found[f"{name} {kind}"])
    return found


def expected(
    theirs: PreTrainedTokenizerFast, template: str, messages: Any, **options: Any
) -> tuple[list[int], list[int]]:
    out = theirs.apply_chat_template(
        messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True, **options
    )
    return out["input_ids"], out["assistant_masks"]


CONTENT = st.text(st.sampled_from("ab \n ☃é,🎉<|>"), max_size=12) | st.sampled_from(TEXTS)
SPOKEN = st.text(st.sampled_from("ab \n ☃é,🎉<|>"), min_size=1, max_size=12) | st.sampled_from(TEXTS)


@cache
def encoder_of(folder: Path) -> ChatEncoder:
    """One for all examples: each starts a process."""
    return chat_encoder(folder)


def conversations(said: Any = SPOKEN) -> Any:
    turns = st.lists(st.tuples(CONTENT, said), min_size=1, max_size=4)

    def made(system: str | None, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return messages

    return st.builds(made, st.none() | CONTENT, turns)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["blocks", "plain"])
@settings(max_examples=cases(20, 400), deadline=None)
@given(messages=conversations())
def test_it_equals_transformers(
    theirs: PreTrainedTokenizerFast, folders: dict[str, Path], name: str, kind: str, messages: Any
) -> None:
    tokens, mask = expected(theirs, TEMPLATES[name], messages)
    (got,) = encoder_of(folders[f"{name} {kind}"]).encode([messages])
    assert got["tokens"].dtype == np.uint16 and got["loss_mask"].dtype == np.uint8
    assert got["tokens"].tolist() == tokens
    assert got["loss_mask"].tolist() == mask


@pytest.mark.parametrize("trims", [False, True])
@settings(max_examples=cases(40), deadline=None)
@given(messages=conversations())
def test_a_token_bears_loss_if_a_byte_of_it_is_said(
    theirs: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory, trims: bool, messages: Any
) -> None:
    # No special token ends what is said: tokens lie across its edges, and end inside a character.
    template = (
        "{% for m in messages %}{{ m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '(' + m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '\n' }}{% endfor %}"
    )
    folder = tmp_path_factory.getbasetemp() / f"edges{trims}"
    if not folder.exists():
        folder.mkdir()
        made = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
        if trims:
            made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
        made.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template)
    (got,) = encoder_of(folder).encode([messages])
    text = "".join(f"{m['role']}\n{'(' * (m['role'] == 'assistant')}{m['content']}\n" for m in messages)
    assert got["tokens"].tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert got["loss_mask"].tolist() == by_bytes(theirs, got["tokens"].tolist(), text, messages)


def by_bytes(theirs: PreTrainedTokenizerFast, tokens: list[int], text: str, messages: Any) -> list[int]:
    """The mask by how many bytes each token stands for."""
    special = {theirs.convert_tokens_to_ids(token): len(token) for token in SPECIAL}
    sizes = [special.get(t) or len(theirs.convert_ids_to_tokens(t)) for t in tokens]  # a letter a byte
    ends = np.cumsum(sizes)
    assert ends[-1] == len(text.encode())
    mask, at = np.zeros(len(tokens), int), 0
    for m in messages:
        at += len(m["role"]) + 1
        size = len(m["content"].encode()) + (m["role"] == "assistant")
        if m["role"] == "assistant":
            mask |= (ends > at) & (ends - sizes < at + size)
        at += size + 1
    return mask.tolist()


# -- tools, several templates, variables ----------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = [
    {"role": "system", "content": "add numbers"},
    {"role": "user", "content": "1 + 1 ?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "it is 2"},
]


@pytest.mark.parametrize("kind", ["blocks", "plain"])
def test_tools(theirs: PreTrainedTokenizerFast, folders: dict[str, Path], kind: str) -> None:
    tokens, mask = expected(theirs, LLAMA, WITH_TOOLS, tools=TOOLS)
    (got,) = chat_encoder(folders[f"llama {kind}"]).encode([{"messages": WITH_TOOLS, "tools": TOOLS}])
    assert (got["tokens"].tolist(), got["loss_mask"].tolist()) == (tokens, mask)
    said = [theirs.decode(part) for part in runs(tokens, mask)]
    assert said == ['{"name": "add", "arguments": {"a": 1, "b": 1}}<|eot|>', "it is 2<|eot|>"]
    (last,) = chat_encoder(folders[f"llama {kind}"], train_on="last").encode(
        [{"messages": WITH_TOOLS, "tools": TOOLS}]
    )
    assert last["tokens"].tolist() == tokens
    assert [theirs.decode(part) for part in runs(tokens, last["loss_mask"])] == ["it is 2<|eot|>"]


def runs(tokens: Any, mask: Any) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    return [list(tokens[a:b]) for a, b in edges.reshape(-1, 2).tolist()]


def test_the_template_for_tools_is_taken_where_there_is_one(
    theirs: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    theirs.chat_template = {"default": plain(CHATML), "tool_use": plain(LLAMA)}
    theirs.save_pretrained(tmp_path / "files")
    theirs.chat_template = None
    theirs.save_pretrained(tmp_path / "config")
    config = json.loads((tmp_path / "config" / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": plain(CHATML)}, {"name": "tool_use", "template": plain(LLAMA)}]
    config["chat_template"] = named
    (tmp_path / "config" / "tokenizer_config.json").write_text(json.dumps(config))
    talk = WITH_TOOLS[:2] + WITH_TOOLS[-1:]
    for folder in (tmp_path / "files", tmp_path / "config"):
        without, with_tools = chat_encoder(folder).encode([talk, {"messages": talk, "tools": TOOLS}])
        assert without["tokens"].tolist() == expected(theirs, CHATML, talk)[0]
        assert with_tools["tokens"].tolist() == expected(theirs, LLAMA, talk, tools=TOOLS)[0]


def test_a_template_of_its_own_variables_and_a_date(theirs: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    theirs.backend_tokenizer.save(str(tmp_path / "tok.json"))
    (tmp_path / "t.jinja").write_text(
        "{{ bos_token }}{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no date' }}"
        "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    talk = [{"role": "assistant", "content": "hi"}]
    options: dict[str, Any] = {"variables": {"bos_token": "<|begin|>"}, "date": datetime.date(2026, 1, 31)}
    encoder = chat_encoder(tmp_path / "tok.json", tmp_path / "t.jinja", **options)
    (got,) = encoder.encode([talk])
    assert theirs.decode(got["tokens"]) == "<|begin|>31 Jan 2026assistant:hi"
    undated = chat_encoder(tmp_path / "tok.json", tmp_path / "t.jinja")
    assert theirs.decode(undated.encode([talk])[0]["tokens"]) == "no dateassistant:hi"
    assert encoder.digest != undated.digest
    for path in tmp_path.iterdir():
        carried = pickle.loads(pickle.dumps(encoder)) if path.exists() else encoder
        path.unlink()
    assert carried.encode([talk])[0]["tokens"].tolist() == got["tokens"].tolist()
    assert carried.digest == encoder.digest


def test_dtypes(folders: dict[str, Path]) -> None:
    folder, talk = folders["chatml plain"], [{"role": "assistant", "content": "hi"}]
    wide = chat_encoder(folder, dtype="int32")
    assert wide.columns == {"tokens": np.dtype("int32"), "loss_mask": np.dtype("uint8")}
    assert wide.encode([talk])[0]["tokens"].dtype == np.int32
    with pytest.raises(StoreError, match=r"347 tokens, which uint8 cannot tell apart; take a wider dtype"):
        chat_encoder(folder, dtype="uint8").encode([talk])


def test_nested_blocks_are_one(theirs: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    theirs.chat_template = (
        "{% for m in messages %}{% generation %}<{% generation %}{{ m.content }}{% endgeneration %}>"
        "{% endgeneration %};{% endfor %}"
    )
    theirs.save_pretrained(tmp_path)
    (got,) = chat_encoder(tmp_path).encode([[{"role": "assistant", "content": "a"}]])
    assert theirs.decode(got["tokens"][got["loss_mask"] == 1]) == "<a>"


def test_what_bears_loss_in_a_batch_is_what_the_assistant_says(
    theirs: PreTrainedTokenizerFast, folders: dict[str, Path], tmp_path: Path
) -> None:
    talks = [
        [
            {"role": "user", "content": TEXTS[i % 4]},
            {"role": "assistant", "content": f"answer {i} {TEXTS[-i % 4]}"},
        ]
        for i in range(12)
    ]
    encoder = chat_encoder(folders["chatml plain"])
    with mf.DatasetWriter(tmp_path / "chats", encoder.columns) as writer:
        for columns in encoder.encode(talks):
            writer.add_document(**columns)
    recipe = mf.Recipe(
        data=mf.open(tmp_path / "chats"), sequence=mf.Chat(), batch=mf.Batch(sequences=4), seed=1, epochs=1
    )
    said: list[str] = []
    for step in mf.Feed(recipe, packing=mf.Packing(capacity=256)):
        for m in step.microbatches:
            labels, mask = m["labels"][0].numpy(), m["loss_mask"][0].numpy()
            said += [theirs.decode(part) for part in runs(labels, mask)]
    assert sorted(said) == sorted(f"{talk[1]['content']}<|im_end|>" for talk in talks)


def test_conversations_of_sharegpt_are_the_same(folders: dict[str, Path]) -> None:
    """from and value for role and content, as its sets call who speaks."""
    encoder = encoder_of(folders["chatml plain"])
    called = {
        "human": "user",
        "gpt": "assistant",
        "system": "system",
        "observation": "tool",
        "bing": "assistant",
    }
    said = [{"from": name, "value": f"{name} says"} for name in called]
    plainly = [{"role": role, "content": f"{name} says"} for name, role in called.items()]
    for talk in (said, {"conversations": said}):
        ((theirs, ours),) = zip(encoder.encode([talk]), encoder.encode([plainly]))
        assert all(np.array_equal(theirs[name], ours[name]) for name in encoder.columns)


# -- what is wrong --------------------------------------------------------------------------------------

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@some(8)
@pytest.mark.parametrize(
    ("talk", "said"),
    [
        (None, "NoneType where a list of messages belongs"),
        ([], "an empty list where a list of messages belongs"),
        ({"messages": [USER, ANSWER], "tools": "add"}, "tools are str"),
        ([USER, "b"], "message 1: str where an object"),
        ([{"who": "human", "value": "a"}], "message 0: its role is None, found keys 'who', 'value'"),
        ([{"from": "human", "value": "a"}], "no message of the assistant"),
        ([{"from": "nurse", "value": "a"}], "message 0: from 'nurse' is not one of human, user, gpt"),
        ([{"from": ["gpt"], "value": "a"}], r"message 0: from \['gpt'\] is not one of"),
        ([{"from": "gpt", "text": "a"}], r"message 0 \(assistant\): no content"),
        ([USER, {"role": "assistant"}], r"message 1 \(assistant\): no content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], r"message 1 .*: no content"),
        ([USER, {"role": "assistant", "content": 5}], r"message 1 \(assistant\): content is int"),
        ([USER], "no message of the assistant"),
        (
            [USER, ANSWER, {"role": "nurse", "content": "x"}, ANSWER],
            r"message 2 \(nurse\): .*nobody is called",
        ),
        (
            [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
            r"message 1 \(assistant\): ",
        ),
        ([USER, {"role": "assistant", "content": "\ud800"}], "text is not Unicode"),
    ],
)
@pytest.mark.parametrize("kind", ["blocks", "plain"])
def test_malformed_conversations_are_named(folders: dict[str, Path], kind: str, talk: Any, said: str) -> None:
    encoder = chat_encoder(folders[f"llama {kind}"])
    with pytest.raises(StoreError, match=f"^line 8: {said}"):
        encoder.encode([[USER, ANSWER], talk], lambda i: f"line {7 + i}")


def test_templates_that_do_not_tell(theirs: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    theirs.chat_template = FORGETFUL
    theirs.save_pretrained(tmp_path)
    thought = ANSWER | {"thinking": "hm"}
    (one,) = chat_encoder(tmp_path).encode([[USER, thought]])
    assert theirs.decode(one["tokens"][one["loss_mask"] == 1]) == "[hm]b<|im_end|>"
    talk = [USER, thought, USER, thought]
    with pytest.raises(
        StoreError, match=r"^conversation 0: message 1 \(assistant\): its text, once messages"
    ):
        chat_encoder(tmp_path).encode([talk])
    (last,) = chat_encoder(tmp_path, train_on="last").encode([talk])
    assert theirs.decode(last["tokens"][last["loss_mask"] == 1]) == "[hm]b<|im_end|>"
    theirs.chat_template = FORGETFUL.replace("'<|im_start|>assistant\\n' }}{% endif", "'<think>' }}{% endif")
    theirs.save_pretrained(tmp_path)
    with pytest.raises(StoreError, match=r"message 1 \(assistant\): the text before it is another"):
        chat_encoder(tmp_path).encode([[USER, thought]])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", r"template 'default' of .*, line 1: not a template"),
        ("{% generation %}x", "not a template"),
        ("{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}", "today's date: give one as date="),
        ("{{ messages[0].nobody.there }}", "has no attribute 'nobody'"),
        ("{{ messages.append(1) }}{% generation %}x{% endgeneration %}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}{% generation %}x{% endgeneration %}", "unsafe"),
        (
            "{% generation %}{% endgeneration %}x",
            "the template does not print its content, so it would be lost",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}",
            r"message 1 \(assistant\): the template prints 'assistant: ' .*, and nothing for add_generation_prompt",
        ),
        (
            "{% set x %} {% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}",
            "next to what is printed",
        ),
        ("\ufdd0{% generation %}x{% endgeneration %}", r"U\+FDD0"),
    ],
)
def test_broken_templates_are_named(
    folders: dict[str, Path], tmp_path: Path, template: str, said: str
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(StoreError, match=said):
        chat_encoder(folders["chatml plain"], tmp_path / "t.jinja").encode([[USER, ANSWER]])


def test_a_template_without_headers_needs_no_prompt(folders: dict[str, Path], tmp_path: Path) -> None:
    """Such as Llama 2's, whose answer follows the end of the question."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else ' ' + m.content }}{% endfor %}"
    )
    (one,) = chat_encoder(folders["chatml plain"], tmp_path / "t.jinja").encode([[USER, ANSWER]])
    assert one["loss_mask"].any()


@pytest.mark.parametrize("train_on", ["all", "last", "each"])
def test_a_header_that_no_prompt_prints_bears_no_loss(tmp_path: Path, train_on: Any) -> None:
    """Wherever the answer is: behind a question, behind a tool, or a call without text."""
    folder = tokenizer_in(
        tmp_path / "t",
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}",
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answered = [*asked, {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "I went."}]
    for talk in (asked, answered, [asked[0], answered[-1]]):
        with pytest.raises(StoreError, match=r"prints '<\|assistant\|>' before what the assistant says"):
            shown(folder, talk, train_on=train_on)


HEADERS = {"<|user|>": "<|assistant|>", "<|start|>user\n": "<|start|>assistant\n", "User: ": "Assistant: "}
PROMPT = "{% if add_generation_prompt %}{{ 'HEAD' }}{% endif %}"
PRINTED = {
    "for its prompt": PROMPT,
    "a stop": PROMPT.replace("{% endif", "{% else %}<|stop|>{% endif"),
    "never": "",
    "always": "{{ 'HEAD' }}",
    "mostly": "{{ 'HEAD'[:10] }}" + PROMPT.replace("'HEAD'", "'HEAD'[10:]"),
    "a footer": PROMPT.replace("{% endif", "{% else %}Bye.<|stop|>{% endif"),
    "a footer alone": PROMPT.replace("{{ 'HEAD' }}", "{% else %}Bye."),
}
THOUGHTS = {"none": "", "any": "<think>{{ m.reasoning_content or '' }}</think>"}


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Path]:
    """Tokenizers whose template prints a header before every message, and at its end as told."""
    special = ["<|user|>", "<|assistant|>", "<|start|>", "<|end|>", "<|stop|>"]
    body = "{% for m in messages %}{{ 'USER' if m.role == 'user' else 'HEAD' }}THOUGHTS{{ m.content }}{{ '<|end|>' }}{% endfor %}"
    made = {}
    for (user, header), when, thoughts in product(HEADERS.items(), PRINTED, THOUGHTS):
        inside = "{% if m.role != 'user' %}" + THOUGHTS[thoughts] + "{% endif %}"
        text = body.replace("THOUGHTS", inside) + PRINTED[when]
        text = text.replace("USER", user).replace("HEAD", header).replace("\n", "\\n")
        made[user, when, thoughts] = tokenizer_in(tmp_path_factory.mktemp("headed"), text, special)
    return made


@settings(max_examples=cases(40, 2_000), deadline=None)
@given(
    st.sampled_from([*HEADERS]),
    st.sampled_from([*PRINTED]),
    st.sampled_from([*THOUGHTS]),
    st.sampled_from(["all", "last", "each"]),
    st.lists(
        st.tuples(
            st.sampled_from(["A", "s", "tan", "Assistant", "User: ", "user", "x y", ":", "<"]),
            st.sampled_from(["", "hm"]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_no_header_bears_loss(
    headed: Any, user: str, when: str, thoughts: str, train_on: Any, said: list[tuple[str, str]]
) -> None:
    """Printed for its prompt alone, and else refused; also before and behind an answer that is a part of it."""
    said = [(text, thought if thoughts == "any" else "") for text, thought in said]
    answered = [{"role": "assistant", "content": text, "reasoning_content": more} for text, more in said]
    talk = [each for answer in answered for each in (USER, answer)]
    folder = headed[user, when, thoughts]
    if when == "a stop" and train_on == "all" and len(said) > 1:
        with pytest.raises(StoreError, match="once messages follow, is another"):
            shown(folder, talk, train_on=train_on)
        return
    if when not in ("for its prompt", "a stop"):
        with pytest.raises(StoreError, match="so that would bear loss"):
            shown(folder, talk, train_on=train_on)
        return
    made = shown(folder, talk, train_on=train_on)
    stop = "<|end|><|stop|>" if when == "a stop" else "<|end|>"
    answers = [(f"<think>{more}</think>" if thoughts == "any" else "") + text + stop for text, more in said]
    assert [bears for _, bears in made] == {"all": ["".join(answers)], "last": answers[-1:], "each": answers}[
        train_on
    ]


def test_what_is_missing_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such"):
        chat_encoder(tmp_path / "no-such").encode([[USER, ANSWER]])
    with pytest.raises(StoreError, match=r"no tokenizer\.json"):
        chat_encoder(tmp_path).encode([[USER, ANSWER]])
    (tmp_path / "tokenizer.json").write_bytes((folders["chatml plain"] / "tokenizer.json").read_bytes())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(StoreError, match="has no chat template"):
            chat_encoder(path).encode([[USER, ANSWER]])
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(StoreError, match=r"tokenizer_config.json: not (valid|a) JSON"):
        chat_encoder(tmp_path).encode([[USER, ANSWER]])
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StoreError, match="no tokenizer: "):
        chat_encoder(tmp_path, folders["chatml plain"] / "chat_template.jinja").encode([[USER, ANSWER]])
    with pytest.raises(StoreError, match="train_on='everything'"):
        chat_encoder(tmp_path, train_on="everything")  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "messages", "tools", "tool_calls", "x"]), inner)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]) | JSON, "content": st.text(max_size=5) | JSON},
    optional={"tool_calls": JSON, "thinking": JSON},
)


@pytest.mark.parametrize("name", ["llama blocks", "llama plain"])
@settings(max_examples=cases(25, 500), deadline=None)
@given(value=JSON | st.lists(MESSAGE, max_size=4))
def test_made_up_conversations_raise_nothing_but_our_errors(
    folders: dict[str, Path], name: str, value: Any
) -> None:
    try:
        (got,) = encoder_of(folders[name]).encode([value])
    except StoreError as error:
        assert str(error).startswith("conversation 0: ")
    else:
        assert got["tokens"].size == got["loss_mask"].size and got["loss_mask"].any()


def test_a_snapshot_of_the_hub_is_such_a_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its files are links to blobs whose names have no suffix."""
    original, snapshot = folders["llama blocks"], tmp_path / "models--a--b/snapshots/0123"
    (tmp_path / "models--a--b/blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for at, path in enumerate(sorted(original.iterdir())):
        (tmp_path / f"models--a--b/blobs/{at:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{at:040x}")
    assert {"tokenizer.json", "chat_template.jinja"} <= {path.name for path in snapshot.iterdir()}
    mine, theirs = chat_encoder(snapshot), chat_encoder(original)
    assert mine.digest == theirs.digest
    (got,), (wanted,) = mine.encode([[USER, ANSWER]]), theirs.encode([[USER, ANSWER]])
    assert all(got[name].tolist() == wanted[name].tolist() for name in wanted)
    (tmp_path / "a.jsonl").write_text('{"text": "some plain words"}\n')
    stores = [
        mf.open(tmp_path / "a.jsonl", tokenizer=each, cache=tmp_path / "c") for each in (snapshot, original)
    ]
    assert stores[0].fingerprint == stores[1].fingerprint
