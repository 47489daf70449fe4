"""A tokenizer of bytes with a chat template, and what of its conversations bears loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

import meshfeed as mf
from meshfeed.prepare.encoding.chat import ChatEncoder, Chats
from meshfeed.prepare.encoding.chat_template import TrainOn

ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "GOOD"}
SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")
TEMPLATE = """
{%- if style is defined %}{{- '(' + style + ')' }}{% endif %}
{%- if tools %}{%- for tool in tools %}{{- '<|tool|>' + tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{{- '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' and m.name %}{{- m.name ~ ': ' }}{% endif %}
{%- if m.reasoning_content is defined and keeps is not defined %}{{- '[' + m.reasoning_content + ']' }}{% endif %}
{%- if m.content %}{{- m.content }}{% endif %}
{%- if m.tool_calls %}{%- for call in m.tool_calls %}{{- call.function | tojson }}{% endfor %}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""


def tokenizer_in(folder: Path, template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> Path:
    """A folder with a tokenizer, a token a byte, and a template."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in special])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def chat_encoder(folder: Any, template: Any = None, **options: Any) -> ChatEncoder:
    """An encoder that has not looked at its files."""
    return ChatEncoder(Chats(tokenizer=folder, template=template, **options))


@cache
def encoder_of(folder: Path, train_on: TrainOn = "all") -> ChatEncoder:
    """One for all examples: each starts a process."""
    return chat_encoder(folder, train_on=train_on)


def shown(folder: Path, *values: Any, **options: Any) -> list[tuple[str, str]]:
    """The text of each conversation, and what of it bears loss."""
    free = options.keys() - {"train_on"}
    encoder = chat_encoder(folder, **options) if free else encoder_of(folder, **options)
    made = encoder.encode(values)
    return [decoded(folder, each["tokens"], each["loss_mask"]) for each in made]


def stored(folder: Path, out: Path) -> list[tuple[str, str]]:
    """The same of the documents of a store."""
    with mf.open(out) as store, store.columns["loss_mask"] as masks:
        sizes = store.lengths(np.arange(store.num_documents)).tolist()
        return [
            decoded(folder, store.read(n, 0, size), masks.read(n, 0, size)) for n, size in enumerate(sizes)
        ]


def decoded(folder: Path, tokens: Any, mask: Any) -> tuple[str, str]:
    decoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text, said = (
        decoder.decode(some.tolist(), skip_special_tokens=False) for some in (tokens, tokens[mask == 1])
    )
    return text, said


def lines(path: Path, rows: Sequence[Any]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
