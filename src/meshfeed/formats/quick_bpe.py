"""gigatoken, a fast encoder of byte-level BPE, for texts of which it gives the ids that `tokenizers` gives.

It passes over some settings of a tokenizer without an error, and its tables are of a newer Unicode. So it is
used for tokenizers of a known form, if a trial shows no difference, and for texts in NFC, of characters that
have not changed since Unicode 3.2. Symbols that came later, such as emoji, are taken too, if no pattern tells
symbols from unknown characters. `tokenizers` encodes the rest.
"""

from __future__ import annotations

import importlib
import json
import re
import unicodedata
from functools import cache
from itertools import groupby, product
from typing import Any

import numpy as np

from meshfeed.arrays import Array
from meshfeed.extras import untested

_ANEW_CHARACTERS = 1 << 28  # it keeps every word that it has met, so it is made anew
_TRIAL = 256, 64  # texts, and tokens of each
_NO_SYMBOLS = {"L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "N"}
"""Classes of patterns for which a symbol and an unknown character are the same."""


class QuickBPE:
    """Encodes some texts.

    Args:
        content: of the tokenizer's JSON file.
        symbols: whether it takes symbols that came after Unicode 3.2.

    The constructor raises what gigatoken raises.
    """

    def __init__(self, content: bytes, *, symbols: bool = False) -> None:
        self._content, self._symbols = content, symbols
        self._begin()

    def encode(self, text: str) -> Array | None:
        """Its tokens, int64 [n]; None for a text that `tokenizers` may read otherwise."""
        if not text.isascii() and (
            _unsettled(self._symbols).search(text) or not unicodedata.is_normalized("NFC", text)
        ):
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
    try:
        importlib.import_module("gigatoken")  # before a large file is parsed
        if untested("gigatoken") or not _is_known(said := json.loads(content), tokenizer):
            return None
        classes = set(re.findall(r"(?:\\[pP]\{|\[:)\^?(\w+)", json.dumps(said["pre_tokenizer"])))
        quick = QuickBPE(content, symbols=classes <= _NO_SYMBOLS)
        some = np.random.default_rng(0).integers(0, tokenizer.get_vocab_size(), _TRIAL)
        texts = tokenizer.decode_batch(some.tolist(), skip_special_tokens=False)
        expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [quick.encode(text) for text in texts]
        if all(ids is None or ids.tolist() == one.ids for ids, one in zip(found, expected)):
            return quick
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # what it does not read raises various types; a panic is no Exception
        pass
    return None


def _is_known(said: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a tokenizer's JSON is byte-level BPE, with no setting that gigatoken passes over."""
    model, before, added = said["model"], said["pre_tokenizer"], said["added_tokens"]
    *splits, last = before.get("pretokenizers", [before])
    alphabet = importlib.import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet()
    # `tokenizers` looks for those that are not normalized first, in the text before it is normalized
    first, second = (
        [each["content"] for each in added if each["normalized"] is late] for late in (False, True)
    )
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
        and not any(each["single_word"] or each["lstrip"] or each["rstrip"] for each in added)
        and all(unicodedata.is_normalized("NFC", each["content"]) for each in added)
        and not any(a[:1] in b or b[:1] in a for a, b in product(first, second))
        and tokenizer.get_vocab().keys() >= set(alphabet)
    )


@cache
def _unsettled(symbols: bool) -> re.Pattern[str]:
    """Matches a character that Unicode 3.2 did not have, or had in another category.

    symbols: not if it is a symbol that 3.2 did not have.
    """
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category

    def is_settled(c: int) -> bool:
        before, now = old(chr(c)), new(chr(c))
        is_later = before in ("Cn", "So") and now == "So" and not unicodedata.decomposition(chr(c))
        return (symbols and is_later) or (c < 1 << 16 and before == now not in ("Cn", "Cs"))

    # all symbols are in the first two planes
    runs = ([*run] for is_one, run in groupby(range(1 << 17), is_settled) if is_one)
    return re.compile("[^" + "".join(rf"\U{run[0]:08x}-\U{run[-1]:08x}" for run in runs) + "]")
