"""What a user may get wrong: each ends with 2 and a line that says what, where and what to do, and changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.cli.main import main
from services.needs import small_disk

RECIPE = """
import meshfeed as mf
mix = mf.Mixture({"web": (mf.open("web"), 3), "code": (mf.open("code"), 1)})
recipe = mf.Recipe(data=mix, sequence=mf.Windows(16), batch=mf.Batch(8), seed=7)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))
    for name, count in (("web", 40), ("code", 10), ("empty", 0)):
        with mf.IndexedWriter(name, np.uint8) as writer:
            for length in range(count):
                writer.add_document(np.full(length, 0xF1, np.uint8))
    with mf.DatasetWriter("chat", {"tokens": "u1", "loss_mask": "u1"}) as writer:
        writer.add_document(tokens=np.ones(9, np.uint8), loss_mask=np.ones(9, np.uint8))
    Path("recipe.py").write_text(RECIPE)
    Path("list.txt").write_text("web\t3\n")
    Path("text.jsonl").write_text('{"text": "some"}\n')
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("inspect s3://", "s3://: .*; check the URL and the storage options"),
        (
            "inspect text.jsonl --tokenizer bytes --cache /proc/x",
            r"give --cache a folder",
        ),
        (
            "prepare text.jsonl --out web --tokenizer bytes",
            r"web\.bin: would be opened in place of .*web; move",
        ),
        (
            "exposure web --until 99999999999999999999",
            "--until 9+: beyond the 2..62 positions .* an earlier step",
        ),
        (
            "exposure recipe.py list.txt --until 99999999999999999999",
            "--until 9+: beyond the 2..62 positions",
        ),
        (
            "trace web --document 3 --epochs 46116860184273879000",
            "--epochs 46116860184273879000: beyond the 2",
        ),
        ("trace web --document 3 --epochs 461168601842738790", "--epochs 461168601842738790: beyond the 2"),
        (
            "exposure empty --until 4",
            r"makes no sequence of store IndexedStore\('empty'\); leave it out, or give it",
        ),
        (
            "plan web --layout dp2 --capacity 99 --sequences 4000000000000000",
            "not enough memory: .*; ask for",
        ),
        ("roles dp100000000", "layout dp100000000: 100,000,000 ranks; give one of up to 1,048,576"),
        ("demo --out web.bin", r"--out web\.bin: Not a directory; name another directory"),
        ("demo --out /proc/x", "--out /proc/x: No such file or directory; name another directory"),
    ],
)
def test_a_line_tells_what_to_do_and_nothing_changes(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status = main(words.split())
    err = capsys.readouterr().err
    assert status == 2 and "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("meshfeed: ") and re.search(says, line), line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_full_disk_leaves_a_page_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(folder / "disk", "64k"):
        page, filler = folder / "disk/page.html", folder / "disk/filler"
        page.write_text("an earlier page")
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as stream:
            while stream.write(bytes(1 << 10)):
                pass
        for words, says in (
            (
                f"inspect web --html {page}",
                "page.html: No space left on device; choose another file to write",
            ),
        ):
            assert main(words.split()) == 2
            assert says in capsys.readouterr().err
        words = f"inspect text.jsonl --tokenizer bytes --cache {folder}/disk/cache"
        assert main(words.split()) == 2, "a full cache says nothing about the store"
        assert page.read_text() == "an earlier page"
        assert {path.name for path in (folder / "disk").iterdir()} <= {"page.html", "filler", "cache"}


def test_a_page_that_is_written_again_is_for_the_same_readers(folder: Path) -> None:
    page = folder / "page.html"
    page.write_text("an earlier page of private texts")
    page.chmod(0o600)
    assert main(f"inspect web --html {page}".split()) == 0
    assert page.read_text().startswith("<!doctype") and page.stat().st_mode & 0o777 == 0o600


def test_a_lack_of_memory_that_has_no_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse(*_: object, **__: object) -> mf.Layout:
        raise MemoryError

    monkeypatch.setattr("meshfeed.cli.roles.Layout.parse", parse)
    assert main(["roles", "dp2"]) == 2
    assert capsys.readouterr().err.startswith("meshfeed: not enough memory; ask for less")
