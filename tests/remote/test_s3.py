"""A real S3 server: signatures, listings, versions, a corpus in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.errors import AccessError, ChangedError, MissingError
from meshfeed.files import Cache, Folder
from meshfeed.remote.client import Client
from meshfeed.remote.retries import Patience
from services.needs import needs
from services.s3 import S3

SHORT = Patience(attempts=3)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    needs("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
    with S3() as server:
        server.make_bucket("corpora")
        yield server


def test_objects_are_read_listed_and_versioned(s3: S3) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8).tobytes()
    s3.put("corpora", "raw/data.bin", data)
    client = Client("s3://corpora", s3.options(), SHORT)
    stat = client.stat("raw/data.bin")
    assert stat.size_bytes == len(data)
    assert bytes(client.read("raw/data.bin", 50, 70_000, stat.tag)) == data[50:70_000]
    found, first = client.glance("raw/data.bin", 1_000)
    assert (found, bytes(first)) == (stat, data[:1_000])
    assert client.list("raw") == [("raw/data.bin", len(data))]
    s3.put("corpora", "raw/data.bin", data[::-1])
    with pytest.raises(ChangedError, match=r"s3://corpora/raw/data\.bin: bytes 0\.\.10: it was replaced"):
        client.read("raw/data.bin", 0, 10, stat.tag)
    with pytest.raises(MissingError, match=r"s3://corpora/raw/nothing\.bin: no such object"):
        client.stat("raw/nothing.bin")


def test_a_listing_of_many_pages(s3: S3) -> None:
    """Names of any kind, and folders of which one begins as another does."""
    names = {f"many/{name}" for name in ("en/a", "en/b", "en-fr/a", "en.txt", "Z", "ü", "\uffee", "😀")}
    names |= {f"many/{number:02}" for number in range(20)}
    for name in names:
        s3.put("corpora", name, b"x")
    client = Client("s3://corpora", s3.options(), SHORT)
    assert client.list("many") == sorted((name, 1) for name in names)
    assert client.list("many/en") == [("many/en/a", 1), ("many/en/b", 1)]
    assert client.list("nothing") == []


def test_a_bucket_that_is_not_there(s3: S3) -> None:
    with pytest.raises(MissingError):
        Client("s3://nowhere", s3.options(), SHORT).list("x")


def test_a_wrong_key_is_refused(s3: S3) -> None:
    s3.put("corpora", "x", b"x")
    with pytest.raises(AccessError, match="no permission"):
        Client("s3://corpora", s3.options(secret="guessed"), SHORT).stat("x")


def test_a_corpus_in_a_bucket(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials from the environment, the rest as any user would write it."""
    stream = write_corpus(tmp_path / "corpus")
    s3.put_folder("corpora", tmp_path, "text/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options()["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options()["secret_access_key"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = mf.open("s3://corpora/text/corpus", cache=tmp_path / "cache")
    assert store.fingerprint == mf.open(tmp_path / "corpus").fingerprint
    with store:
        assert np.array_equal(store.read_stream(np.array([0]), np.array([stream.size])), stream)
    folder = Folder("s3://corpora/text", Cache(tmp_path / "cache"))
    assert [name for name, _ in folder.names()] == ["corpus.bin", "corpus.idx", "corpus.sums"]
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
    with pytest.raises(AccessError):
        mf.open("s3://corpora/text/corpus", cache=tmp_path / "other")
