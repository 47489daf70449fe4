"""`prepare --dry-run` shows what `prepare` would make, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.prepare import Chats, Text
from meshfeed.prepare.dry_run import dry_run

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 conversations of one to three answers in two files, some of weight 0, some of no answer."""
    letters = {letter: i for i, letter in enumerate(sorted(set("ua:;0123456789 plusi")))}
    tokenizer = Tokenizer(BPE(letters, []))
    tokenizer.decoder = Fuse()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    for file in range(2):
        with (tmp_path / f"{file}.jsonl").open("w") as lines:
            for n in range(30):
                turns: list[dict[str, Any]] = []
                for k in range(1 + n % 3):
                    turns.append({"role": "user", "content": f"{n} plus {k}"})
                    turns.append({"role": "assistant", "content": f"is {n + k}", "weight": int(k != 1)})
                said = turns[:1] if n % 10 == 7 else turns
                lines.write(json.dumps({"messages": said}) + "\n")
    return tmp_path


def test_it_shows_what_prepare_makes(folder: Path) -> None:
    inputs, chats = [folder / "0.jsonl", folder / "1.jsonl"], Chats(tokenizer=str(folder / "tokenizer"))
    before = sorted(folder.rglob("*"))
    tried = list(dry_run(inputs, chats, 40))
    assert sorted(folder.rglob("*")) == before
    refused = [each for each in tried if each.reason is not None]
    assert [(Path(each.input).name, each.record) for each in refused] == [
        *((f"{0}.jsonl", n) for n in (7, 17, 27)),
        *((f"{1}.jsonl", n) for n in (7,)),
    ]
    assert all("no message of the assistant" in str(each.reason) for each in refused)
    good = [each for each in tried if each.reason is None]
    assert len(good) == 40
    mf.prepare.prepare(inputs, folder / "made", chats, max_errors=9)
    with mf.open(folder / "made") as store, store.columns["loss_mask"] as masks:
        for number, each in enumerate(good):
            size = int(store.lengths(np.array([number]))[0])
            assert np.array_equal(store.read(number, 0, size), each.tokens)
            assert np.array_equal(masks.read(number, 0, size), each.loss_mask)


def test_records_of_a_long_file_have_their_own_numbers(folder: Path) -> None:
    rows = [json.dumps({"text": "x" * 100_000}) if n % 5 else "" for n in range(40)]
    rows[33] = "{"
    (folder / "long.jsonl").write_text("\n".join(rows))
    tried = list(dry_run([folder / "long.jsonl"], Text(tokenizer="bytes"), 99))
    assert [each.record for each in tried] == [n for n in range(40) if n % 5]
    assert [each.record for each in tried if each.reason] == [33]


def test_text_bears_loss_everywhere(folder: Path) -> None:
    text = Text(tokenizer="bytes")
    (one,) = dry_run([folder / "0.jsonl"], Text(tokenizer="bytes"), 1, kind="text")
    assert one.loss_mask is None and one.tokens.size == (folder / "0.jsonl").stat().st_size
    assert len(list(dry_run([folder / "0.jsonl"], text, 5, kind="text"))) == 1, "there is one document"


def test_the_command_marks_what_bears_loss(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    asked = ["prepare", "0.jsonl", "--out", "made", "--chat", "--tokenizer", "tokenizer", "--dry-run"]
    assert main([*asked, "2"]) == 0
    said = capsys.readouterr().out
    assert "record 1: 5 of 36 tokens bear loss in 1 span" in said
    assert "u:1 plus 0;a:⟦is 1;⟧u:1 plus 1;a:is 2;" in said
    assert "2 documents: 10 of 54 tokens bear loss (18.5%); 0 refused; nothing was written" in said
    assert main([*asked, "9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(told[name]) for name in ("dry_run", "refused")] == [9, 1]
    assert told["bear_loss"] == sum(each["bear_loss"] for each in told["dry_run"])
    texts = told["dry_run"][2]["texts"]
    assert [text for bears, text in texts if bears] == ["is 2;", "is 4;"]
    assert not (folder / "made").exists()
    (folder / "a.txt").write_text("seven s")
    assert main(["prepare", "a.txt", "--out", "made", "--tokenizer", "bytes", "--dry-run", "1"]) == 0
    assert "record 0: 6 of 7 tokens bear loss in 1 span" in capsys.readouterr().out, (
        "nothing predicts the first"
    )


def test_a_tokenizer_that_is_not_trained_yet_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["prepare", str(folder / "0.jsonl"), "--out", str(folder / "m"), "--train-bpe", "300"]
    assert main([*asked, "--dry-run", "2"]) != 0
    assert "--train-bpe trains a tokenizer on all text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ignored",
    ["--engine ray", "--ray-address auto", "--dedup exact", "--validation 0.5", "--column foo --format text"],
)
def test_an_option_without_effect_is_refused(
    folder: Path, ignored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["prepare", str(folder / "0.jsonl"), "--out", str(folder / "m"), "--tokenizer", "bytes"]
    assert main([*asked, "--dry-run", "2", *ignored.split()]) != 0
    assert f"{' '.join(ignored.split()[:1])}" in (told := capsys.readouterr().err) and "has no effect" in told
