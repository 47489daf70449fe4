"""Foreign text: no error, log line or page of meshfeed hands a terminal what it would obey."""

from __future__ import annotations

import logging
import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.deliver.error_codec import ErrorRecord
from meshfeed.text import visible

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
foreign = st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b\x07\x9b\x85\u202e\u2067\u200f\u2028%"))


def obeyed(text: str) -> list[str]:
    """Characters that move a cursor, turn text around or end a line, by Unicode's own tables."""
    kinds = [(each, unicodedata.category(each), unicodedata.bidirectional(each)) for each in text]
    return [
        each
        for each, kind, turn in kinds
        if each not in "\n\t" and (kind in ("Cc", "Zl", "Zp") or turn in BIDI or each in "\u200e\u200f\u061c")
    ]


@given(foreign)
def test_what_is_shown_is_obeyed_by_nothing_and_stays_as_it_is_shown(text: str) -> None:
    shown = visible(text)
    assert not obeyed(shown) and visible(shown) == shown
    assert (shown == text) == (not obeyed(text))


@given(foreign)
def test_every_error_is_visible_here_and_on_peers(text: str) -> None:
    for error in (
        mf.errors.StoreError(text),
        mf.errors.PeerError(text, [1]),
        mf.errors.PartError(text, path="x"),
    ):
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == visible(text)
        assert str(ErrorRecord.of(error).exception()) == visible(text)
    assert not obeyed(str(ErrorRecord.of(ValueError(text)).exception()))


@given(foreign)
def test_every_line_of_the_log_is_visible(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = list[str]()
        patch.setattr(logging.Logger, "callHandlers", lambda _, record: seen.append(record.getMessage()))
        logging.getLogger("meshfeed").warning("%s: %d", text, 5)
        logging.getLogger("meshfeed").warning(f"{visible(text)} 100 %")
    assert seen == [f"{visible(text)}: 5", f"{visible(text)} 100 %"]
