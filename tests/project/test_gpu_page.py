"""`make gpu` on a machine without a GPU: every piece runs, and the page says what was left out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from soak import SOAK

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PIECES = ["widening", "graphs", "rules", "cp_split", "staging", "sharing", "exchanging", "encoding"]
PIECES += ["calibration", "pretrain"]
SHORT = PIECES[:2]  # no processes, no frameworks; a soak runs all
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def test_every_piece_is_tried(gpu: ModuleType) -> None:
    assert sorted(gpu.PIECES) == sorted(PIECES)


@pytest.mark.parametrize("name", PIECES if SOAK else SHORT)
def test_a_piece_runs_and_reaches_its_targets(gpu: ModuleType, name: str) -> None:
    section = gpu.show(name, CPU, short=True)
    assert not section.error
    assert section.left_out or name in ("exchanging", "rules")
    assert all(row.holds for row in section.rows), "a CPU shows no times, so the targets are counts and bits"


def test_a_page_shows_figures_failures_and_what_is_missing(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def piece(bench: object) -> object:
        """Two figures, and then a failure."""
        yield gpu.Row(name="bytes", value=3, unit="×", aim=8, at_least=True)
        yield gpu.LeftOut("the rest", "no CUDA device")
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(gpu, "PIECES", {"a_piece": piece})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    page = (tmp_path / "cpu.md").read_text()
    assert "| bytes | **3 ×** | ≥ 8 |" in page
    assert "**Failed**: RuntimeError: out of memory\n" in page
    assert "| the rest | no CUDA device |" in page
    assert "made on a machine without a GPU" in page
