"""Hints on how to install what is missing name what works: meshfeed itself is on no package index."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import meshfeed as mf
from meshfeed import extras
from meshfeed.integrations import loader

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".sh", ".html", ".js", ""}
WRONG = re.compile(
    r"pip install[^\n]*[ '\"]meshfeed\b|['\"]meshfeed\[(?!remote,hub,mds,tables,prepare,vlm,audio,telemetry,demo\])"
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


def test_every_extra_has_a_bound_above_what_the_tests_use(monkeypatch: pytest.MonkeyPatch) -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [f"{each}; extra == '{extra}'" for extra, packages in told.items() for each in packages]
    monkeypatch.setattr(extras, "_metadata", lambda: [line for line in lines if "meshfeed[" not in line])
    pinned = dict(
        line.partition(";")[0].replace("[nodejs]", "").split("==")
        for path in ROOT.glob("requirements-*.txt")
        for line in path.read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    asked = extras.requirements()
    assert set(asked) == set(told) - {"all"}
    for package in (each for packages in asked.values() for each in packages):
        assert package.below, f"{package.name}: to which version is it tested?"
        if version := pinned.get(package.name):
            least, below = extras.numbers(package.least), extras.numbers(package.below)
            assert least <= extras.numbers(version) < below, package


@pytest.mark.parametrize(
    ("version", "ends"),
    [
        ("1.4", "in silence"),
        ("2.6.9", "in silence"),
        ("2.7.0+cpu", "warned"),
        ("2.7", "warned"),
        ("2.10", "warned"),
        ("3.0", "refused"),
    ],
)
def test_a_newer_framework_is_named_with_its_tested_versions(
    version: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_metadata", lambda: ['one<2.7.0,>=2.4; extra == "x"'])
    monkeypatch.setattr(extras, "version_of", {"one": version}.get)
    told = (
        rf"one {re.escape(version)} is not tested with meshfeed, 'one>=2\.4,<2\.7\.0' is.*MESHFEED_UNTESTED=1"
    )
    loader.check_versions.cache_clear()
    if ends == "refused":
        with pytest.raises(mf.MeshfeedError, match=told):
            loader.framework("json", "x")
    elif ends == "warned":
        with pytest.warns(UserWarning, match=told):
            loader.framework("json", "x")
    monkeypatch.setenv("MESHFEED_UNTESTED", "True" if ends != "in silence" else "off")
    loader.check_versions.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.framework("json", "x")
        monkeypatch.delenv("MESHFEED_UNTESTED")
        loader.framework("json", "x")  # it was said, or allowed, once
    loader.check_versions.cache_clear()
    monkeypatch.setenv("MESHFEED_UNTESTED", "maybe")
    with pytest.raises(mf.errors.OptionError, match="MESHFEED_UNTESTED='maybe': set it to one of 1, true"):
        loader.framework("json", "x")
    loader.check_versions.cache_clear()


def test_a_newer_framework_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_metadata", lambda: ['one<2.7,>=2.4; extra == "x"'])
    monkeypatch.setattr(extras, "version_of", {"one": "2.8"}.get)
    with pytest.raises(mf.MeshfeedError, match=r"no_such_module.*; one 2\.8 is not tested .*<2\.7' is; pip"):
        loader.framework("no_such_module", "x")


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
    except mf.errors.StoreError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert len(re.findall(r": pip install '[\w-]+>=", done.stdout)) == 2, done.stdout
