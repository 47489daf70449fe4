"""`meshfeed doctor` on stores near and far, caches that will not do, and packages that are missing."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed import extras
from meshfeed.cli import machine, storage
from meshfeed.cli.main import main
from services.needs import needs
from services.nginx import Nginx


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = main(["doctor", "--json", *words])
    told = json.loads(capsys.readouterr().out)["findings"]
    assert all(set(each) == {"topic", "verdict", "says", "figures"} for each in told)
    return status, {each["topic"]: each for each in told}


def test_a_store_far_away_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("nginx")
    (tmp_path / "served").mkdir()
    write_corpus(tmp_path / "served/c", num_tokens=2000)
    with Nginx(tmp_path / "served") as server:
        status, found = findings(capsys, f"{server.url}/c", "--cache", str(tmp_path / "cache"))
        assert status == 0
        assert "2,000 tokens" in found[f"{server.url}/c"]["says"]
        status, found = findings(capsys, f"{server.url}/d", "--cache", str(tmp_path / "cache"))
        assert status == 1 and found[f"{server.url}/d"]["verdict"] == "bad"
        url = server.url
    status, found = findings(capsys, f"{url}/c", "--cache", str(tmp_path / "other"))
    assert status == 1, "the server is gone"
    assert found[f"{url}/c"]["verdict"] == "bad"


def test_a_cache_that_is_too_small_for_a_shuffle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("nginx")
    (tmp_path / "served").mkdir()
    write_corpus(tmp_path / "served/c", num_tokens=4_000_000)
    with Nginx(tmp_path / "served") as server:
        url, cache = f"{server.url}/c", tmp_path / "cache"
        _, found = findings(capsys, url, "--cache", str(cache))
        assert "fetching" not in found, "it fits"
        mf.open(url, cache=mf.Cache(cache, limit_bytes=4 << 20))
        _, found = findings(capsys, url, "--cache", str(cache))
        assert found["fetching"]["verdict"] == "note" and "of it; for each byte" in found["fetching"]["says"]
        assert found["fetching"]["figures"]["per_byte_global"] > 100
        assert main(["plan", url, "--layout", "dp2", "--capacity", "4096", "--cache", str(cache)]) == 0
        assert "bytes will be fetched for each byte" in " ".join(capsys.readouterr().out.split())


def test_a_store_near_by_and_one_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c", num_tokens=2000)
    status, found = findings(capsys, str(tmp_path / "c"))
    assert status == 0 and "opens: megatron" in found[str(tmp_path / "c")]["says"]
    status, found = findings(capsys, str(tmp_path / "d"))
    assert status == 1 and "this path does not exist" in found[str(tmp_path / "d")]["says"]
    status, found = findings(capsys, "ftp://host/c")
    assert status == 1 and "scheme 'ftp' is unknown" in found["ftp://host/c"]["says"]


def test_the_delivery_of_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = findings(capsys, "--layout", "tp2-cp2-dp4")
    assert "takes share; storage is opened by 4 ranks" in found["layout"]["says"]
    _, found = findings(capsys, "--layout", "tp8-cp2-dp2", "--ranks-per-node", "4")
    assert "on 8 nodes: delivery='auto' takes tree" in found["layout"]["says"]


def test_caches_that_will_not_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    status, found = findings(capsys, "--cache", str(tmp_path / "file"))
    assert status == 1 and found["cache"]["verdict"] == "bad"
    monkeypatch.setattr(storage, "_kind_of", lambda folder: "nfs4")
    _, found = findings(capsys, "--cache", str(tmp_path / "cache"))
    assert found["cache"]["verdict"] == "note" and "network file system" in found["cache"]["says"]
    monkeypatch.setattr(storage, "_kind_of", lambda folder: "ext4")
    monkeypatch.setattr(storage, "_DEFAULT_LIMIT", 1 << 60)
    _, found = findings(capsys, "--cache", str(tmp_path / "cache"))
    assert found["cache"]["verdict"] == "note" and "it may grow to" in found["cache"]["says"]


def test_the_file_system_of_a_link_is_that_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    assert storage._kind_of(tmp_path / "link") == "proc"


def test_a_mount_may_have_a_space_in_its_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nhost:/x {tmp_path}/my\\040data nfs4 rw 0 0\n")
    assert storage._kind_of(tmp_path / "my data/cache", mounts) == "nfs4"


def test_packages_and_limits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        "numpy>=1.26",
        "torch>=99",
        'obstore[all]>=0.9; extra == "remote"',
        'nowhere-to-be-had>=2; python_version >= "3" and extra == "mds"',
    ]
    monkeypatch.setattr(extras, "_metadata", lambda: asked)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(
        extras, "version_of", lambda package: {"nowhere-to-be-had": "1.9"}.get(package, "2.0")
    )
    status, found = findings(capsys)
    assert status == 1
    assert found["packages"]["says"] == "no torch from 99: pip install 'numpy>=1.26' 'torch>=99'"
    assert found["extra [remote]"] == {
        "topic": "extra [remote]", "verdict": "ok", "says": "obstore 2.0", "figures": None,
    }  # fmt: skip
    assert "pip install 'nowhere-to-be-had>=2', if you need it" in found["extra [mds]"]["says"]
    assert found["open files"]["verdict"] == "note" and "ulimit -n 4096" in found["open files"]["says"]


def test_a_device_that_locks_no_pages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nand more")

    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "H200", synchronize=refuse)
    fake = SimpleNamespace(cuda=cuda, empty=refuse, uint8=None, __version__="2.13.0")
    monkeypatch.setattr(machine, "torch", fake)
    status, found = findings(capsys)
    assert status == 1
    assert found["device"]["says"] == "H200: no page-locked copy: CUDA error: out of memory"
