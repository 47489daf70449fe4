"""What a command shows of foreign text commands no terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from meshfeed.cli.command import Console, Table
from meshfeed.cli.main import main
from meshfeed.text import visible

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202egnp\x00 good"
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
