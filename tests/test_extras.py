"""Hints on how to install what is missing name what works: meshfeed itself is on no package index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshfeed import extras

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".sh", ".html", ".js", ""}
WRONG = re.compile(
    r"pip install[^\n]*[ '\"]meshfeed\b|['\"]meshfeed\[(?!remote,hub,mds,tables,prepare,telemetry,demo\])"
)


def test_no_text_says_to_install_meshfeed_from_an_index() -> None:
    folders = [ROOT / name for name in ("src", "docs", "examples", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES]
    files += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()}
    assert len(texts) > 200
    assert [(str(path), found[0]) for path, text in texts.items() if (found := WRONG.search(text))] == []
    assert WRONG.search("pip install 'meshfeed[mds]'") and WRONG.search("pip install meshfeed")


def test_a_hint_names_the_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        "numpy>=1.26",
        'one>=2; extra == "x"',
        'two[all]>=0.51b0; extra == "x"',
        'three>=1; extra == "y"',
    ]
    monkeypatch.setattr(extras, "_metadata", lambda: asked)
    there = {"one": "2.1"}
    monkeypatch.setattr(extras, "version_of", there.get)
    assert extras.install("x") == "pip install 'two>=0.51b0'"
    there["two"] = "1"  # it is there, and cannot be imported
    assert extras.install("x") == "pip install 'one>=2' 'two>=0.51b0'"
    monkeypatch.setattr(extras, "_metadata", list)
    assert extras.install("x") == "in a checkout of meshfeed, pip install '.[x]'"


def test_a_missing_package_is_named_in_the_error(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pyarrow"] = sys.modules["tokenizers"] = None
import meshfeed as mf
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "a.parquet").write_bytes(b"PAR1PAR1")
(folder / "a.jsonl").write_text("{}")
(folder / "t.json").write_text("{}")
for name in ("a.parquet", "a.jsonl"):
    try:
        mf.open(folder / name, tokenizer=str(folder / "t.json"))
    except mf.StoreError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert len(re.findall(r": pip install '[\w-]+>=", done.stdout)) == 2, done.stdout
