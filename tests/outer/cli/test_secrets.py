"""Passwords in URLs: they are used, and shown nowhere."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.errors import AccessError, MeshfeedError, StoreError
from meshfeed.files import Cache, Folder
from meshfeed.files.url import without_secrets
from meshfeed.prepare import Text, encode_part, prepare
from meshfeed.remote.cached import CachedFile
from meshfeed.remote.fetcher import protocol
from services.faults import Fault, Faults
from services.needs import needs
from services.nginx import Nginx

SECRET, QUOTED = "hu sh@hush", "hu%20sh%40hush"
SHOWN = (SECRET, QUOTED, "hush", "dXNlcjpodSBzaEBodXNo")  # the last as a header has it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    needs("nginx")
    folder, users = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("users") / "users"
    with mf.IndexedWriter(folder / "c", np.uint16) as writer:
        for i in range(50):
            writer.add_document(np.arange(100) + i)
    users.write_text(f"user:{{PLAIN}}{SECRET}\n")
    with Nginx(folder, f"auth_basic here; auth_basic_user_file {users};") as nginx:
        yield nginx


def with_user(url: str, password: str = QUOTED) -> str:
    return url.replace("//", f"//user:{password}@")


def texts_in(folder: Path) -> str:
    return "\n".join(
        each.read_bytes().decode("latin-1")
        for each in folder.rglob("*")
        if each.is_file() and each.parent.parent.name != "blocks"
    )


class Here:
    """Encodes in this process."""

    def encode(self, folder: Path, parts: Sequence[int]) -> Iterator[int]:
        for part in parts:
            encode_part(folder, part)
            yield part


def trained(recipe: mf.Recipe) -> None:
    with mf.Feed(recipe, mf.Layout.parse("dp1"), 0) as feed:
        for step in feed:
            list(step.microbatches)


def test_user_and_password_of_a_url_are_used(server: Nginx, tmp_path: Path) -> None:
    with pytest.raises(AccessError):
        mf.open(f"{server.url}/c", cache=tmp_path / "cache")
    with mf.open(f"{with_user(server.url)}/c", cache=tmp_path / "cache") as store:
        assert store.read(3, 0, 5).tolist() == [3, 4, 5, 6, 7]
        assert store.path == f"{server.url}/c"
    with pytest.raises(AccessError):
        mf.open(f"{with_user(server.url, 'wrong')}/c", cache=tmp_path / "cache")


def test_a_manifest_names_its_inputs_without_passwords(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "d.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    (tmp_path / "users").write_text(f"user:{{PLAIN}}{SECRET}\n")
    further = f"auth_basic here; auth_basic_user_file {tmp_path / 'users'};"
    with Nginx(tmp_path / "served", further) as nginx:
        prepare([f"{with_user(nginx.url)}/d.jsonl"], tmp_path / "out", Text(tokenizer="bytes"), engine=Here())
        told = texts_in(tmp_path / "out")
    assert f"{nginx.url}/d.jsonl" in told
    assert not [secret for secret in SHOWN if secret in told]


def test_azures_containers_are_no_secrets() -> None:
    assert (
        without_secrets("abfss://corpus@lake.dfs.core.windows.net/c")
        == "abfss://corpus@lake.dfs.core.windows.net/c"
    )
    assert without_secrets("http://me:hush@host/c?key=hush") == "http://host/c"


def test_no_output_of_a_failing_run_shows_a_password(
    server: Nginx,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(protocol, "_LOG_EVERY_S", 0.05)
    said: list[Any] = []
    with Faults(server.url) as faults:
        url, cache = f"{with_user(faults.url)}/c", Cache(tmp_path / "cache")
        faults.plan = lambda number, method, path: Fault(delay_s=0.2)
        store = mf.open(url, cache=cache)
        assert "waiting for storage for" in caplog.text
        said += [repr(store), store.path, repr(store.facts()), repr(Folder(url, cache, {"password": SECRET}))]
        recipe = mf.Recipe(data=store, sequence=mf.Windows(16), batch=mf.Batch(sequences=4), epochs=1)
        said += [repr(recipe), repr(CachedFile(url, cache))]
        faults.plan = lambda number, method, path: Fault(answer=(403, url.encode()))
        failing = (
            lambda: trained(recipe),
            lambda: mf.open(f"{url}/nothing", cache=cache),
            lambda: mf.open(f"{url}?signature={SECRET}", cache=cache),
            lambda: mf.open(url, cache=with_user("s3://bucket/cache")),
            lambda: mf.open(url.replace("http", "ftp"), cache=cache),
            lambda: mf.open(f"{url}.jsonl", cache=cache, tokenizer="bytes"),
            lambda: Folder(url, cache).file("../up"),
            lambda: Folder(url, cache).names(),
        )
        for act in failing:
            with pytest.raises((StoreError, MeshfeedError)) as caught:
                act()
            said.append("".join(traceback.format_exception(caught.value)))
        for words in (["inspect", url, "--json"], ["inspect", url, "--verify"], ["doctor", url]):
            main([*words, "--cache", str(cache.path)])
    out, err = capsys.readouterr()
    told = "\n".join([*map(str, said), out, err, caplog.text, texts_in(tmp_path)])
    assert len(out) > 100 and "no permission" in told
    for secret in SHOWN:
        at = told.find(secret)
        assert at < 0, told[max(at - 300, 0) : at + 100]
