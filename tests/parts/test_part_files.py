"""A store of documents with parts: what it says of each before it is read, and what it reads."""

import itertools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import StoreError
from meshfeed.multimodal import MultimodalStore, MultimodalWriter
from meshfeed.parts import KINDS, Parts
from meshfeed.testing import assert_store
from services.needs import needs
from services.nginx import Nginx
from soak import cases

FIELDS = ("kind", "height", "width", "length", "rate", "num_bytes", "at")
SAMPLES = st.lists(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1 << 40), st.binary(min_size=1, max_size=9)), max_size=3
    ).map(
        lambda sample: [piece for each in sample for piece in (each, (1, each[1], b""))[: 1 + is_heard(each)]]
    ),
    max_size=6,
)


def is_heard(part):
    """Whether a part of a drawn sample is a video whose sound track is a part, too."""
    return part[0] == 2 and part[1] % 2 == 1


def bytes_of(sample, k):
    """Of a part; of a sound track, its video's."""
    is_track = k > 0 and sample[k][0] == 1 and sample[k - 1][0] == 2 and not sample[k][2]
    return sample[k - is_track][2]


def parts_of(samples, lengths):
    """Parts with made-up sizes; the k-th placeholder of a sample is token k."""
    flat = [each for sample in samples for each in sample]
    kind, size = (np.array([each[i] for each in flat], np.int64) for i in (0, 1))
    counts = np.array([len(sample) for sample in samples], np.int64)
    starts = np.append(0, counts.cumsum())
    at = np.arange(len(flat)) - starts[:-1].repeat(counts)
    num_bytes = np.array([len(each[2]) for each in flat], np.int64)
    return Parts(kind, size, size + 1, size + 2, size / 7, num_bytes, at, starts), [e[2] for e in flat]


def written(folder, samples, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [len(sample) + int(rng.integers(0, 5)) for sample in samples]
    texts = [rng.integers(0, 60_000, length).astype(np.uint16) for length in lengths]
    parts, data = parts_of(samples, lengths)
    with MultimodalWriter(folder, {"tokens": "u2", "loss_mask": "u1"}) as writer:
        for text in texts:
            writer.add_document(tokens=text, loss_mask=np.ones(text.size, np.uint8))
        half = len(samples) // 2
        middle = parts.starts[half]
        for some, begin, end in ((samples[:half], 0, middle), (samples[half:], middle, len(data))):
            writer.add_parts(parts_of(some, None)[0], data[begin:end])
    return texts, parts, data


@settings(max_examples=cases(12), deadline=None)
@given(SAMPLES, st.data())
def test_parts_come_back_as_they_were_written(tmp_path_factory, samples, draw):
    folder = tmp_path_factory.mktemp("m") / "d"
    _, parts, data = written(folder, samples)
    store = pickle.loads(pickle.dumps(mf.open(folder)))
    assert isinstance(store, MultimodalStore) and store.num_parts == len(data)
    assert list(store.verify())[-1] == 1.0
    every = [(i, k) for i, sample in enumerate(samples) for k in range(len(sample))]
    chosen = draw.draw(st.lists(st.sampled_from(range(len(samples))), max_size=9)) if samples else []
    with store:
        found = store.parts(np.array(chosen, np.int64))
        rows = [parts.starts[i] + k for i in chosen for k in range(len(samples[i]))]
        for name in FIELDS:
            assert getattr(found, name).tolist() == getattr(parts, name)[rows].tolist(), name
        assert found.starts.tolist() == np.append(0, np.cumsum([len(samples[i]) for i in chosen])).tolist()
        some = draw.draw(st.lists(st.sampled_from(every), max_size=9)) if every else []
        documents, places = np.array(some, np.int64).reshape(-1, 2).T
        store.will_need_part_ranges(*store.part_ranges(documents, places))
        wanted = [bytes_of(samples[i], k) for i, k in some]
        assert store.read_parts(documents, places) == wanted
        out = np.empty(sum(map(len, wanted)), np.uint8)
        store.read_part_ranges(*store.part_ranges(documents, places), out)
        assert out.tobytes() == b"".join(wanted)
        raw = Path(store.parts_path).read_bytes()
        assert [raw[a:b] for a, b in zip(*store.part_ranges(documents, places))] == wanted
        for i, sample in enumerate(samples):
            with pytest.raises(StoreError, match=f"part {len(sample)} of document {i} asked for"):
                store.read_parts(np.array([i]), np.array([len(sample)]))


SOME = [[(0, 5, b"abc"), (1, 6, b"")], [], [(2, 7, b"defgh")], [(0, 8, b"i")]]


def test_its_text_keeps_the_law_of_stores(tmp_path):
    texts, _, _ = written(tmp_path / "d", SOME)
    assert_store(mf.open(tmp_path / "d"), texts)
    assert mf.open(tmp_path / "d").columns.keys() == {"loss_mask"}


def test_its_fingerprint_covers_sizes_and_bytes(tmp_path):
    changed = [[(0, 5, b"abd"), (1, 6, b"")], *SOME[1:]]
    resized = [[(0, 9, b"abc"), (1, 6, b"")], *SOME[1:]]
    for name, samples in (("a", SOME), ("b", SOME), ("c", changed), ("d", resized)):
        written(tmp_path / name, samples)
    a, b, c, d = (mf.open(tmp_path / name).fingerprint for name in "abcd")
    assert a == b and len({a, c, d}) == 3


def test_reading_needs_with_and_parts_need_a_store_that_has_them(tmp_path):
    written(tmp_path / "d", SOME)
    for call in (lambda s: s.parts(np.array([0])), lambda s: s.read_parts(np.array([0]), np.array([0]))):
        with pytest.raises(StoreError, match="inside `with store:`"):
            call(mf.open(tmp_path / "d"))
    with mf.open(tmp_path / "d") as store, pytest.raises(StoreError, match="document 4 asked for"):
        store.parts(np.array([4]))
    with pytest.raises(
        StoreError, match=r"columns \['part_sizes', 'parts'\] would be in the files of the parts"
    ):
        MultimodalWriter(tmp_path / "e", {"tokens": "u2", "parts": "u1", "part_sizes": "u1"})
    with (
        pytest.raises(StoreError, match="1 documents, and parts of 0"),
        MultimodalWriter(tmp_path / "e", {"tokens": "u2"}) as w,
    ):
        w.add_document(tokens=[1])
    with (
        pytest.raises(StoreError, match="other lengths than their sizes say"),
        MultimodalWriter(tmp_path / "e", {"tokens": "u2"}) as w,
    ):
        w.add_parts(parts_of([[(0, 1, b"ab")]], None)[0], [b"a"])


def test_damage_is_named(tmp_path):
    def damaged(name, at, value):
        written(tmp_path / name, SOME)
        (tmp_path / name / "part_sizes.sums").unlink()
        path = tmp_path / name / "part_sizes.bin"
        rows = np.frombuffer(path.read_bytes(), "<f8").reshape(-1, 6).copy()
        rows[at] = value
        path.write_bytes(rows.tobytes())
        with pytest.raises(StoreError, match=r"part_sizes\.bin and \.idx: not those that were written"):
            list(mf.open(tmp_path / name).verify())
        told = json.loads((tmp_path / name / "dataset.json").read_bytes())
        (tmp_path / name / "dataset.json").write_text(json.dumps(told | {"fingerprints": {}}))
        return mf.open(tmp_path / name)

    for name, at, value in (("kind", (1, 0), len(KINDS)), ("half", (1, 2), 0.5), ("nan", (1, 4), np.nan)):
        with damaged(name, at, value) as store, pytest.raises(StoreError, match="document 0, part 1: sizes"):
            store.parts(np.arange(4))
    with pytest.raises(StoreError, match="document 2, part 0: its placeholder is token 99 of"):
        list(damaged("at", (2, 5), 99).verify())
    with mf.open(tmp_path / "at") as store, pytest.raises(StoreError, match="placeholder is token 99 of"):
        store.parts(np.arange(4))
    written(tmp_path / "cut", SOME)
    told = json.loads((tmp_path / "cut" / "dataset.json").read_bytes())
    assert told["version"] == 2
    (tmp_path / "cut" / "dataset.json").write_text(json.dumps(told | {"parts": {"bytes": "parts"}}))
    with pytest.raises(StoreError, match='"parts" is not an object with "bytes" and "sizes"'):
        mf.open(tmp_path / "cut")


def test_parts_of_other_tokens_are_refused(tmp_path):
    """Of as many documents and parts, at places that the text has, too."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        written(tmp_path / name, [[(0, 5, name.encode())], *SOME[1:]] if name < "c" else SOME, seed)
    for other, pair in itertools.product("bc", ("tokens", "parts", "part_sizes")):
        mixed = shutil.copytree(tmp_path / "a", tmp_path / f"a{other}{pair}")
        for suffix in (".bin", ".idx", ".sums"):
            shutil.copy(tmp_path / other / f"{pair}{suffix}", mixed / f"{pair}{suffix}")
        if all(
            (mixed / f"{pair}{s}").read_bytes() == (tmp_path / f"a/{pair}{s}").read_bytes()
            for s in (".bin", ".idx")
        ):
            assert list(mf.open(mixed).verify())[-1] == 1.0
            continue
        with pytest.raises(StoreError):
            list(mf.open(mixed).verify())
        with pytest.raises(StoreError), mf.open(mixed):
            pass
    told = json.loads((tmp_path / "a/dataset.json").read_bytes())
    del told["fingerprints"]  # as written by earlier versions
    (tmp_path / "a/dataset.json").write_text(json.dumps(told))
    assert list(mf.open(tmp_path / "a").verify())[-1] == 1.0


def test_far_away_it_is_the_same_and_what_is_damaged_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "www").mkdir()
    written(tmp_path / "www" / "d", SOME)
    every = [(i, k) for i, sample in enumerate(SOME) for k in range(len(sample))]
    documents, places = np.array(every).T

    def read(path):
        with mf.open(path) as store:
            store.will_need_part_ranges(*store.part_ranges(documents, places))
            return (
                store.fingerprint,
                store.parts(np.arange(4)).height.tolist(),
                store.read_parts(documents, places),
            )

    near = read(tmp_path / "www" / "d")
    assert near[2] == [SOME[i][k][2] for i, k in every]
    needs("nginx")
    with Nginx(tmp_path / "www") as server:
        assert read(f"{server.url}/d") == near
    raw = tmp_path / "www" / "d" / "parts.bin"
    damaged = bytearray(raw.read_bytes())
    damaged[4] ^= 1
    raw.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"d/parts\.(bin|sums)"), mf.open(tmp_path / "www" / "d") as store:
        store.read_parts(documents, places)
