"""What a job under torchrun shows of a mistake that every rank makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MISTAKE = """
import meshfeed as mf


def train():
    return mf.Layout.parse("tp2-dp0")


train()
"""
ROWS = """
import meshfeed as mf


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, at):
        raise ValueError("row is damaged")


recipe = mf.Recipe(data=mf.Mapped(mf.SameEveryEpoch(Rows())), sequence=mf.Samples("x"), batch=mf.Batch(4))
next(mf.simulate(recipe, mf.Layout(), 1))
"""


def said(folder: Path, script: str, rank: int, more: str = "") -> list[str]:
    """The lines that a rank of such a job prints as it ends."""
    (folder / "train.py").write_text(more + script)
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "7", "LOCAL_RANK": str(rank)}
    ran = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ran.returncode == 1
    return ran.stderr.splitlines()


def test_a_mistake_is_told_at_the_line_that_makes_it(tmp_path: Path) -> None:
    message = "meshfeed.errors.LayoutError: dp=0: give a whole number from 1"
    lines = said(tmp_path, MISTAKE, 0)
    assert lines[-1] == message and any('return mf.Layout.parse("tp2-dp0")' in line for line in lines)
    assert not any("/meshfeed/" in line for line in lines), "none of the package's own lines"
    assert said(tmp_path, MISTAKE, 1) == [message]


def test_at_level_debug_it_is_told_whole(tmp_path: Path) -> None:
    lines = said(tmp_path, MISTAKE, 1, 'import logging\nlogging.getLogger("meshfeed").setLevel("DEBUG")\n')
    assert any("/meshfeed/layout.py" in line for line in lines)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_users_dataset_is_told_whole(tmp_path: Path, rank: int) -> None:
    lines = said(tmp_path, ROWS, rank)
    assert any(line.endswith("in __getitem__") for line in lines), "where their code raised"
    assert "meshfeed.errors.StoreError" in lines[-1] and "row is damaged" in lines[-1]


def test_an_error_of_the_script_is_told_before_that_of_its_cleaning_up(tmp_path: Path) -> None:
    loop = MISTAKE.rpartition("train()")[0] + "try:\n    1 / 0\nfinally:\n    train()\n"
    for rank in range(2):
        text = "\n".join(said(tmp_path, loop, rank))
        assert "ZeroDivisionError: division by zero" in text and "LayoutError: dp=0" in text
