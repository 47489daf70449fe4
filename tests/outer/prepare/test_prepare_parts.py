"""The pure part of `prepare`: how inputs are cut, what stays, and numbers past 2**31."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import tree

from meshfeed.errors import StoreError
from meshfeed.prepare.inputs.files import Input, cut
from meshfeed.prepare.job.merge import bases_of, first_of_each, set_apart
from meshfeed.store import DatasetWriter, IndexedWriter
from soak import cases

_HASHES = st.lists(st.tuples(st.integers(0, 3), st.integers(2**64 - 3, 2**64 - 1)), max_size=40)


@settings(deadline=None, max_examples=cases(50))
@given(_HASHES)
def test_the_first_of_equal_documents_stays(hashes):
    seen, keep = set(), []
    for each in hashes:
        keep.append(each not in seen)
        seen.add(each)
    assert first_of_each(np.array(hashes, np.uint64).reshape(-1, 2)).tolist() == keep


@settings(deadline=None, max_examples=cases(50))
@given(st.floats(0, 1, exclude_max=True), st.lists(st.integers(0, 2**64 - 1)))
def test_a_share_is_exact_integer_arithmetic(share, firsts):
    hashes = np.array([[first, 0] for first in [0, 2**64 - 1, *firsts]], np.uint64)
    told = [first < int(share * 2**64) for first in [0, 2**64 - 1, *firsts]]
    assert set_apart(hashes, share).tolist() == told


@settings(deadline=None, max_examples=cases(50))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40)), max_size=20))
def test_numbers_of_lines_go_on_within_a_file_past_2_to_the_31(spans):
    inputs, counts = np.array(sorted(i for i, _ in spans), np.int64), [count for _, count in spans]
    expected, before = [], {}
    for i, count in zip(inputs.tolist(), counts):
        expected.append(before.get(i, 0))
        before[i] = expected[-1] + count
    assert bases_of(counts, inputs).tolist() == expected


@settings(deadline=None, max_examples=cases(50))
@given(
    st.lists(st.tuples(st.sampled_from(["text", "jsonl", "gz"]), st.integers(0, 2**45)), max_size=6),
    st.integers(2**40, 2**44),
)
def test_spans_cover_every_byte_once_and_parts_are_even(files, part_bytes):
    inputs = [
        Input(f"/{i}", "text" if kind == "text" else "jsonl", "gz" if kind == "gz" else None, size, "")
        for i, (kind, size) in enumerate(files)
    ]
    spans = cut(inputs, ("text",), part_bytes)
    assert spans.dtype == np.int64
    parts = spans[:, 0].tolist()
    assert parts == sorted(parts)
    assert set(parts) == set(range(len(set(parts)))), "no part is empty"
    for i, each in enumerate(inputs):
        mine = [span[2:] for span in spans.tolist() if span[1] == i]
        if each.kind == "jsonl" and each.codec is None:
            edges = [0, *(end for _, end in mine)]
            assert [begin for begin, _ in mine] == edges[:-1]
            assert edges[-1] == each.size_bytes
        else:
            assert mine == [[0, 1]]
    sizes, filled = np.zeros(len(set(parts))), np.zeros(len(set(parts)))
    for part, i, begin, end in spans.tolist():
        plain = inputs[i].kind == "jsonl" and inputs[i].codec is None
        size = end - begin if plain else inputs[i].size_bytes
        sizes[part] += size
        filled[part] += size > 0
    assert np.all((sizes <= part_bytes) | (filled == 1)), "what is too large for a part is alone in one"


@settings(deadline=None, max_examples=cases(50))
@given(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=5), max_size=12), st.integers(0, 12))
def test_documents_added_together_are_documents_added_alone(tmp_path_factory, documents, at):
    one, together = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("together")
    with DatasetWriter(one / "d", {"tokens": "u2", "mask": "u1"}) as writer:
        for tokens in documents:
            writer.add_document(tokens=np.array(tokens, np.uint16), mask=np.ones(len(tokens), np.uint8))
    with DatasetWriter(together / "d", {"tokens": "u2", "mask": "u1"}) as writer:
        for some in (documents[:at], documents[at:]):
            tokens = np.array([token for each in some for token in each], np.int64)
            lengths = np.array([len(each) for each in some], np.int64)
            writer.add_documents(lengths, tokens=tokens, mask=np.ones(tokens.size, np.uint8))
    assert tree(one) == tree(together)


def test_documents_added_together_must_be_what_their_lengths_say(tmp_path):
    with pytest.raises(StoreError, match="tokens of shape"), IndexedWriter(tmp_path / "a", "u2") as writer:
        writer.add_documents(np.zeros(3, np.uint16), np.array([1, 1]))
    with pytest.raises(StoreError, match="token 0 is 70000"), IndexedWriter(tmp_path / "a", "u2") as writer:
        writer.add_documents(np.array([1, 70000]), np.array([1, 1]))
    with pytest.raises(StoreError, match="within a document"), IndexedWriter(tmp_path / "a", "u2") as writer:
        writer.add_sequence([1])
        writer.add_documents(np.zeros(1, np.uint16), np.array([1]))
