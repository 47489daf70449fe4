"""`meshfeed inspect`: what it prints, and what it exits with."""

import json
import os

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.cli import inspect
from meshfeed.cli.main import main
from meshfeed.store import IndexedWriter, open_store


def run(*words):
    return main(["inspect", *map(str, words)])


def write(prefix, lengths):
    with IndexedWriter(prefix, "u2") as writer:
        for length in lengths:
            writer.add_document(np.zeros(length, np.uint16))
    return str(prefix)


@pytest.fixture
def store(tmp_path):
    return write(tmp_path / "c", [0, 1, 2, 3, 3, 4, 1500])


def test_tables_show_counts_and_a_histogram(store, capsys):
    assert run(store) == 0
    out = capsys.readouterr().out
    for text in ("uint16", "1,513", open_store(store).fingerprint, "7 documents", "1,024..2,047", "█"):
        assert text in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--show", 2, "--documents", "1"], "--show has no effect beside --documents"),
        (["--show", 2, "--tokenizer", "bytes", "--eod"], "--eod is of text, and"),
        (["--show", 2, "--tokenizer", "bytes", "--eod-token", "9"], "--eod-token is of text, and"),
    ],
)
def test_an_option_without_effect_is_refused(store, capsys, words, told):
    assert run(store, *words) != 0
    assert told in capsys.readouterr().err


def test_json_is_one_object(store, capsys):
    assert run(store + ".idx", "--json", "--verify") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_documents"], facts["num_tokens"], facts["verified"]) == (7, 1513, True)
    lengths = facts["document_lengths"]
    assert (lengths["min"], lengths["median"], lengths["max"], lengths["empty"]) == (0, 3, 1500, 1)
    assert [(b["first"], b["last"], b["documents"]) for b in lengths["histogram"] if b["documents"]] == [
        (0, 0, 1), (1, 1, 1), (2, 3, 3), (4, 7, 1), (1024, 2047, 1),
    ]  # fmt: skip


def test_what_a_ledger_does_to_a_store(store, tmp_path, capsys):
    further = write(tmp_path / "d", [5, 5])
    changes = [
        mf.amendments.Exclude({"web": [1, 6]}),
        mf.amendments.BatchSize(8),
        mf.amendments.Grow("web", further),
        mf.amendments.Exclude({"code": [1]}),
        mf.amendments.Reweigh({"web": 1, "notes": 1}),
    ]
    path = tmp_path / "ledger.jsonl"
    mf.amendments.Ledger(
        tuple(mf.amendments.Amendment(10 * at, change) for at, change in enumerate(changes))
    ).write(path)
    assert run(store, "--amendments", path, "--source", "web", "--json") == 0
    assert json.loads(capsys.readouterr().out)["amendments"] == [
        {"step": 0, "excluded": 2, "tokens": 1501},
        {"step": 20, "grows_by": further, "fingerprint": open_store(further).fingerprint},
    ]
    assert run(store, "--amendments", path, "--source", "web") == 0
    assert "step 0; excluded 2; tokens 1,501" in capsys.readouterr().out
    assert run(store, "--amendments", path) == 2
    assert "the ledger names 'code', 'notes', 'web'" in capsys.readouterr().err
    for options in ([], ["--json"]):
        assert run(store, "--amendments", path, "--source", "wbe", *options) == 2
        assert "--source wbe: the ledger names 'code', 'notes', 'web'" in capsys.readouterr().err
    assert run(store, "--amendments", path, "--source", "notes") == 0
    assert "no amendment of its documents" in capsys.readouterr().out
    assert run(store, "--amendments", path, "--source", "notes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["amendments"] == []
    assert run(further, "--amendments", path, "--source", "web") == 2
    assert "excludes document 6" in capsys.readouterr().err
    assert run(store, "--source", "web") == 2
    assert "without --amendments" in capsys.readouterr().err


def test_an_empty_store_is_shown(tmp_path, capsys):
    assert run(write(tmp_path / "c", []), "--verify") == 0
    assert "0 documents" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_broken_store_is_named_with_exit_code_1(store, capsys, options):
    os.truncate(store + ".bin", 8)
    assert run(store, "--verify", *options) == 1
    captured = capsys.readouterr()
    message = json.loads(captured.out)["broken"] if options else captured.err
    assert "c.idx: byte 86" in message


def test_verify_names_what_only_it_finds(store, capsys, monkeypatch):
    monkeypatch.setattr("meshfeed.store.index.CHECKED_WHOLE", 2)
    monkeypatch.setattr("meshfeed.store.index.CHECKED_ENDS", 1)
    with open(store + ".idx", "r+b") as stream:
        stream.seek(34 + 4 * 3)
        stream.write(b"\xff\xff\xff\xff")
    assert run(store) == 0
    assert run(store, "--verify") == 1
    assert "c.idx: byte 46: sequence 3 has -1 tokens" in capsys.readouterr().err


def test_a_huge_store_is_looked_at_in_part_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect, "_LOOKED_AT_WHOLE", 100)
    monkeypatch.setattr(inspect, "_NUM_BLOCKS", 4)
    monkeypatch.setattr(inspect, "_BLOCK_DOCUMENTS", 10)
    prefix = write(tmp_path / "c", range(101))
    lengths = inspect.look_at_lengths(open_store(prefix))
    assert lengths.tokens.tolist() == [*range(10), *range(30, 40), *range(60, 70), *range(91, 101)]
    assert run(prefix) == 0
    assert "from 40 of 101 documents" in " ".join(capsys.readouterr().out.split())
