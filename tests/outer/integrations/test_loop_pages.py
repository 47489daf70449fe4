"""What docs/frameworks_loops.md shows and what examples say of themselves runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import loops
import quick

ROOT = Path(__file__).parents[3]
EXAMPLES, PAGE = ROOT / "examples", ROOT / "docs/frameworks_loops.md"


def test_the_page_of_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops.write(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    loops.forget_accelerate()
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(snippets) == 7
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for snippet in snippets:
            exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["resumed"].global_step == 8
    assert names["again"].state.global_step == 4
    assert names["fields"]["input"].shape == (2, 32)
    assert names["line"]["positions"].shape == names["targets"].shape == (256,)
    assert names["trained"] == [0, 1, 2, 2]


FRAMEWORKS = {
    "lightning_gpt": ("lightning",),
    "transformers_gpt": ("transformers", "accelerate"),
    "torchtitan_loop": ("torchtitan",),
    "megatron_gpt": ("megatron-core",),
}


def test_the_examples_run_as_they_say(tmp_path: Path) -> None:
    """Every command of their docstrings, resuming included; the versions that they name are the pinned ones."""
    pinned = "".join((ROOT / f"requirements-{name}.txt").read_text() for name in ("frameworks", "oracles"))
    corpus = loops.write(tmp_path / "text")
    path = os.pathsep.join([str(ROOT / "tests"), str(EXAMPLES), *sys.path])
    running: dict[str, subprocess.Popen[str]] = {}
    for name in FRAMEWORKS:
        (tmp_path / name).mkdir()
        running[name] = subprocess.Popen(
            [quick.python(), Path(__file__).with_name("example_commands.py"), name, corpus, tmp_path / name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
    said = {name: process.communicate(timeout=800)[0] for name, process in running.items()}
    assert {name: process.returncode for name, process in running.items()} == dict.fromkeys(running, 0), said
    for name, packages in FRAMEWORKS.items():
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        assert said[name].count(f"4 steps, run with {versions}, torch ") == 2, said[name]
        assert "\n2 commands\n" in said[name]
        shown = (EXAMPLES / f"{name}.py").read_text()
        for package in packages:
            (tested,) = re.findall(rf"^{package}==(\S+)", pinned, re.M)
            assert f"{package} {tested}" in shown
    assert "step 1: loss 4." in said["torchtitan_loop"]
