"""What a command shows of foreign text commands no terminal."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from meshfeed.cli.command import Console, Table
from meshfeed.cli.main import main
from meshfeed.text import visible

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202egnp\x00\u2067\u200f\u061c\u2028 good"
HIDDEN = set(EVIL) - set("]0;owned[2J31mgp good")


def harmless(text: str) -> None:
    assert not HIDDEN & set(text), repr(text)
    assert "\\x1b]0;owned" in text and " good" in text, text


def test_documents(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": EVIL}))
    assert main(["inspect", str(path), "--tokenizer", "bytes", "--show", "1"]) == 0
    harmless(capfd.readouterr().out)


def test_names_of_files_and_columns_in_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = EVIL.replace("\x00", "\\x00")
    path = tmp_path / name
    path.mkdir()
    (path / "a.jsonl").write_text(json.dumps({EVIL: "text"}))
    assert main(["inspect", str(path)]) == 1
    harmless(capfd.readouterr().err)
    out = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main(["prepare", str(path), *out, "--workers", "1"]) == 2
    harmless(capfd.readouterr().err)
    assert main(["prepare", str(path), *out, "--workers", "1", "--max-errors", "1"]) == 0
    said = capfd.readouterr()
    assert not HIDDEN & set(said.out + said.err)


@pytest.mark.parametrize("most", [0, 9])
def test_names_in_tars_and_lists(tmp_path: Path, capfd: pytest.CaptureFixture[str], most: int) -> None:
    """Of samples, of parts, and of what a message has; in the errors, and in the file of those left out."""
    name = EVIL.replace("\x00", "")
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as out:
        for suffix, data in (
            (".jpg", b"\x1b[2J"),
            (".json", json.dumps({EVIL: 1}).encode()),
            (f".{name}", b""),
        ):
            member = tarfile.TarInfo(f"{name}{suffix}")
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    records = [{"text": "x", "image": EVIL}, {"text": "x", "image": f"http://10.0.0.1/{EVIL}"},
               {"text": "x", "image": f"{EVIL}://h/x"}, {"text": "x", "image": f"data:{EVIL},x"}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    out = tmp_path / "out"
    status = main(
        ["prepare", str(tmp_path / "a.tar"), str(tmp_path / "a.jsonl"), "--multimodal", "--out", str(out),
         "--tokenizer", "bytes", "--image-token", "a", "--workers", "1", "--max-errors", str(most)]
    )  # fmt: skip
    assert status == (0 if most else 2)
    said = capfd.readouterr()
    assert not HIDDEN & set(said.out + said.err)
    if not most:
        harmless(said.err)
    else:
        told = (out / "errors.jsonl").read_text()
        assert told.count("\n") == 1 + len(records) and not (HIDDEN - {"\n"}) & set(told)


def test_tables_and_markup() -> None:
    out = io.StringIO()
    console = Console()
    console.file, console.width = out, 400
    table = Table(EVIL)
    table.add_row(EVIL)
    console.print(table)
    console.print(f"[bold]{EVIL}[/bold]")
    harmless(out.getvalue())
    assert out.getvalue().count("good") == 3


def test_text_stays_as_it_is() -> None:
    for text in ("a\tb\nc", "größe 日本 🎉 \u200d", "العربية"):
        assert visible(text) == text
