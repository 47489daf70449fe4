"""gigatoken is used only where its tokens are those of `tokenizers`."""

from __future__ import annotations

import json
import os
import random
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from meshfeed.formats import quick_bpe as module
from meshfeed.formats.quick_bpe import QuickBPE, quick_bpe
from meshfeed.formats.tokenizers import Fast
from meshfeed.store.tokenizer import TokenizerFile
from soak import cases

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SOURCES = [path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]]
PIECES = [
    "'s",
    "'LL",
    "'ſ",
    "<|end|>",
    "12345",
    "\r\n",
    "\u00a0",
    "\u2028",
    "  \n ",
    "\x1c",
    "\u0301",
    "한",
    "日本",
    "🙂",
    "\u0c5c's",
]
STRANGE = "\u0c5c's"
"""The first is a letter since Unicode 17; tokenizers and gigatoken cut this text at different places."""


def trained(splits: list[str], normalizer: Any = None) -> bytes:
    """The file of a byte-level BPE."""
    made = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        made.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator(SOURCES[:20], trainer)
    return made.to_str().encode()


BYTES = pre_tokenizers.ByteLevel.alphabet()
KINDS = ("gpt2", "llama3", "qwen")


@cache
def file_of(kind: str) -> bytes:
    """The file of a tokenizer that cuts words as this kind does."""
    if kind == "gpt2":
        return trained([])
    if kind == "llama3":
        return trained([CL100K])
    return trained([CL100K.replace("{1,3}", "")], normalizers.NFC())


@cache
def fast_of(kind: str) -> Fast:
    return Fast(TokenizerFile("t.json", "tokenizers", file_of(kind)))


def own(content: bytes) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(content)


def ids(content: bytes, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in own(content).encode_batch_fast(texts, add_special_tokens=False)]


def quick(content: bytes) -> QuickBPE | None:
    return quick_bpe(content, own(content))


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    said = json.loads(file_of("gpt2"))
    change(said)
    return json.dumps(said).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_sources_are_the_same_and_most_are_quick(kind: str) -> None:
    made = quick(file_of(kind))
    assert made is not None
    found = [made.encode(text) for text in SOURCES]
    assert sum(tokens is not None for tokens in found) > len(SOURCES) // 2
    for tokens, expected in zip(found, ids(file_of(kind), SOURCES)):
        assert tokens is None or (tokens.dtype, tokens.tolist()) == (np.int64, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_are_the_same(kind: str) -> None:
    """Of every character that it takes, next to any other, and of what patterns treat apart."""
    rng, made = random.Random(3), quick(file_of(kind))
    assert made is not None
    unsettled = module._unsettled(symbols=True)
    taken = [chr(c) for c in range(sys.maxunicode) if chr(c).isascii() or not unsettled.search(chr(c))]
    assert len(taken) > 50_000
    for _ in range(cases(1, 500)):
        texts = []
        for _ in range(1000):
            first = rng.randrange(len(taken))
            near = taken[first : first + 200]
            parts = [
                rng.choice([rng.choice(near), rng.choice(taken), rng.choice(PIECES), " "]) for _ in range(40)
            ]
            texts.append("".join(parts))
        found = [made.encode(text) for text in texts]
        assert all(
            tokens is None or tokens.tolist() == other
            for tokens, other in zip(found, ids(file_of(kind), texts))
        )
        assert any(tokens is not None for tokens in found)


@settings(max_examples=cases(60), deadline=None)
@given(
    st.lists(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)), max_size=8),
    st.sampled_from(KINDS),
)
def test_the_tokenizer_gives_what_tokenizers_gives(texts: list[str], kind: str) -> None:
    given = fast_of(kind).encode(texts)
    assert [tokens.tolist() for tokens in given] == ids(file_of(kind), texts)


def test_characters_of_a_later_unicode_are_left_to_tokenizers() -> None:
    made = quick(file_of("gpt2"))
    assert made is not None and unicodedata.unidata_version >= "14"
    for text in (STRANGE, "\u200b", "\U00010000", "a\u0c5cb", "\U0001d15e"):
        assert made.encode(text) is None
    assert made._own.encode(STRANGE).tolist() != ids(file_of("gpt2"), [STRANGE])[0], (
        "as its own words would be"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_symbol_of_a_later_unicode_is_the_same(kind: str) -> None:
    made, category = quick(file_of(kind)), unicodedata.category
    assert made is not None
    later = [chr(c) for c in range(sys.maxunicode) if category(chr(c)) == "So"]
    texts = [f"a{c}b 1{c}2 {c} {c}{c}\n{c}'s{c}\u0301 \r\n{c}." for c in later]
    found = [made.encode(text) for text in texts]
    assert sum(tokens is not None for tokens in found) > 5_000
    for tokens, expected in zip(found, ids(file_of(kind), texts)):
        assert tokens is None or tokens.tolist() == expected


@pytest.mark.parametrize("named", [r"\p{S}+", r"[^\p{^So}]", r"[[:graph:]]+"])
def test_symbols_are_left_to_tokenizers_where_a_pattern_names_them(named: str) -> None:
    made = quick(trained([named, CL100K]))
    assert made is None or made.encode("🙂") is None
    assert QuickBPE(file_of("gpt2"), symbols=False).encode("🙂") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["added_tokens"][0].update(single_word=True),
        lambda said: said["added_tokens"][0].update(lstrip=True),
        lambda said: said["added_tokens"][0].update(rstrip=True),
        lambda said: said["model"].update(end_of_word_suffix="</w>"),
        lambda said: said["model"].update(dropout=0.5),
        lambda said: said["pre_tokenizer"].update(use_regex=False),
        lambda said: said["pre_tokenizer"].update(add_prefix_space=True),
        lambda said: said.update(pre_tokenizer=None),
        lambda said: said.update(normalizer={"type": "Lowercase"}),
        lambda said: said["model"]["vocab"].pop(
            next(byte for byte in BYTES if byte not in str(said["model"]["merges"]))
        ),
    ],
)
def test_other_forms_are_left_to_tokenizers(change: Callable[[dict[str, Any]], object]) -> None:
    content = changed(change)
    assert quick(content) is None


ADDED = ["<s>", "the", "hello", " W", "é", "e\u0301", "trường", "  ", "<", "1", "\n\n", "<|end|>x"]


def test_added_tokens_beside_anything_are_the_same() -> None:
    """Random words added to tokenizers, in texts of them, white space and marks that compose with letters."""
    rng, num_quick = random.Random(5), 0
    for case in range(cases(25, 600)):
        made = own(file_of(rng.choice(KINDS)))
        for word in rng.sample(ADDED, rng.randint(1, 4)):
            strips = {side: rng.random() < 0.05 for side in ("lstrip", "rstrip")}
            token = tokenizers.AddedToken(word, normalized=rng.random() < 0.5, **strips)
            (made.add_special_tokens if rng.random() < 0.5 else made.add_tokens)([token])
        content = made.to_str().encode()
        found = quick(content)
        num_quick += found is not None
        pieces = [*ADDED, "don't", "cafe", "caf\u00e9", " ", "  ", "\u0301", "\u0338", "\u00a0", "\r\n", "12"]
        texts = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(150 if found else 0)]
        for text, expected in zip(texts, ids(content, texts)):
            tokens = found.encode(text) if found else None
            assert tokens is None or tokens.tolist() == expected, (
                case,
                text,
                made.get_added_tokens_decoder(),
            )
    assert num_quick > cases(25, 600) // 10


def test_a_panic_leaves_all_to_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As Rust's, by PyO3, which is no Exception."""

    def begin(self: QuickBPE, error: type[BaseException]) -> None:
        raise error

    monkeypatch.setattr(QuickBPE, "_begin", lambda self: begin(self, Panic))
    assert quick(file_of("gpt2")) is None
    monkeypatch.setattr(QuickBPE, "_begin", lambda self: begin(self, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quick(file_of("gpt2"))


def test_the_trial_finds_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    real = QuickBPE.encode

    def encode(self: QuickBPE, text: str) -> Any:
        found = real(self, text)
        return found if found is None else found[:-1]

    monkeypatch.setattr(QuickBPE, "encode", encode)
    assert quick(file_of("gpt2")) is None


@pytest.mark.parametrize("how", ["missing", "newer"])
def test_without_it_tokenizers_does_all(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "missing":
        monkeypatch.setitem(sys.modules, "gigatoken", None)
    else:
        monkeypatch.setattr(module, "untested", lambda extra: [(f"{extra} 0.11", False)])
    assert quick(file_of("gpt2")) is None
    fast = Fast(TokenizerFile("t.json", "tokenizers", file_of("gpt2")))
    assert [tokens.tolist() for tokens in fast.encode(SOURCES[:3])] == ids(file_of("gpt2"), SOURCES[:3])


def test_it_is_made_anew_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANEW_CHARACTERS", 1000)
    made = quick(file_of("gpt2"))
    assert made is not None
    seen = set()
    for _ in range(3):
        tokens = made.encode("a word, and " * 50)
        seen.add(made._own)
        assert tokens is not None and tokens.tolist() == ids(file_of("gpt2"), ["a word, and " * 50])[0]
    assert len(seen) > 1
