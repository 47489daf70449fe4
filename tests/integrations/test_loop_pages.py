"""What docs/frameworks_loops.md shows and what examples say of themselves runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import loops

ROOT = Path(__file__).parents[2]
EXAMPLES, PAGE = ROOT / "examples", ROOT / "docs/frameworks_loops.md"


def test_the_page_of_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops.write(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    loops.forget_accelerate()
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(snippets) == 4
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for snippet in snippets:
            exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["resumed"].global_step == 8
    assert names["again"].state.global_step == 4
    assert names["fields"]["input"].shape == (2, 32)
    (first, second, third) = (list(map(loops.rows, names[each])) for each in ("first", "second", "third"))
    assert len(first) == 8 and first != second == third


def test_the_examples_run_as_they_say(tmp_path: Path) -> None:
    corpus = loops.write(tmp_path / "text")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    running = {
        name: subprocess.Popen(
            [*launched, EXAMPLES / name, "--corpus", corpus, "--out", tmp_path / name, "--steps", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("lightning_gpt.py", "transformers_gpt.py", "torchtitan_loop.py")
    }
    said = {name: process.communicate(timeout=240)[0] for name, process in running.items()}
    assert {name: process.returncode for name, process in running.items()} == dict.fromkeys(running, 0), said
    assert "rank 0: 2 steps" in said["lightning_gpt.py"]
    assert "rank 0: 2 steps" in said["transformers_gpt.py"]
    assert "step 1: loss 4." in said["torchtitan_loop.py"]
