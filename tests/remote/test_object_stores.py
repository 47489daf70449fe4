"""Real servers of S3 and of Azure's blobs (its emulator): signatures, listings, versions, a corpus in a bucket."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.errors import AccessError, ChangedError, MissingError
from meshfeed.files import Cache, Folder
from meshfeed.remote.client import Client
from meshfeed.remote.retries import Patience
from services.azure import ACCOUNT, KEY, Azure
from services.needs import needs
from services.s3 import S3

SHORT = Patience(attempts=3)
GUESSED = base64.b64encode(b"guessed" * 8).decode()


@dataclass(frozen=True)
class Bucket:
    """An empty bucket. options: what a client is given; wrong: the same with another key; environment: in its place."""

    url: str
    put: Callable[[str, bytes], None]
    options: Mapping[str, str]
    wrong: Mapping[str, str]
    environment: Mapping[str, str]
    key: str

    def client(self) -> Client:
        return Client(self.url, dict(self.options), SHORT)


def in_s3() -> Iterator[Bucket]:
    needs("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
    with S3() as server:
        server.make_bucket("corpora")
        options = server.options()
        yield Bucket(
            url="s3://corpora",
            put=lambda name, data: server.put("corpora", name, data),
            options=options,
            wrong=server.options(secret="guessed"),
            environment={
                "AWS_ACCESS_KEY_ID": options["access_key_id"],
                "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
                "AWS_ENDPOINT_URL": server.url,
                "AWS_REGION": "us-east-1",
            },
            key="AWS_SECRET_ACCESS_KEY",
        )


def in_azure() -> Iterator[Bucket]:
    needs("azurite-blob")
    with Azure() as server:
        server.make_container("corpora")
        yield Bucket(
            url="az://corpora",
            put=lambda name, data: server.put("corpora", name, data),
            options=server.options(),
            wrong=server.options(GUESSED),
            environment={
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_ENDPOINT": server.url,
            },
            key="AZURE_STORAGE_ACCOUNT_KEY",
        )


@pytest.fixture(scope="module", params=[in_s3, in_azure], ids=["s3", "azure"])
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    yield from request.param()


def test_objects_are_read_listed_and_versioned(bucket: Bucket) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8).tobytes()
    bucket.put("raw/data.bin", data)
    client = bucket.client()
    stat = client.stat("raw/data.bin")
    assert stat.size_bytes == len(data)
    assert bytes(client.read("raw/data.bin", 50, 70_000, stat.tag)) == data[50:70_000]
    found, first = client.glance("raw/data.bin", 1_000)
    assert (found, bytes(first)) == (stat, data[:1_000])
    assert client.list("raw") == [("raw/data.bin", len(data))]
    bucket.put("raw/data.bin", data[::-1])
    with pytest.raises(ChangedError, match=rf"{bucket.url}/raw/data\.bin: bytes 0\.\.10: it was replaced"):
        client.read("raw/data.bin", 0, 10, stat.tag)
    with pytest.raises(MissingError, match=rf"{bucket.url}/raw/nothing\.bin: no such object"):
        client.stat("raw/nothing.bin")


def test_a_listing_of_many_pages(bucket: Bucket) -> None:
    """Names of any kind, and folders of which one begins as another does."""
    names = {f"many/{name}" for name in ("en/a", "en/b", "en-fr/a", "en.txt", "Z", "ü", "\uffee", "😀")}
    names |= {f"many/{number:02}" for number in range(20)}
    for name in names:
        bucket.put(name, b"x")
    client = bucket.client()
    assert client.list("many") == sorted((name, 1) for name in names)
    assert client.list("many/en") == [("many/en/a", 1), ("many/en/b", 1)]
    assert client.list("nothing") == []


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    with pytest.raises(MissingError):
        Client(bucket.url.replace("corpora", "nowhere"), dict(bucket.options), SHORT).list("x")


def test_a_wrong_key_is_refused(bucket: Bucket) -> None:
    bucket.put("x", b"x")
    with pytest.raises(AccessError, match="no permission"):
        Client(bucket.url, dict(bucket.wrong), SHORT).stat("x")


def test_a_corpus_in_a_bucket(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and endpoint from the environment, the rest as any user would write it."""
    stream = write_corpus(tmp_path / "corpus")
    names = ["corpus.bin", "corpus.idx", "corpus.sums"]
    for name in names:
        bucket.put(f"text/{name}", (tmp_path / name).read_bytes())
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    store = mf.open(f"{bucket.url}/text/corpus", cache=tmp_path / "cache")
    assert store.fingerprint == mf.open(tmp_path / "corpus").fingerprint
    with store:
        assert np.array_equal(store.read_stream(np.array([0]), np.array([stream.size])), stream)
    assert [name for name, _ in Folder(f"{bucket.url}/text", Cache(tmp_path / "cache")).names()] == names
    monkeypatch.setenv(bucket.key, GUESSED)
    with pytest.raises(AccessError):
        mf.open(f"{bucket.url}/text/corpus", cache=tmp_path / "other")
