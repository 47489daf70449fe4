"""gigatoken, a fast encoder of byte-level BPE, for texts of which it gives the ids that `tokenizers` gives.

It passes over some settings of a tokenizer without an error, and its tables are of a newer Unicode. So it is
used for tokenizers of a known form, if a trial shows no difference, and for texts of characters that have not
changed since Unicode 3.2. `tokenizers` encodes the rest.
"""

from __future__ import annotations

import importlib
import json
import re
import unicodedata
from contextlib import suppress
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from meshfeed.columns import Array
from meshfeed.extras import untested

_ANEW_CHARACTERS = 1 << 28  # it keeps every word that it has met, so it is made anew
_TRIAL = 256, 64  # texts, and tokens of each


class QuickBPE:
    """Encodes some texts. content: of the tokenizer's JSON file.

    The constructor raises what gigatoken raises.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._begin()

    def encode(self, text: str) -> Array | None:
        """Its tokens, int64 [n]; None for a text with characters that `tokenizers` may know otherwise."""
        if not text.isascii() and _unsettled().search(text):
            return None
        self._rest -= len(text)
        if self._rest < 0:
            self._begin()
        return self._own.encode(text).astype(np.int64)

    def _begin(self) -> None:
        self._own: Any = importlib.import_module("gigatoken").Tokenizer.from_json(self._content)
        self._rest = _ANEW_CHARACTERS


def quick_bpe(content: bytes, tokenizer: Any) -> QuickBPE | None:
    """The quick encoder of a tokenizer; None without gigatoken, or if it may give other ids.

    content: of its JSON file. tokenizer: the `tokenizers.Tokenizer` of it.
    """
    with suppress(Exception):  # what it does not read raises various types
        importlib.import_module("gigatoken")  # before a large file is parsed
        if untested("gigatoken") or not _is_known(json.loads(content), tokenizer):
            return None
        quick = QuickBPE(content)
        some = np.random.default_rng(0).integers(0, tokenizer.get_vocab_size(), _TRIAL)
        texts = tokenizer.decode_batch(some.tolist(), skip_special_tokens=False)
        expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [quick.encode(text) for text in texts]
        if all(ids is None or ids.tolist() == one.ids for ids, one in zip(found, expected)):
            return quick
    return None


def _is_known(said: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a tokenizer's JSON is byte-level BPE, with no setting that gigatoken passes over."""
    model, before = said["model"], said["pre_tokenizer"]
    *splits, last = before.get("pretokenizers", [before])
    alphabet = importlib.import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet()
    others = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model["type"] == "BPE"
        and not any(model.get(name) for name in others)
        and (said.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
        and last["type"] == "ByteLevel"
        and not last["add_prefix_space"]
        and last.get("use_regex", True) == (not splits)
        and all(
            each["type"] == "Split" and each["behavior"] == "Isolated" and not each["invert"]
            for each in splits
        )
        and not any(each["single_word"] for each in said["added_tokens"])
        and tokenizer.get_vocab().keys() >= set(alphabet)
    )


@cache
def _unsettled() -> re.Pattern[str]:
    """Matches a character that Unicode 3.2 did not have, or had in another category."""
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    runs = groupby(range(1 << 16), lambda c: old(chr(c)) == new(chr(c)) not in ("Cn", "Cs"))
    settled = [[*run] for is_settled, run in runs if is_settled]
    return re.compile("[^" + "".join(rf"\u{run[0]:04x}-\u{run[-1]:04x}" for run in settled) + "]")
