"""Datasets on the Hub: the bytes that huggingface_hub downloads, few requests, refusals and expired links."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import meshfeed as mf
import quick
from meshfeed.errors import AccessError, ChangedError, MissingError, OptionError, StoreError, UnavailableError
from meshfeed.files.cache import once
from meshfeed.files.folder import pinned
from meshfeed.prepare.inputs.files import find_inputs
from meshfeed.prepare.job.writer import Writer
from meshfeed.remote import answers, retries
from meshfeed.remote import hub as hub_module
from meshfeed.remote.hub import HubClient
from meshfeed.remote.hub_url import hub_path
from meshfeed.remote.retries import Patience
from services.hub import Hub
from soak import cases


def rows(documents: list[list[int]]) -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))}), made, row_group_size=3)
    return made.getvalue()


FILES = {
    "README.md": b"small, and on the Hub itself",
    "data/train-00000-of-00002.parquet": rows([[1, 2, 3], [4], [], [5, 6]]),
    "data/train-00001-of-00002.parquet": rows([[7] * 50, [8, 9]]),
    "data/test-00000-of-00001.parquet": rows([[10]]),
    "raw/train.bin": np.arange(30_000, dtype=np.uint16).tobytes(),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub("me/corpus", FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def client(hub: Hub, folder: Path, revision: str = "main", **options: str) -> HubClient:
    return HubClient(hub.url(revision=revision), {"endpoint": hub.endpoint, **options}, folder)


def test_a_split_is_what_huggingface_hub_downloads(hub: Hub, tmp_path: Path) -> None:
    copy = huggingface_hub.snapshot_download(
        hub.repo, repo_type="dataset", endpoint=hub.endpoint, cache_dir=tmp_path / "theirs"
    )
    hub.asked.clear()
    with mf.open(hub.url("data/train-*.parquet")) as store, mf.open(f"{copy}/data/train-*.parquet") as local:
        assert store.path == hub.url("data/train-*.parquet", hub.head), "messages name the commit"
        assert store.num_tokens == local.num_tokens == 58
        everything = np.array([0]), np.array([58])
        assert np.array_equal(store.read_stream(*everything), local.read_stream(*everything))
    files = len([path for path in FILES if "train-" in path])
    pages = -(-len(FILES) // 3)
    assert hub.asked == {"revision": 1, "tree": pages, "resolve": files, "bytes": files}
    with mf.open(hub.url("raw/train.bin"), dtype="uint16", cache=mf.Cache(block_bytes=4096)) as raw:
        starts = np.array([5, 29_000, 12_000])
        found = raw.read_stream(starts, starts + 900)
        assert np.array_equal(found, (starts[:, None] + np.arange(900)).ravel())
    assert hub.asked["resolve"] == files + 1, "one for a file of many blocks"
    with pytest.raises(
        StoreError, match=r"several splits in one folder; give one: \S+/data/test-\*\.parquet, "
    ):
        mf.open(hub.url("data"))
    with pytest.raises(MissingError, match=r"@[0-9a-f]{40}/nowhere\.parquet: no token store"):
        mf.open(hub.url("nowhere.parquet"))


def test_the_fingerprint_is_of_the_commits_content(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first = "data/test-00000-of-00001.parquet", hub.head
    before = mf.open(hub.url(path)).fingerprint
    assert before == mf.open(hub.url(path, first)).fingerprint
    second = hub.push({**FILES, path: rows([[11]])})
    old, new = mf.open(hub.url(path, first)), mf.open(hub.url(path, second))
    assert old.fingerprint == before != new.fingerprint
    with old, new:
        assert (old.read(0, 0, 1).tolist(), new.read(0, 0, 1).tolist()) == ([10], [11])


def test_raw_text_is_of_the_commits_content(hub: Hub) -> None:
    for texts in (["one", "two"], ["one", "six"]):
        made = {
            f"text/a-{i}.jsonl.gz": gzip.compress(json.dumps({"text": text}).encode())
            for i, text in enumerate(texts)
        }
        commit = hub.push({**FILES, **made})
        with mf.open(hub.url("text/a-*.jsonl.gz", commit), tokenizer="bytes") as store:
            assert bytes(store.read_stream(np.array([0]), np.array([6]))) == "".join(texts).encode()


def test_a_job_is_at_one_commit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node asks again after a while; the ranks of a job agree all the same."""
    store = torch.distributed.HashStore()
    distributed = torch.distributed.distributed_c10d
    monkeypatch.setattr(distributed, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    first = pinned(hub.url("x"), mf.Cache(tmp_path / "one"), {})
    assert first == hub.url("x", hub.head)
    hub.push({})
    assert pinned(hub.url("x"), mf.Cache(tmp_path / "two"), {}) == first
    with Hub("me/corpus", {"other": b"x"}) as mirror:
        of_mirror = pinned(hub.url("x"), mf.Cache(tmp_path / "two"), {"endpoint": mirror.endpoint})
        assert of_mirror == hub.url("x", mirror.head) != first
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert pinned(hub.url("x"), mf.Cache(tmp_path / "two"), {}) == hub.url("x", hub.head)
    assert pinned(first, mf.Cache(tmp_path / "three"), {}) == first
    monkeypatch.setattr(answers, "RECENT_S", 0)
    assert client(hub, tmp_path / "own").commit == hub.head
    commit = hub.push({"a": b"b"})
    assert client(hub, tmp_path / "own").commit == commit


def test_requests_do_not_grow_with_clients_in_a_storm(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 fetchers of one node, refused whatever they ask first; nobody asks before the time that the Hub names."""
    monkeypatch.setattr(answers, "RECENT_S", 3600)
    storm = {"revision": cases(0, 3), "tree": cases(0, 2), "resolve": 1, "bytes": cases(1, 9)}
    hub.refuse = lambda kind, number: (429, {"Retry-After": "1"}) if number <= storm[kind] else None
    large = [path for path, content in FILES.items() if len(content) > 100]
    start = threading.Barrier(64)

    def read(number: int) -> bool:
        start.wait()
        one = client(hub, tmp_path / "node")
        path = large[number % len(large)]
        stat = one.stat(path)
        found = bytes(one.read(path, 3, 60, stat.tag)) == FILES[path][3:60]
        one.close()
        return found

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(read, range(64)))
    assert hub.asked["revision"] == 1 + storm["revision"] and hub.asked["tree"] == 2 + storm["tree"]
    assert hub.asked["resolve"] == len(large) + storm["resolve"]
    assert (hub.asked["bytes"], hub.answers.count(("bytes", 206))) == (64 + storm["bytes"], 64)


def test_processes_share_their_nodes_requests(hub: Hub, tmp_path: Path) -> None:
    path = hub.url("data/train-*.parquet", hub.head)
    code = f"import meshfeed as mf\nwith mf.open({path!r}) as s: print(s.read(0, 0, 3).tolist())"
    count = cases(2, 64)
    started = [
        subprocess.Popen([quick.python(), "-c", code], stdout=subprocess.PIPE, env=os.environ, text=True)
        for _ in range(count)
    ]
    assert [each.communicate()[0] for each in started] == ["[1, 2, 3]\n"] * count
    assert hub.asked == {"tree": 2, "resolve": 2, "bytes": 2}


@pytest.mark.parametrize(
    ("links", "kind", "says"),
    [
        (False, StoreError, "the listing leaves out 2 files, such as 'data/train-00001-of-00002.parquet'"),
        ("same", UnavailableError, "the same names again and again"),
    ],
)
def test_a_listing_is_not_believed_because_it_is_well_formed(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    links: bool | str,
    kind: type[StoreError],
    says: str,
) -> None:
    """A mirror or proxy may drop the header that names the next page."""
    monkeypatch.setattr(hub_module, "_FULL", 4)  # three files and a folder
    monkeypatch.setattr(hub_module, "_PAGE", 4)
    hub.links = links
    one = client(hub, tmp_path / "node", give_up_s="1")
    with pytest.raises(kind, match=says):
        one.list("data")
    hub.links = True
    assert [path for path, _ in one.list("")] == sorted(FILES)


def test_bytes_of_an_object_of_another_size_are_refused(hub: Hub, tmp_path: Path) -> None:
    path, hub.more_bytes = "raw/train.bin", 5
    one = client(hub, tmp_path / "node")
    with pytest.raises(
        ChangedError, match=r"raw/train\.bin: bytes 0\.\.9: of an object of 60005 bytes, which had"
    ):
        one.read(path, 0, 9, one.stat(path).tag)


def test_an_expired_link_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    path = "raw/train.bin"
    one = client(hub, tmp_path / "node")
    tag = one.stat(path).tag
    hub.signed_s = -1
    with pytest.raises(AccessError, match=r"raw/train\.bin: bytes 0\.\.9: no permission") as failed:
        one.read(path, 0, 9, tag)
    assert "s3cret" not in str(failed.value)
    hub.signed_s = 3600
    assert bytes(one.read(path, 10, 19, tag)) == FILES[path][10:19]
    assert bytes(one.read(path, 20, 29, tag)) == FILES[path][20:29]
    stat, first = one.glance(path, 9)
    assert (stat, bytes(first)) == (one.stat(path), FILES[path][:9])
    assert hub.asked["resolve"] == 3, "twice in vain"
    link = next(
        each for each in (tmp_path / "node").iterdir() if each.name.startswith("url-") and not each.suffix
    )
    assert link.stat().st_mode & 0o077 == 0 and (tmp_path / "node").stat().st_mode & 0o077 == 0


def test_a_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(AccessError, match="no permission, or no such dataset; set HF_TOKEN") as failed:
        mf.open(hub.url("raw/train.bin"), dtype="uint16")
    assert "hf_secret" not in str(failed.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with mf.open(hub.url("raw/train.bin"), dtype="uint16") as store:  # storage refuses a token
        assert store.read(0, 7, 9).tolist() == [7, 8]
    small = client(hub, tmp_path / "node", token="hf_secret")
    assert bytes(small.read("README.md", 2, 9, small.stat("README.md").tag)) == FILES["README.md"][2:9]


def test_what_is_not_there_and_what_fails(hub: Hub, tmp_path: Path) -> None:
    assert client(hub, tmp_path).list("data") == [
        (path, len(FILES[path])) for path in sorted(FILES) if "data" in path
    ]
    for url, said in (
        (hub.url("x", "nobranch"), "no such dataset, revision or file"),
        ("hf://datasets/me/other/x", "no such dataset, revision or file"),
        (hub.url("x", "0" * 40), r"no such dataset, revision or file|no such object"),
    ):
        with pytest.raises(MissingError, match=said):
            mf.open(url)
    for url in ("hf://me/corpus/x", "hf://datasets/corpus", "hf://spaces/me/x"):
        with pytest.raises(
            StoreError, match="names no dataset; write hf://datasets/OWNER/NAME@REVISION/PATH"
        ):
            mf.open(url)
    hub.refuse = lambda kind, number: (503, {})
    one = HubClient(hub.url(), {"endpoint": hub.endpoint}, tmp_path / "node", Patience(attempts=2))
    with pytest.raises(UnavailableError, match=r"failed 2 times .* status 503"):
        _ = one.commit


def test_unknown_options_are_refused(hub: Hub) -> None:
    for option in ("revision", "tokne"):
        for revision in ("main", hub.head):
            with pytest.raises(StoreError, match=rf"unknown options \['{option}'\]; the Hub has endpoint"):
                mf.open(hub.url("README.md", revision), dtype="uint8", options={option: "v2"})


def test_a_silent_hub_is_given_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the node's lock with it: the second client would wait for that."""
    monkeypatch.setattr(hub_module, "_MOST_PAUSE_S", 0.0)
    over = threading.Event()
    hub.refuse = lambda kind, number: (404, {}) if over.wait(600) else None
    patience = Patience(timeout_s=0.1, give_up_s=0.1)
    try:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"failed 1 times"):
                _ = HubClient(hub.url(), {"endpoint": hub.endpoint}, tmp_path, patience).commit
            with pytest.raises(UnavailableError, match=r"failed 1 times .* TimeoutError"):
                HubClient(hub.url(revision=hub.head), {"endpoint": hub.endpoint}, tmp_path, patience).stat(
                    "x"
                )
    finally:
        over.set()


def test_processes_that_waited_for_a_failure_do_not_repeat_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse = lambda kind, number: (503, {})
    all_came, lock = threading.Barrier(8), once.locked

    def locked(path: Path, mode: int, **how: Any) -> Any:
        all_came.wait()
        return lock(path, mode, **how)

    def commit(_: int) -> str:
        with pytest.raises(UnavailableError, match=r"failed 2 times .* status 503") as failed:
            _ = HubClient(hub.url(), {"endpoint": hub.endpoint}, tmp_path, Patience(attempts=2)).commit
        return str(failed.value)

    with monkeypatch.context() as patched, ThreadPoolExecutor(8) as pool:
        patched.setattr(once, "locked", locked)
        assert len(set(pool.map(commit, range(8)))) == 1
    assert hub.asked == {"revision": 2}
    hub.refuse = lambda kind, number: None
    assert client(hub, tmp_path).commit == hub.head, "who comes later asks"


def test_the_longest_pause_holds_and_is_no_failure(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers ask for 300 s and then for 1 s; a third client waits, and one 503 is not its end."""
    clock = SimpleNamespace(now=time.time())

    def sleep(seconds: float) -> None:
        clock.now += seconds

    leaps = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now, sleep=sleep)
    for module in (hub_module, retries):
        monkeypatch.setattr(module, "time", leaps)

    def refused(revision: str) -> HubClient:
        return HubClient(
            hub.url(revision=revision), {"endpoint": hub.endpoint}, tmp_path, Patience(attempts=1)
        )

    other, path = refused(hub.head), "raw/train.bin"
    tag = other.stat(path).tag

    def refuse(kind: str, number: int) -> tuple[int, dict[str, str]] | None:
        if kind == "bytes":
            return 429, {"Retry-After": "300"}
        if kind != "revision":
            return None
        if number == 1:  # meanwhile another process is asked to wait longer
            with contextlib.suppress(UnavailableError):
                other.read(path, 0, 9, tag)
            return 429, {"Retry-After": "1"}
        return (503, {}) if number == 2 else None

    hub.refuse, began = refuse, clock.now
    with pytest.raises(UnavailableError, match="status 429"):
        _ = refused("main").commit
    assert clock.now == began
    assert client(hub, tmp_path).commit == hub.head
    assert clock.now >= began + 300
    assert (hub.asked["revision"], hub.asked["bytes"]) == (3, 1)


def test_answers_that_are_cut_or_of_other_bytes_are_asked_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse = lambda kind, number: (200, {}) if (kind, number) == ("revision", 1) else None
    one, path = client(hub, tmp_path), "raw/train.bin"
    assert (one.commit, hub.asked["revision"]) == (hub.head, 2)
    session = huggingface_hub.get_session()

    class Misled:
        def get(self, url: str, headers: dict[str, str], timeout: float) -> Any:
            first = {"Range": "bytes=0-8"} if hub.asked["bytes"] == 0 else {}
            return session.get(url, headers=headers | first, timeout=timeout)

    tag = one.stat(path).tag
    _ = one._url(path, tag)
    with monkeypatch.context() as patched:
        patched.setattr(huggingface_hub, "get_session", Misled)
        assert bytes(one.read(path, 10, 19, tag)) == FILES[path][10:19]
    assert hub.asked["bytes"] == 2


def test_what_is_prepared_is_at_one_commit(hub: Hub) -> None:
    with pytest.raises(
        OptionError, match=r"train-\S+ and test-\S+: give the folder of one split, or .* --glob"
    ):
        find_inputs([hub.url("data")])
    inputs, _ = find_inputs([hub.url("data")], pattern="*.parquet")
    assert [each.url for each in inputs] == [
        hub.url(path, hub.head) for path in sorted(FILES) if "data/" in path
    ]
    with pytest.raises(StoreError, match="the Hub can only be read; write to a path or to object storage"):
        Writer(hub.url("out"), {})


def test_revisions_in_urls() -> None:
    for url, expected in (
        ("hf://datasets/a/b", ("a/b", "main", "")),
        ("hf://datasets/a/b/c/d", ("a/b", "main", "c/d")),
        ("hf://datasets/a/b@v1/c", ("a/b", "v1", "c")),
        ("hf://datasets/a/b@refs/convert/parquet/c/d", ("a/b", "refs/convert/parquet", "c/d")),
        ("hf://datasets/a/b@refs%2Fpr%2F3/c", ("a/b", "refs/pr/3", "c")),
    ):
        found = hub_path(url)
        assert found == expected
        assert hub_path(f"{found.root}/{found.path}".rstrip("/")) == expected
