"""Which conversations can be trained with whose template: python tests/outer/prepare/families.py writes the table
of docs/finetuning.md.

The templates are those that trl ships, and axolotl for two families, both under the Apache License 2.0; that of Kimi K2,
which no package ships, is written here from its published format. The tokenizer is one of bytes with the special tokens that a template prints. What is trained is held against transformers: the
tokens are those of `apply_chat_template`, and what bears loss begins where its prompt ends, and ends with a token
that the family's generation config stops at. Where trl has a training template, its mask must agree, too.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from chats import tokenizer_in
from transformers import PreTrainedTokenizerFast

from meshfeed.errors import StoreError
from meshfeed.prepare import Chats, Multimodal
from meshfeed.prepare.encoding.encodings import expanded

PAGE = Path(__file__).parents[3] / "docs" / "finetuning.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"
TODAY = datetime.date.today()
SPECIAL = re.compile(
    r"<\|[\w/:.]+\|>|<｜[^｜]+｜>|<\w+\|>|<\|\w+>|\[/?[A-Z_]{3,}\]|</?s>|\[gMASK\]|<sop>|<bos>|<(?:start|end)_of_\w+>"
    r"|<[A-Z]+_TOKEN>|<image>|</?think>|</?tool_call>"
)
PLAIN = re.compile("</?(think|tool_call)>")
"""Added tokens that are not special."""


def shipped(package: str, folder: str) -> Path:
    """A folder of templates within an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / folder


HERE = Path(__file__).parent
FOLDERS = {"trl": "chat_templates", "axolotl": "utils/chat_templates/templates"}


CALL_ID = "call00001"


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: in the table.
        stock: of its template: the package, where it is not trl, and the file.
        ends: tokens that its generation config stops at.
        training: trl's template with generation blocks; "" for none.
        image: the token that stands for an image; "" if the models see none.
        variables: of its tokenizer.
        options: of `Chats`.
        call: the id of a tool call.
    """

    name: str
    stock: str
    ends: Sequence[str]
    training: str = ""
    image: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    call: str = CALL_ID

    @cached_property
    def source(self) -> str:
        return self._text(self.stock)

    def _text(self, name: str) -> str:
        package, _, rest = name.rpartition("/")
        folder = HERE if package == "here" else shipped(package or "trl", FOLDERS[package or "trl"])
        return (folder / f"{rest}.jinja").read_text()

    @cached_property
    def training_source(self) -> str:
        return self._text(self.training) if self.training else ""


QWEN, BOX = ["<|im_end|>"], "<|image_pad|>"
GLM = {"end": ("<|user|>", "<|observation|>")}
FAMILIES = [
    Family("Qwen2.5", "qwen2_5", QWEN, "qwen2_5_training"),
    Family("Qwen3", "qwen3", QWEN, "qwen3_training"),
    Family("Qwen3-2507", "qwen3_instruct_2507", QWEN, "qwen3_instruct_2507_training"),
    Family("Qwen3-VL", "qwen3_vl", QWEN, "qwen3_vl_training", BOX),
    Family("Qwen3.5", "qwen3_5_think", QWEN, "qwen3_5_think_training", BOX),
    Family("Qwen3.6", "qwen3_6", QWEN, "qwen3_6_training", BOX),
    Family("Qwen3.8", "qwen3_8", QWEN, "qwen3_8_training", BOX),
    Family("Nemotron 3 Nano", "nemotron_3_nano", QWEN, "nemotron_3_nano_training"),
    Family("Nemotron 3 Super", "nemotron_3_super", QWEN, "nemotron_3_super_training"),
    Family(
        "DeepSeek-V3",
        "deepseekv3",
        ["<｜end▁of▁sentence｜>"],
        "deepseekv3_training",
        variables={"bos_token": "<｜begin▁of▁sentence｜>"},
    ),
    Family("GLM-4.5", "glm4moe", ["<|user|>", "<|observation|>"], "glm4moe_training", options=GLM),
    Family("gpt-oss", "gptoss", ["<|return|>", "<|call|>"], "gptoss_training", options={"date": TODAY}),
    Family("Llama 3.1, 3.3", "llama3_1", ["<|eot_id|>"], variables={"bos_token": "<|begin_of_text|>"}),
    Family(
        "Gemma 3", "gemma3", ["<end_of_turn>"], "gemma3_training", "<start_of_image>", {"bos_token": "<bos>"}
    ),
    Family("Gemma 4", "gemma4_v5", ["<turn|>", "<|tool_response>"], "", "<|image|>", {"bos_token": "<bos>"}),
    Family(
        "Mistral (v3)",
        "axolotl/mistral_v3_tekken",
        ["</s>"],
        variables={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    Family("Kimi K2", "here/kimi_k2", ["<|im_end|>"], image="<|media_pad|>", call="functions.move:0"),
    Family(
        "LFM2.5",
        "lfm2_2_5_vl",
        ["<|im_end|>"],
        "lfm2_2_5_vl",
        "<image>",
        {"bos_token": "<|startoftext|>"},
    ),
    Family(
        "Cohere (Aya)",
        "cohere2",
        ["<|END_OF_TURN_TOKEN|>"],
        "cohere2_training",
        variables={"bos_token": "<BOS_TOKEN>"},
    ),
    Family("Phi-4", "axolotl/phi_4", ["<|im_end|>"], "axolotl/phi_4"),
]

TOOL = {
    "name": "move",
    "description": "Moves.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "move", "arguments": {"x": 1}}}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


ONE, TWO = [asked("one?"), said("first.")], [asked("two?"), said("second.")]
ANSWERED = {"role": "tool", "tool_call_id": CALL_ID, "name": "move", "content": "done"}
LOOKED = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
    said("a cat."),
]
THOUGHT = [asked("one?"), said("first.", reasoning_content="so one")]
THOUGHT += [asked("two?"), said("second.", reasoning_content="so two")]
CASES: Mapping[str, tuple[list[dict[str, Any]], Mapping[str, Any]]] = {
    "one turn": (ONE, {}),
    "turns": (ONE + TWO, {}),
    "system": ([{"role": "system", "content": "Be brief."}, *ONE], {}),
    "tools": (ONE, {"tools": TOOLS}),
    "tools as text": (ONE, {"tools": str(TOOLS).replace("'", '"')}),
    "call": ([asked("go"), said("", tool_calls=[CALL]), ANSWERED, said("I went.")], {}),
    "thoughts": (THOUGHT, {}),
    "weight 0": ([ONE[0], ONE[1] | {"weight": 0}, *TWO], {}),
    "image": (LOOKED, {"images": [b"P6\n4 4\n255\n" + bytes(48)]}),
}
"""Messages, and columns beside them."""


@dataclass(frozen=True)
class Cell:
    """What becomes of a conversation.

    Attributes:
        how: train_on, with which it is trained; "refused".
        told: the refusal.
    """

    how: str
    told: str = ""


class Room:
    """A family's tokenizer in a folder, and transformers' own."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, source = family, family.source
        self._encoders = dict[tuple[str, bool], tuple[Chats | Multimodal, Any]]()
        found = {*SPECIAL.findall(source), *family.variables.values(), family.image or "<image>"}
        special = sorted(token for token in found if not PLAIN.fullmatch(token))
        self.folder = tokenizer_in(folder, source, special)
        made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        made.add_tokens(
            [tokenizers.AddedToken(token, normalized=False) for token in sorted(found - {*special})]
        )
        self.theirs = PreTrainedTokenizerFast(tokenizer_object=made, **family.variables)
        self.theirs.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(source)

    def cell(self, case: str) -> Cell:
        """Raises AssertionError where what is trained is not what transformers says."""
        messages, beside = self._messages(case), CASES[case][1]
        told = ""
        for how in ("all", "each"):
            wanted, encoder = self._encoder(how, "images" in beside)
            try:
                record = {"messages": messages, **beside}
                value = (
                    wanted.columns.sample(record, lambda _: b"")
                    if isinstance(wanted, Multimodal)
                    else wanted.columns.value(record)
                )
                made = encoder.encode(expanded(encoder, value), "it".format)
            except StoreError as error:
                told = told or str(error)
                continue
            self._check(case, how, made)
            return Cell(how)
        return Cell("refused", self._plainly(told))

    def _messages(self, case: str) -> list[dict[str, Any]]:
        return json.loads(json.dumps(CASES[case][0]).replace(CALL_ID, self.family.call))

    def _encoder(self, how: Any, images: bool) -> tuple[Chats | Multimodal, Any]:
        if (how, images) not in self._encoders:
            wanted: Chats | Multimodal
            wanted = Chats(tokenizer=str(self.folder), train_on=how, **self.family.options)
            if images:
                wanted = Multimodal(text=wanted, tokens={"image": self.family.image or "<image>"})
            self._encoders[how, images] = wanted, wanted.encoder()
        return self._encoders[how, images]

    def _plainly(self, told: str) -> str:
        told = re.sub(r"^it: (message \d+ \(\w+\)( has)?:? )?", "", told)
        return re.sub(r"template 'default' of \S+: ", "the template's own error: ", told)

    def _check(self, case: str, how: str, made: Sequence[Mapping[str, Any]]) -> None:
        messages = self._messages(case)
        bears = [k for k, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)]
        plain = [{name: each for name, each in m.items() if name != "weight"} for m in messages]
        tools = TOOLS if "tools" in case else None
        talks = [(plain, bears)] if how == "all" else [(plain[: k + 1], [k]) for k in bears]
        assert len(made) == len(talks)
        for columns, (talk, answers) in zip(made, talks):
            tokens, mask = columns["tokens"].tolist(), columns["loss_mask"].tolist()
            assert tokens == self._text(talk, tools) + self._end(talk), case
            assert mask == self._sampled(talk, answers, tools, tokens), (self.family.name, case)
            if self.family.training and (theirs := self._marked(talk, tools)) is not None:
                self._agree(tokens, mask, theirs, len(answers) == sum(m["role"] == "assistant" for m in talk))

    def _text(self, talk: Any, tools: Any, **options: Any) -> list[int]:
        how = {"tools": tools, "chat_template": self.family.source, **options}
        talk = [self._as_taken(message) for message in talk]
        return list(self.theirs.apply_chat_template(talk, return_dict=True, **how)["input_ids"])

    def _as_taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """DeepSeek's template takes the arguments of a call as text."""
        if "tool_calls" not in message or not self.family.name.startswith("DeepSeek"):
            return message
        return message | {"tool_calls": [CALL | {"function": {"name": "move", "arguments": '{"x": 1}'}}]}

    def _end(self, talk: Any) -> list[int]:
        ends = self.family.options.get("end")
        return [self.theirs.convert_tokens_to_ids(ends["tool_calls" in talk[-1]])] if ends else []

    def _sampled(self, talk: Any, answers: Sequence[int], tools: Any, tokens: list[int]) -> list[int]:
        """1 from where transformers' prompt for each answer ends, to the token that generation stops at."""
        stops = set(self.theirs.convert_tokens_to_ids(list(self.family.ends)))
        mask = [0] * len(tokens)
        for k in answers:
            prompts = [
                self._text(talk[:k], tools, add_generation_prompt=True, **more)
                for more in ({}, {"enable_thinking": False})
            ]
            begin = next((len(prompt) for prompt in prompts if tokens[: len(prompt)] == prompt), None)
            if begin is None:  # a prompt that opens thoughts, of which the text has none
                begin = next(i for i, (a, b) in enumerate(zip(prompts[0], tokens)) if a != b)
            last = len(self._text(talk[: k + 1], tools)) - 1
            while tokens[last] not in stops and last + 1 < len(tokens) and tokens[last + 1] in stops:
                last += 1  # the next turn's header ends it
            while tokens[last] not in stops:
                last -= 1
            mask[begin : last + 1] = [1] * (last + 1 - begin)
        if "{% generation %}" in self.family.source or "{%- generation" in self.family.source:
            marked = self._marked(talk, tools)  # the template's own word
            assert marked is not None
            return [a and b for a, b in zip(marked, self._owned(talk, answers, tools, len(tokens)))]
        return mask

    def _owned(self, talk: Any, answers: Sequence[int], tools: Any, size: int) -> list[int]:
        """1 in the whole of the messages that bear loss."""
        mask = [0] * size
        for k in answers:
            begin, end = (len(self._text(talk[:n], tools)) if n else 0 for n in (k, k + 1))
            mask[begin:end] = [1] * (end - begin)
        return mask

    def _marked(self, talk: Any, tools: Any) -> list[int] | None:
        """The mask of trl's training template; None if its text is another."""
        how = {"tools": tools, "chat_template": self.family.training_source}
        got = self.theirs.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True, **how
        )
        same = list(got["input_ids"]) == self._text(talk, tools) + self._end(talk)
        return list(got["assistant_masks"]) if same else None

    def _agree(self, tokens: list[int], mask: list[int], theirs: list[int], whole: bool) -> None:
        """Ours is within trl's, which also has the answer's header, the <think> of the prompt, and newlines."""
        assert all(b for a, b in zip(mask, theirs) if a)
        if whole:
            more = self.theirs.decode([t for t, a, b in zip(tokens, mask, theirs) if b and not a])
            assert re.fullmatch(
                r"(</?think>|<｜Assistant｜>|<｜tool▁outputs▁end｜>|<\|start\|>assistant|\s)*", more
            ), more


def table(folder: Path) -> tuple[str, dict[str, dict[str, Cell]]]:
    """The table in Markdown, and its cells by family and case."""
    found: dict[str, dict[str, Cell]] = {}
    for at, family in enumerate(FAMILIES):
        room = Room(family, folder / str(at))
        found[family.name] = {case: room.cell(case) for case in CASES}
    reasons = list(dict.fromkeys(cell.told for row in found.values() for cell in row.values() if cell.told))
    lines = [f"| | {' | '.join(CASES)} |", "|---" * (1 + len(CASES)) + "|"]
    for name, row in found.items():
        shown = [cell.how if not cell.told else f"({1 + reasons.index(cell.told)})" for cell in row.values()]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    told = [f"{number}. {_escaped(reason)}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *told, ""]), found


def _escaped(text: str) -> str:
    return re.sub(r"[<|*_\[\]{}]", lambda found: f"\\{found[0]}", text)


def on_page() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        text, _ = table(Path(made))
    page = PAGE.read_text()
    PAGE.write_text(page.replace(on_page(), text) if on_page() else page.replace(BEGIN, BEGIN + text))
