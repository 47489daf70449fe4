"""Whatever lies at a path, opening it works or says in a StoreError which byte of which file is wrong."""

import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import mosaic
from meshfeed.errors import MeshfeedError, MissingError, OptionError, StoreError
from meshfeed.store import IndexedWriter, index, open_store
from raw_index import write_raw
from soak import cases

LAWS = settings(max_examples=cases(100), deadline=None)

# 3 sequences of 2, 0 and 3 tokens of 2 bytes, in 2 documents; every case breaks one thing
SOUND = {"lengths": [2, 0, 3], "pointers": [0, 4, 4], "documents": [0, 2, 3], "data": bytes(10)}
LENGTHS_AT, POINTERS_AT, DOCUMENTS_AT = 34, 34 + 12, 34 + 36


@pytest.fixture
def sound(tmp_path):
    return write_raw(tmp_path / "c", **SOUND)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_store_opens_by_prefix_or_by_either_file(sound, suffix):
    store = open_store(sound + suffix)
    assert (store.path, store.num_tokens, store.num_documents) == (sound, 5, 2)


def test_a_prefix_may_itself_end_in_bin(tmp_path):
    prefix = write_raw(tmp_path / "corpus.bin", **SOUND)
    assert open_store(prefix).path == open_store(prefix + ".idx").path == prefix


@pytest.mark.parametrize(
    ("change", "at", "says"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, 0, "not a Megatron index"),
        ({"version": 2}, 9, "version 2"),
        ({"code": 0}, 17, "dtype code 0"),
        ({"code": 9}, 17, "dtype code 9"),
        ({"documents": []}, 26, "no document entries"),
        ({"modes": [0, 0]}, DOCUMENTS_AT + 24, "2 bytes left over"),
        ({"modes": [0] * 4}, DOCUMENTS_AT + 24, "4 bytes left over"),
        ({"lengths": [2, -1, 3]}, LENGTHS_AT + 4, "-1 tokens"),
        ({"lengths": [2, 1, 3]}, POINTERS_AT + 16, "sequence 1 ends at byte 6"),
        ({"lengths": [2, 0, 4]}, POINTERS_AT + 16, "outside its 10 bytes"),
        ({"pointers": [0, -2, 4]}, POINTERS_AT + 8, "at byte -2"),
        ({"pointers": [0, 2**63 - 2, 4]}, POINTERS_AT + 8, "outside its 10 bytes"),
        ({"pointers": [0, 3, 4]}, POINTERS_AT + 8, "not a whole token"),
        ({"pointers": [0, 2, 4]}, POINTERS_AT + 8, "sequence 0 ends at byte 4"),
        ({"data": bytes(8)}, POINTERS_AT + 16, "truncated or belongs to another"),
        ({"data": b""}, POINTERS_AT, "truncated or belongs to another"),
        ({"documents": [0, 4, 3]}, DOCUMENTS_AT + 8, "at sequence 4 of 3"),
        ({"documents": [0, -1, 3]}, DOCUMENTS_AT + 8, "at sequence -1 of 3"),
        ({"documents": [0, 2, 1, 3]}, DOCUMENTS_AT + 16, "before its predecessor"),
        ({"documents": [1, 2, 3]}, DOCUMENTS_AT, "document 0 starts at sequence 1"),
        ({"documents": [0, 2]}, DOCUMENTS_AT + 8, "belongs to no document"),
        ({"documents": [0]}, DOCUMENTS_AT, "belongs to no document"),
    ],
)
def test_a_broken_entry_is_named_with_its_byte(tmp_path, change, at, says):
    prefix = write_raw(tmp_path / "c", **(SOUND | change))
    with pytest.raises(StoreError, match=rf"c\.idx: byte {at}: .*{says}"):
        open_store(prefix)


@pytest.mark.parametrize("size", range(34 + 36 + 24))
def test_an_index_cut_anywhere_is_named_with_the_byte(sound, size):
    os.truncate(sound + ".idx", size)
    with pytest.raises(StoreError, match=rf"c\.idx: byte {size}: "):
        open_store(sound)


def test_a_data_file_cut_within_a_token_is_named(sound):
    os.truncate(sound + ".bin", 9)
    with pytest.raises(StoreError, match=r"c\.bin: 9 bytes are not a whole number of uint16"):
        open_store(sound)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_store_names_the_missing_half(sound, suffix):
    os.remove(sound + suffix)
    with pytest.raises(StoreError, match=rf"c\{suffix}: missing"):
        open_store(sound)


@pytest.mark.parametrize("name", ["train", "train.bin"])
def test_raw_tokens_without_an_index_name_the_remedy(tmp_path, name):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    says = r"train\.idx: missing.*train\.bin holds raw tokens.*mf\.open\('\S+train\.bin', dtype='uint16'\)"
    with pytest.raises(MissingError, match=says):
        open_store(tmp_path / name)
    (tmp_path / "train.bin").rename(tmp_path / "train.idx")
    with pytest.raises(MissingError, match=r"train\.bin: missing") as failed:
        open_store(tmp_path / "train")
    assert "raw tokens" not in str(failed.value), "an index alone is another mistake"


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_directory_in_place_of_a_file_is_named(sound, suffix):
    os.remove(sound + suffix)
    os.mkdir(sound + suffix)
    with pytest.raises(StoreError, match=rf"c\{suffix}: is a directory, not a file"):
        open_store(sound)


def test_what_is_no_store_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path, found in (
        (tmp_path, "a directory"),
        (tmp_path / "notes.txt", "a file"),
    ):
        with pytest.raises(StoreError, match=f"found {found}, no token store"):
            open_store(path)


@pytest.mark.parametrize("name", ["x", "x/", "no/such/dir", "corpus.bin", "train.jsonl", "train.parquet"])
def test_a_path_that_does_not_exist_is_said_not_to(tmp_path, monkeypatch, name):
    told = rf"{name}: this path does not exist, nor does a \.bin or \.idx .*check it, and that it is on this node$"
    with pytest.raises(MissingError, match=told):
        open_store(f"{tmp_path}/{name}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingError, match=rf"^{name}: this path does not exist, seen from {tmp_path}, nor"):
        open_store(name)


def test_a_pattern_that_nothing_matches(tmp_path):
    with pytest.raises(MissingError, match=r"\*\.jsonl: no file of a token store has such a name; expected"):
        open_store(tmp_path / "*.jsonl")


@pytest.mark.parametrize("path", ["", "\0", "x" * 5000, "s3://bucket/corpus"])
def test_odd_paths_are_store_errors(path):
    with pytest.raises(StoreError):
        open_store(path)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_loops_of_links_are_store_errors(tmp_path, suffix):
    prefix = write_raw(tmp_path / "c", **SOUND)
    os.remove(prefix + suffix)
    os.symlink(prefix + suffix, prefix + suffix)
    with pytest.raises(StoreError, match=rf"c\{suffix}: "):
        open_store(prefix)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("broken")


def use_everything(prefix):
    with open_store(prefix) as store:
        documents = np.arange(store.num_documents)
        lengths = store.lengths(documents)
        for document, length in zip(documents.tolist(), lengths.tolist()):
            assert store.read(document, 0, length).size == length
        if store.is_stream:
            ends = np.array([0]), np.array([store.num_tokens])
            assert store.read_stream(*ends).size == store.num_tokens
            store.document_starts(*ends)
        if store.has_modes:
            store.modes(np.arange(store.num_sequences))
        assert len(store.fingerprint) == 32
        list(store.verify())


@LAWS
@given(data=st.data())
def test_damaged_files_raise_nothing_but_our_errors(place, data):
    prefix = write_raw(place / "c", **SOUND)
    with open(prefix + ".idx", "rb") as stream:
        content = bytearray(stream.read())
    # most damage to the header, the rest anywhere
    places = st.integers(0, 33) | st.integers(0, len(content) - 1)
    for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        content[at] = byte
    size = data.draw(st.just(len(content)) | st.integers(0, len(content) + 4))
    content = content[:size].ljust(size, b"\1")
    with open(prefix + ".idx", "wb") as stream:
        stream.write(content)
    try:
        use_everything(prefix)
    except MeshfeedError as error:
        assert "c." in str(error)


@LAWS
@given(
    lengths=st.lists(st.integers(-1, 4), max_size=4),
    pointers=st.lists(st.integers(-2, 12) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=4),
    documents=st.lists(st.integers(-1, 5), max_size=5),
    code=st.integers(0, 9),
    size=st.integers(0, 16),
)
def test_made_up_entries_raise_nothing_but_our_errors(place, lengths, pointers, documents, code, size):
    pointers = (pointers + [0] * 4)[: len(lengths)]
    prefix = write_raw(
        place / "m", lengths=lengths, pointers=pointers, documents=documents, data=bytes(size), code=code
    )
    try:
        use_everything(prefix)
    except MeshfeedError as error:
        assert "m." in str(error)


# -- long indices: both ends at once, the rest when touched or verified ------------------------------


@pytest.fixture
def long(tmp_path, monkeypatch):
    """200 documents of one token each, in an index that counts as long from 16 entries."""
    monkeypatch.setattr(index, "CHECKED_WHOLE", 16)
    monkeypatch.setattr(index, "CHECKED_ENDS", 4)
    monkeypatch.setattr(index, "_CHUNK", 32)
    with IndexedWriter(tmp_path / "long", "u2", checksum_bytes=None) as writer:
        for token in range(200):
            writer.add_document([token])
    return str(tmp_path / "long")


def poke(prefix, at, form, value):
    with open(prefix + ".idx", "r+b") as stream:
        stream.seek(at)
        stream.write(struct.pack(form, value))


@pytest.mark.parametrize(
    ("at", "form", "value", "byte", "says"),
    [
        (34 + 4 * 100, "<i", -7, 34 + 4 * 100, "-7 tokens"),
        (34 + 4 * 95, "<i", 2, 34 + 800 + 8 * 96, "sequence 95 ends"),
        (34 + 800 + 8 * 96, "<q", 10**9, 34 + 800 + 8 * 96, "sequence 95 ends"),
        (34 + 800 + 8 * 97, "<q", 10**9, 34 + 800 + 8 * 97, "outside its 400 bytes"),
        (34 + 2400 + 8 * 96, "<q", 90, 34 + 2400 + 8 * 96, "before its predecessor"),
        (34 + 2400 + 8 * 96, "<q", 201, 34 + 2400 + 8 * 96, "at sequence 201 of 200"),
    ],
)
def test_verify_finds_what_opening_did_not_look_at(long, at, form, value, byte, says):
    poke(long, at, form, value)
    store = open_store(long)
    with pytest.raises(StoreError, match=rf"long\.idx: byte {byte}: .*{says}"):
        list(store.verify())


def test_verify_tells_how_far_it_is(long):
    parts = list(open_store(long).verify())
    assert len(parts) == 14 and parts == sorted(parts) and parts[-1] == 1.0


@pytest.mark.parametrize("at", [0, 3, 196, 199])
def test_both_ends_of_a_long_index_are_checked_at_once(long, at):
    poke(long, 34 + 4 * at, "<i", -1)
    with pytest.raises(StoreError, match=rf"byte {34 + 4 * at}: "):
        open_store(long)


def test_what_is_touched_is_checked(long):
    poke(long, 34 + 800 + 8 * 96, "<q", -8)
    poke(long, 34 + 2400 + 8 * 150, "<q", 4096)
    with open_store(long) as store:
        assert store.read(10, 0, 1).tolist() == [10]
        with pytest.raises(StoreError, match=rf"byte {34 + 800 + 8 * 96}: .*at byte -8"):
            store.read(96, 0, 1)
        with pytest.raises(StoreError, match=rf"byte {34 + 2400 + 8 * 150}: .*sequence 4096 of 200"):
            store.lengths(np.array([150]))
        with pytest.raises(StoreError):
            store.document_starts(np.array([0]), np.array([200]))


def test_a_document_that_ends_before_it_starts_is_refused(long):
    poke(long, 34 + 2400 + 8 * 96, "<q", 120)
    with open_store(long) as store, pytest.raises(StoreError, match="ends before it starts"):
        store.lengths(np.array([96]))


def test_options_of_storage_are_refused_for_a_path(sound):
    for path in (sound, f"file://{sound}"):
        with pytest.raises(OptionError, match=r"options= \(endpoint, region\) are for remote storage"):
            open_store(path, options={"region": "eu-west-1", "endpoint": "http://host"})
    assert open_store(sound, options={}).num_documents == open_store(sound).num_documents


def test_every_store_has_a_length(sound, tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3]}\n')
    with mf.DatasetWriter(tmp_path / "dataset", {"tokens": "uint16"}) as writer:
        writer.add_document(tokens=[1])
    mosaic.written(tmp_path / "mds", {"tokens": "ndarray:uint16"}, [{"tokens": np.arange(3, dtype="u2")}])
    for path in (sound, *(tmp_path / name for name in ("docs.jsonl", "dataset", "mds"))):
        with open_store(path) as store:
            assert len(store) == store.num_documents > 0
    assert len(mf.Lengths([3, 4])) == 2
    assert len(mf.Mapped([{"tokens": np.arange(3)}] * 7)) == 7
