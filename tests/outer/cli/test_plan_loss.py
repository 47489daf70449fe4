"""What `meshfeed plan` says of steps without loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.cli.main import main

ANSWER = 6


def test_meshfeed_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    masks = [*[[0] * 10 + [1] * ANSWER] * 8, *[[0] * 40 + [1] * ANSWER] * 4, *[[0] * 10 + [1] * ANSWER] * 4]
    with mf.DatasetWriter(tmp_path / "chats", {"tokens": "i4", "loss_mask": "u1"}) as writer:
        for mask in masks:
            writer.add_document(tokens=np.arange(len(mask), dtype="i4"), loss_mask=np.array(mask, "u1"))
    recipe = f"import meshfeed as mf\nchats = mf.Recipe(data=mf.open({str(tmp_path / 'chats')!r}), sequence=mf.Chat(), "
    (tmp_path / "r.py").write_text(f"{recipe}batch=mf.Batch(4), shuffle='none', epochs=1)\n")
    monkeypatch.chdir(tmp_path)
    asked = [
        "plan",
        "r.py:chats",
        "--layout",
        "dp1",
        "--capacity",
        "32",
        "--oversize",
        "truncate",
        "--steps",
        "0:4",
    ]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "step 2: 4 lose all their loss where they are truncated" in shown
    assert "step 2: no token bears loss, and a feed refuses it" in shown
    assert main([*asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["steps"]
    assert [each["valid_tokens"] for each in facts] == [4 * ANSWER, 4 * ANSWER, 0, 4 * ANSWER]
    assert [each["cut_loss"] for each in facts] == [[], [], [0, 1, 2, 3], []]
