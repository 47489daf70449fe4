"""What records may name: nothing outside the folder of their file, or of the one that the user names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from media import picture

from meshfeed.errors import StoreError
from meshfeed.prepare.inputs.named import fetch_from

PNG = picture(5, 9)
MOST = 1 << 20


@pytest.mark.parametrize("scheme", ["s3", "S3", "gs", "az", "abfss", "hf", "http", "https", "HTTP"])
def test_urls_elsewhere_are_refused(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked: they would be read from this machine, with its credentials."""
    monkeypatch.setattr("meshfeed.prepare.inputs.named.Folder.file", lambda *_: pytest.fail("it is read"))
    folder = f"{scheme}://b/pictures"
    for url in ("b/a.png", "b/picture/a.png", "b", "c/pictures/a.png", "me:word@c/pictures/a.png"):
        for here, own in ((str(tmp_path), str(tmp_path)), (folder, "/x"), ("/x", f"{folder}/")):
            with pytest.raises(
                StoreError, match=r"not below the folder of its file.*--parts-folder"
            ) as refused:
                fetch_from(here, MOST, own=own)(f"{scheme}://{url}")
            assert "word" not in str(refused.value)


@pytest.mark.parametrize("base", ["s3://b/pictures", "http://h/pictures"])
@pytest.mark.parametrize("name", ["../a.png", "x/../../a.png", "%2e%2e/a.png", "..%5ca.png", "/a.png"])
def test_no_name_leaves_a_folder_of_storage(base: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfeed.remote.CachedFile", lambda *_: pytest.fail("it is read"))
    for given in (name, f"{base}/{name}"):
        with pytest.raises(StoreError, match=r"without '\.\.'|not below the folder"):
            fetch_from(base, MOST)(given)


@pytest.mark.parametrize("name", ["http://[::1", "\ud800.png"])
def test_names_that_are_no_urls_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="neither a path nor a URL"):
        fetch_from(str(tmp_path), MOST)(name)


# -- links ------------------------------------------------------------------------------------------------


def test_links_lead_to_nothing_outside_a_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "outside"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.png").write_bytes(PNG)
    (inside / "sub/a.png").write_bytes(PNG)
    (inside / "file.png").symlink_to(outside / "secret.png")
    (inside / "lnk").symlink_to(outside)
    (inside / "up.png").symlink_to("../outside/secret.png")
    (inside / "chain.png").symlink_to("sub/../file.png")
    (inside / "own.png").symlink_to("sub/a.png")
    (inside / "near").symlink_to("sub")
    (inside / "round.png").symlink_to("round.png")
    (tmp_path / "also").symlink_to(inside)
    os.mkfifo(inside / "pipe.png")
    for folder in (inside, tmp_path / "also"):
        fetch = fetch_from(str(folder), MOST)
        for name in ("sub/a.png", "own.png", "near/a.png", str(folder / "own.png")):
            assert fetch(name) == PNG, name
        for name in ("file.png", "lnk/secret.png", "up.png", "chain.png", str(folder / "lnk/secret.png")):
            with pytest.raises(StoreError, match=r"a link that leads out of .*cp -rL") as refused:
                fetch(name)
            assert "outside/" not in str(refused.value)
        for name, why in (
            ("round.png", "levels of symbolic links"),
            ("pipe.png", "not a file"),
            ("sub", "not a file|directory"),
            ("sub/none.png", "missing"),
            ("sub/a.png/x", "[Nn]ot a directory|missing"),
        ):
            with pytest.raises(StoreError, match=why):
                fetch(name)


def test_a_folder_that_becomes_a_link_while_it_is_read_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its real path was found, and before it is opened."""
    inside, outside = tmp_path / "in", tmp_path / "outside"
    for folder in (inside / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(PNG if folder == outside else b"own")
    real = os.path.realpath

    def then_swapped(path: str, **how: bool) -> str:
        found = real(path, **how)
        if str(path).endswith("a.png"):
            (inside / "sub").rename(inside / "was")
            (inside / "sub").symlink_to(outside)
        return found

    monkeypatch.setattr("meshfeed.prepare.inputs.named.os.path.realpath", then_swapped)
    with pytest.raises(StoreError):
        fetch_from(str(inside), MOST)("sub/a.png")
