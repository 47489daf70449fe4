"""What commands take for RECIPE: a file that makes one, whose errors name its line, or a store by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.cli.main import main
from meshfeed.cli.rule_names import rule_named
from meshfeed.store import IndexedWriter

RECIPE = "recipe = mf.Recipe(data=mf.open({!r}), sequence=mf.Windows(32), batch=mf.Batch(sequences=4))\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_corpus(tmp_path / "c", num_tokens=2000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def traced(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    status = main(["trace", *words, "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return [json.loads(line) for line in captured.out.splitlines()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import meshfeed as mf\n\nrecipe = mf.Recipe(data=nothing)\n",
         "recipe.py:3: NameError: name 'nothing' is not defined\n    recipe = mf.Recipe(data=nothing)"),
        ("import meshfeed as mf\nstore = mf.open('nowhere')\n",
         "recipe.py:2: nowhere: this path does not exist"),
        ("import meshfeed as mf\ndef make():\n    return mf.Batch(sequences=0)\nrecipe = make()\n",
         "recipe.py:3: Batch(sequences=0)"),
        ("recipe = (\n", "recipe.py:1: '(' was never closed: recipe = ("),
        ("import sys\nsys.exit('no')\n", "recipe.py:2: SystemExit: no"),
        ("other = 3\n", "recipe.py makes no mf.Recipe called 'recipe'; give FILE.py"),
        (f"import meshfeed as mf\n{RECIPE.format('c')}mine, recipe = recipe, None\n", "it has recipe.py:mine"),
    ],
)  # fmt: skip
def test_an_error_names_the_line_of_the_users_file(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (folder / "recipe.py").write_text(text)
    assert main(["trace", "recipe.py", "--step", "0"]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_a_recipe_may_import_what_lies_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs/made_by_me.py").write_text(f"import meshfeed as mf\n{RECIPE.format('c')}")
    (folder / "jobs/recipe.py").write_text("from made_by_me import recipe\n")
    assert traced(capsys, "jobs/recipe.py", "--step", "0")


def test_a_store_alone_has_the_options_of_a_stream(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_recipe = f"import meshfeed as mf\n{RECIPE.format('c')}"
    (folder / "recipe.py").write_text(by_recipe)
    by_path = traced(capsys, "c", "--window", "32", "--sequences", "4", "--step", "3")
    assert by_path == traced(capsys, "recipe.py", "--step", "3")
    assert by_path != traced(capsys, "c", "--window", "32", "--sequences", "4", "--step", "3", "--seed", "5")
    by_tokens = traced(capsys, "c", "--window", "32", "--tokens", "128", "--step", "3")
    assert by_tokens == by_path, "4 windows"
    assert main(["trace", "c", "--tokens", "128", "--sequences", "4", "--step", "3"]) == 2
    assert "--sequences and --tokens are two batches; give one of them" in capsys.readouterr().err
    assert main(["trace", "recipe.py", "--step", "0", "--sequences", "8"]) == 2
    assert "--sequences is of a store given by its path; recipe.py says it itself" in capsys.readouterr().err


def test_a_store_alone_has_any_registered_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["--sequences", "4", "--step", "3"]
    windows = traced(capsys, "c", "--rule", "windows(32)", *step)
    assert windows == traced(capsys, "c", "--window", "32", *step)
    packs = ["--capacity", "4096", *step]
    assert traced(capsys, "c", "--rule", "documents", *packs) == traced(capsys, "c", *packs)
    assert traced(capsys, "c", "--rule", "masked(16, vocab_size=99, mask_token=7)", *step) != windows
    assert rule_named("windows(32, eod_mask_loss=True)") == mf.Windows(32, eod_mask_loss=True)
    for rule, why in {
        "window(32)": "there is no rule 'window'; known rules: chat, documents, masked, megatron_gpt, windows",
        "windows(": "write a name and literal arguments, such as windows(4096)",
        "windows(len([]))": "write a name and literal arguments",
        "windows": "missing 1 required positional argument: 'length'",
        "windows(0)": "Windows(length=0): at least one token",
    }.items():
        assert main(["trace", "c", "--rule", rule, *step]) == 2
        assert why in capsys.readouterr().err
    assert main(["trace", "c", "--rule", "documents", "--window", "32", *step]) == 2
    assert "--rule and --window are two rules; give one of them" in capsys.readouterr().err


def test_a_store_alone_has_the_options_of_open(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"words": f"text number {number}", "tokens": [number] * number} for number in range(1, 20)]
    (folder / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["c.jsonl", "--cache", str(folder / "cache"), "--document", "4"]
    assert traced(capsys, *words)[0]["index"] == 4
    plan = ["plan", "c.jsonl", "--layout", "dp2", "--capacity", "512", "--sequences", "19", "--json"]
    plan += ["--cache", str(folder / "cache")]
    assert main(plan) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["tokens"] == sum(range(1, 20))
    assert main([*plan, "--column", "words", "--tokenizer", "bytes"]) == 0
    of_text = sum(len(str(line["words"])) for line in lines)
    assert json.loads(capsys.readouterr().out)["steps"][0]["tokens"] == of_text
    assert (folder / "cache").is_dir()


def test_a_plan_of_rows_is_refused_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "recipe.py").write_text(f"import meshfeed as mf\n{RECIPE.format('c')}")
    assert main(["plan", "recipe.py", "--layout", "dp2", "--capacity", "64"]) == 2
    assert "has sequences of one length, which need no plan" in capsys.readouterr().err


def test_a_document_without_a_token_and_one_that_is_dropped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(folder / "d", np.uint16) as writer:
        for size in (5, 0, 90, 7):
            writer.add_document(np.ones(size, np.uint16))
    words = ["d", "--layout", "dp2", "--capacity", "16", "--oversize", "drop", "--sequences", "4"]
    found = {}
    for document in range(4):
        (found[document],) = traced(capsys, *words, "--document", str(document))
    assert found[0]["tokens"] == "0:5" and len(found[0]["ranks"]) == 1
    assert (found[1]["step"], found[1]["tokens"], found[1]["ranks"]) == (0, None, [])
    assert (found[2]["step"], found[2]["ranks"], found[2]["microbatch"]) == (0, [], None)
    without = traced(capsys, "d", "--document", "0", "--sequences", "4")
    assert without[0]["ranks"] is None, "nothing tells how they are packed"
    assert main(["trace", *words, "--document", "0"]) == 0
    assert "0:5" in capsys.readouterr().out
    assert main(["trace", *words, "--document", "0", "--rank", "7"]) == 2
    assert "rank 7 is not in layout" in capsys.readouterr().err


def test_lengths_that_are_none_name_file_and_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--layout", "dp2", "--capacity", "64", "--lengths", "lengths.txt"]
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("lengths.txt: No such file or directory\n")
    for text, says in {
        "12\n\n7 8\nmany\n": "lengths.txt:4: 'many' is not a whole number; write one per line",
        "4.5\n3\n": "lengths.txt:1: '4.5' is not a whole number",
        "3\n-4\n": "lengths.txt:2: -4; a length is 0 or more",
        f"{2**63}\n": f"lengths.txt:1: {2**63}; a length is below",
        "": "lengths.txt holds no lengths; write",
        "length\n \n": "lengths.txt holds no lengths; write",
    }.items():
        (folder / "lengths.txt").write_text(text)
        assert main(words) == 2
        assert says in capsys.readouterr().err
