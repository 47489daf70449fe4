"""Azure's blob storage, by its emulator: signatures, listings, versions, a corpus in a container."""

from __future__ import annotations

import base64
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
from services.azure import ACCOUNT, KEY, Azure
from services.needs import needs

SHORT = Patience(attempts=3)


@pytest.fixture(scope="module")
def azure() -> Iterator[Azure]:
    needs("azurite-blob")
    with Azure() as server:
        server.make_container("corpora")
        yield server


def test_blobs_are_read_listed_and_versioned(azure: Azure) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8).tobytes()
    azure.put("corpora", "raw/data.bin", data)
    client = Client("az://corpora", azure.options(), SHORT)
    stat = client.stat("raw/data.bin")
    assert stat.size_bytes == len(data)
    assert bytes(client.read("raw/data.bin", 50, 70_000, stat.tag)) == data[50:70_000]
    found, first = client.glance("raw/data.bin", 1_000)
    assert (found, bytes(first)) == (stat, data[:1_000])
    assert client.list("raw") == [("raw/data.bin", len(data))]
    azure.put("corpora", "raw/data.bin", data[::-1])
    with pytest.raises(ChangedError, match=r"az://corpora/raw/data\.bin: bytes 0\.\.10: it was replaced"):
        client.read("raw/data.bin", 0, 10, stat.tag)
    with pytest.raises(MissingError, match=r"az://corpora/raw/nothing\.bin: no such object"):
        client.stat("raw/nothing.bin")


def test_a_listing_of_many_pages(azure: Azure) -> None:
    """Names of any kind, and folders of which one begins as another does."""
    names = {f"many/{name}" for name in ("en/a", "en/b", "en-fr/a", "en.txt", "Z", "ü", "\uffee", "😀")}
    names |= {f"many/{number:02}" for number in range(20)}
    for name in names:
        azure.put("corpora", name, b"x")
    client = Client("az://corpora", azure.options(), SHORT)
    assert client.list("many") == sorted((name, 1) for name in names)
    assert client.list("many/en") == [("many/en/a", 1), ("many/en/b", 1)]
    assert client.list("nothing") == []


def test_a_container_that_is_not_there(azure: Azure) -> None:
    with pytest.raises(MissingError):
        Client("az://nowhere", azure.options(), SHORT).list("x")


def test_a_wrong_key_is_refused(azure: Azure) -> None:
    azure.put("corpora", "x", b"x")
    guessed = base64.b64encode(b"guessed" * 8).decode()
    with pytest.raises(AccessError, match="no permission"):
        Client("az://corpora", azure.options(guessed), SHORT).stat("x")


def test_a_corpus_in_a_container(azure: Azure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Account, key and endpoint from the environment, the rest as any user would write it."""
    stream = write_corpus(tmp_path / "corpus")
    for name in ("corpus.bin", "corpus.idx"):
        azure.put("corpora", f"text/{name}", (tmp_path / name).read_bytes())
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure.url)
    store = mf.open("az://corpora/text/corpus", cache=tmp_path / "cache")
    assert store.fingerprint == mf.open(tmp_path / "corpus").fingerprint
    with store:
        assert np.array_equal(store.read_stream(np.array([0]), np.array([stream.size])), stream)
    assert [n for n, _ in Folder("az://corpora/text", Cache(tmp_path / "cache")).names()] == [
        "corpus.bin",
        "corpus.idx",
    ]
