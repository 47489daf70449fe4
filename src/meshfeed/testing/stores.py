"""Whether a token store, or a tokenizer, keeps the promises that rules and readers rest on."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.store import StreamStore
from meshfeed.store.tokenizer import tokenizer_file
from meshfeed.testing.difference import require
from meshfeed.testing.elsewhere import elsewhere

_NUM_READS = 20
_NUM_RANGES = 9
_LONGEST_RANGE = 3_000


def assert_store(
    store: StreamStore, documents: Sequence[npt.ArrayLike], *, seed: int = 0, timeout_s: float = 300.0
) -> None:
    """Ask a store everything that readers ask, and compare with its documents.

    documents: the tokens of every document, in order, as lists or as arrays of the store's dtype; some of
    them empty, if the format can hold such. seed: of the ranges that are read. timeout_s: how long a forked
    process may take.

    Raises AssertionError for a wrong count, length, offset, token or boundary; for a dtype that states a byte
    order ("<i4"), which memoryviews do not take for the native one; if anything outside the store is read
    without a StoreError; if a pickled or forked copy, a second `with` inside the first, or threads read
    something else; or if a store that was left reads something else when it is entered again.
    """
    wanted = _Wanted(documents, store.dtype)
    wanted.check_attributes(store)
    copies = {"a pickled copy": pickle.loads(pickle.dumps(store)), "a deep copy": copy.deepcopy(store)}
    with store:
        wanted.check_look_ups(store)
        wanted.check_reads(store, np.random.default_rng(seed))
        wanted.check_refusals(store)
        with store:
            wanted.check_all_read(store, "a second `with`")
        wanted.check_all_read(store, "the first `with`, after a second one")
        copies["a copy pickled while it was entered"] = pickle.loads(pickle.dumps(store))
        with ThreadPoolExecutor(4) as threads:
            others = [np.random.default_rng(seed + n) for n in range(8)]  # each reads other ranges
            readers = [
                threads.submit(wanted.check_reads, store, rng, " by a thread of four") for rng in others
            ]
        for reader in readers:
            reader.result()
    with store:
        wanted.check_all_read(store, "a store entered again")
        elsewhere("fork", timeout_s, wanted.check_all_read, store, "a forked process")
    for what, copied in copies.items():
        _equal(copied.fingerprint, store.fingerprint, f"fingerprint of {what}")
        with copied:
            wanted.check_all_read(copied, what)
    parts = list(store.verify())
    require(parts == sorted(parts) and all(0 < part <= 1 for part in parts), f"verify() yields {parts}")


class _Wanted:
    """What a store should say."""

    def __init__(self, documents: Sequence[npt.ArrayLike], dtype: np.dtype[Any]) -> None:
        for document in documents:
            if isinstance(document, np.ndarray):
                _equal(dtype, document.dtype, "dtype")
        self.documents = [np.asarray(document, dtype) for document in documents]
        self.stream = np.concatenate([np.zeros(0, dtype), *self.documents])
        self.lengths = np.array([document.size for document in self.documents], np.int64)
        self.offsets = self.lengths.cumsum() - self.lengths
        self.boundaries = self.offsets[self.lengths > 0]

    def check_attributes(self, store: StreamStore) -> None:
        _equal(store.num_documents, len(self.documents), "num_documents")
        _equal(len(store), len(self.documents), "len(store)")
        _equal(store.num_tokens, self.stream.size, "num_tokens")
        require(store.dtype.kind in "iuf", f"dtype {store.dtype}: tokens are numbers")
        # '<i4' equals 'i4', but memoryviews of the two do not exchange values
        native = np.dtype(store.dtype.name)
        require(
            store.dtype.str == native.str and _format_of(store.dtype) == _format_of(native),
            f"dtype {store.dtype!r} is not native: np.dtype({native.name!r}) is",
        )
        require(bool(store.fingerprint), "the fingerprint is empty")
        _equal(store.fingerprint, store.fingerprint, "fingerprint, asked for twice")
        facts = json.loads(json.dumps(store.facts()))
        require("format" in facts, f'facts() {facts} have no "format"')
        ends = store.shard_ends
        if ends is not None and ends.size:
            require(bool((np.diff(ends) >= 0).all()), f"shard_ends {ends} do not ascend")
            _equal(int(ends[-1]), len(self.documents), "the end of the last shard")

    def check_look_ups(self, store: StreamStore) -> None:
        every = np.arange(len(self.documents))
        for which in (every, every[::-1], every[:0]):
            _equal(store.lengths(which), self.lengths[which], f"lengths({which})")
            _equal(store.offsets(which), self.offsets[which], f"offsets({which})")
            both = self.offsets[which], self.lengths[which]
            _equal(store.extents(which), both, f"extents({which})")
        for column, beside in store.columns.items():
            with beside:
                _equal(beside.lengths(every), self.lengths, f"lengths of column {column!r}")

    def check_reads(self, store: StreamStore, rng: np.random.Generator, by: str = "") -> None:
        size = self.stream.size
        self.check_all_read(store, f"the whole stream{by}")
        for _ in range(_NUM_READS):
            starts = rng.integers(0, size + 1, _NUM_RANGES)
            stops = np.minimum(starts + rng.integers(0, _LONGEST_RANGE, _NUM_RANGES), size)
            ranges = list(zip(starts.tolist(), stops.tolist()))
            store.will_need(starts, stops)
            expected = np.concatenate([self.stream[a:b] for a, b in ranges])
            _equal(store.read_stream(starts, stops), expected, f"tokens of {ranges}{by}")
            out = np.empty_like(expected)
            require(store.read_stream(starts, stops, out=out) is out, "read_stream(out=) gives another array")
            _equal(out, expected, f"tokens of {ranges}, read into out={by}")
            inside = [self.boundaries[(self.boundaries > a) & (self.boundaries < b)] for a, b in ranges]
            found, counts = store.document_starts(starts, stops)
            _equal(found, np.concatenate(inside), f"document_starts of {ranges}")
            _equal(counts, np.array([len(each) for each in inside]), f"counts of document_starts of {ranges}")
        nothing = np.zeros(0, np.int64)
        _equal(store.read_stream(nothing, nothing).size, 0, "tokens of no range")
        store.will_need(np.zeros(1, np.int64), np.array([size]))
        store.forget_needs()
        for document in rng.permutation(len(self.documents))[:_NUM_RANGES].tolist():
            tokens = self.documents[document]
            for start, stop in ((0, tokens.size), (tokens.size // 2, tokens.size), (0, 0)):
                where = f"tokens {start}..{stop} of document {document}{by}"
                _equal(store.read(document, start, stop), tokens[start:stop], where)

    def check_refusals(self, store: StreamStore) -> None:
        size, count = self.stream.size, len(self.documents)
        wrong = np.empty(size + 1, store.dtype)
        refused: dict[str, Callable[[], object]] = {
            "read_stream past the end": lambda: store.read_stream(np.array([size]), np.array([size + 1])),
            "read_stream before the beginning": lambda: store.read_stream(np.array([-1]), np.array([0])),
            "read_stream(out=) of another size": lambda: store.read_stream(
                np.array([0]), np.array([size]), out=wrong
            ),
            "lengths of a document past the last": lambda: store.lengths(np.array([count])),
            "offsets of document -1": lambda: store.offsets(np.array([-1])),
            "read of a document past the last": lambda: store.read(count, 0, 0),
        }
        for what, ask in refused.items():
            try:
                ask()
            except StoreError:
                continue
            raise AssertionError(f"{what} raises no StoreError")

    def check_all_read(self, store: StreamStore, what: str) -> None:
        read = store.read_stream(np.zeros(1, np.int64), np.array([self.stream.size]))
        _equal(_format_of(read.dtype), _format_of(self.stream.dtype), f"memory format of tokens from {what}")
        _equal(read, self.stream, f"tokens from {what}")


def assert_tokenizer(name: str, texts: Sequence[str]) -> None:
    """Encode texts with a tokenizer, as stores of text do, and compare.

    name: as in `mf.open(path, tokenizer=name)`. texts: some examples.

    Raises AssertionError if tokens lie outside the vocabulary, depend on the other texts of a call, or differ
    in a pickled copy; if decode gives no str; or if the text of the end token becomes that token.
    """
    file = tokenizer_file(name)
    made, copied = file.load(), pickle.loads(pickle.dumps(file)).load()
    together = made.encode(texts)
    _equal(len(together), len(texts), "the number of encoded texts")
    for text, tokens, again in zip(texts, together, copied.encode(texts)):
        where = f"tokens of {text[:40]!r}"
        require(tokens.ndim == 1 and tokens.dtype.kind in "iu", f"{where}: {tokens!r} are not whole numbers")
        require(
            bool(((tokens >= 0) & (tokens < made.vocab_size)).all()),
            f"{where}: one is outside the vocabulary",
        )
        _equal(made.encode([text])[0], tokens, f"{where}, encoded alone")
        _equal(again, tokens, f"{where}, by a pickled copy")
        require(isinstance(made.decode(tokens.tolist()), str), f"{where}: decode gives no str")
    if made.end is not None:
        require(0 <= made.end < made.vocab_size, f"end {made.end} is outside the vocabulary")
        written = made.decode([made.end])
        require(made.end not in made.encode([written])[0], f"the text {written!r} becomes the end token")


def _format_of(dtype: np.dtype[Any]) -> str:
    return np.empty(0, dtype).data.format


def _equal(found: Any, expected: Any, what: str) -> None:
    if not np.array_equal(found, expected):
        raise AssertionError(f"{what}: {found} where {expected} belongs")
