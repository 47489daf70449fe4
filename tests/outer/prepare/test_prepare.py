"""What `prepare` makes of every kind of input, and that nothing but the input decides it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import Here, documents, jsonl, left_behind, parquet, texts, tree

import meshfeed as mf
from meshfeed.cli import prepare as prepare_command
from meshfeed.cli.main import main
from meshfeed.errors import MeshfeedError, MissingError
from meshfeed.prepare import Local, Text, prepare
from meshfeed.store.checksums import compare
from services.needs import needs
from services.nginx import Nginx
from soak import cases, some

BYTES = Text(tokenizer="bytes")


def expected(*some):
    return [text.encode() for texts in some for text in texts]


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.json.gz", "c.jsonl.zst", "c.json.zst"])
@pytest.mark.parametrize("part_bytes", [40, 300, None])
def test_json_lines_are_documents_in_order(tmp_path, name, part_bytes):
    some = texts(24)
    jsonl(tmp_path / name, some, blank_every=7)
    prepare([tmp_path / name], tmp_path / "out", BYTES, engine=Here(), part_bytes=part_bytes)
    assert documents(tmp_path / "out") == expected(some)
    assert left_behind(tmp_path / "out") == []
    list(compare(mf.open(tmp_path / "out" / "tokens").pair))


@pytest.mark.parametrize("group", [1, 7, 100])
@pytest.mark.parametrize("part_bytes", [40, 300, None])
def test_rows_are_documents_in_order(tmp_path, group, part_bytes):
    some = texts(24)
    parquet(tmp_path / "c.parquet", some, group)
    prepare([tmp_path / "c.parquet"], tmp_path / "out", BYTES, engine=Here(), part_bytes=part_bytes)
    assert documents(tmp_path / "out") == expected(some)


def test_files_folders_and_globs_come_in_the_order_given(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/.hidden.txt", ".git/x.txt", "d.py"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_text(f"of {name}")
    jsonl(tmp_path / "z.jsonl", ["z0", "z1"])
    given = [str(tmp_path / "z.json*"), tmp_path / "in", tmp_path / "in/d.py"]
    prepare(given, tmp_path / "out", BYTES, engine=Here())
    manifest = json.loads((tmp_path / "out/manifest.json").read_bytes())
    names = ["z.jsonl", "in/a.txt", "in/b.txt", "in/sub/c.txt", "in/d.py"]
    assert [each["url"] for each in manifest["request"]["inputs"]] == [str(tmp_path / n) for n in names]
    assert documents(tmp_path / "out") == [
        b"z0",
        b"z1",
        b"of a.txt",
        b"of b.txt",
        b"of sub/c.txt",
        b"of d.py",
    ]
    prepare([tmp_path / "in"], tmp_path / "py", BYTES, pattern="*.py", engine=Here())
    assert documents(tmp_path / "py") == [b"of d.py"]
    words = ["prepare", str(tmp_path / "in"), "--tokenizer", "bytes", "--out", str(tmp_path / "both")]
    assert main([*words, "--glob", "*.py", "--glob", "a.*"]) == 0
    assert documents(tmp_path / "both") == [b"of a.txt", b"of d.py"]


def test_suffixes_may_be_in_capitals(tmp_path):
    """A file of lines would be one document of JSON."""
    jsonl(tmp_path / "a.jsonl", ["a", "b"]).rename(tmp_path / "A.JSONL")
    jsonl(tmp_path / "c.jsonl.gz", ["c", "d"]).rename(tmp_path / "C.Jsonl.GZ")
    prepare([tmp_path / "A.JSONL", tmp_path / "C.Jsonl.GZ"], tmp_path / "out", BYTES, engine=Here())
    assert documents(tmp_path / "out") == [b"a", b"b", b"c", b"d"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    some = texts(100, 3)
    jsonl(folder / "a.jsonl", some[:50] + some[:20])
    jsonl(folder / "b.jsonl.gz", some[50:70])
    parquet(folder / "c.parquet", [*some[70:], some[0]])
    (folder / "d.txt").write_text(some[5])
    return sorted(folder.iterdir()), [*some[:50], *some[:20], *some[50:], some[0], some[5]]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prepare(corpus[0], out, BYTES, dedup=True, validation=0.3, engine=Here())
    return tree(out)


@some(2)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_makes_the_same_bytes(corpus, undisturbed, tmp_path, workers):
    prepare(
        corpus[0], tmp_path / "out", BYTES, dedup=True, validation=0.3, engine=Local(workers), part_bytes=900
    )
    assert tree(tmp_path / "out") == undisturbed


@settings(max_examples=cases(6, 120), deadline=None)
@given(st.integers(400, 9000), st.integers(0, 99), st.lists(st.integers(0, 6), max_size=4))
def test_parts_order_and_stops_decide_nothing(corpus, undisturbed, tmp_path_factory, part_bytes, seed, stops):
    out = tmp_path_factory.mktemp("any") / "out"
    options = {"dedup": True, "validation": 0.3, "part_bytes": part_bytes, "resume": True}
    for stop in stops:
        try:
            prepare(corpus[0], out, BYTES, engine=Here(seed, stop), **options)
        except KeyboardInterrupt:
            assert not out.exists()
    prepare(corpus[0], out, BYTES, engine=Here(seed), **options)
    assert tree(out) == undisturbed
    assert left_behind(out) == []


def test_of_equal_documents_the_first_stays_and_the_text_alone_sets_it_apart(corpus, tmp_path):
    prepare(corpus[0], tmp_path / "one", BYTES, dedup=True, engine=Here())
    unique = list(dict.fromkeys(text.encode() for text in corpus[1]))
    assert documents(tmp_path / "one") == unique
    sets = []
    for share in (0.2, 0.5):
        made = prepare(corpus[0], tmp_path / f"{share}", BYTES, dedup=True, validation=share, engine=Here())
        train, apart = (documents(tmp_path / f"{share}" / name) for name in ("train", "validation"))
        assert [each for each in unique if each not in set(apart)] == train
        assert [each for each in unique if each in set(apart)] == apart
        assert abs(len(apart) / len(unique) - share) < 0.15
        assert made.manifest["num_duplicates"] == len(corpus[1]) - len(unique)
        sets.append(set(apart))
    assert sets[0] <= sets[1]


def test_a_feed_reads_what_was_made(corpus, tmp_path):
    encoding = Text(tokenizer="bytes", eod=True)
    prepare(corpus[0], tmp_path / "out", encoding, engine=Here())
    recipe = mf.Recipe(
        data=mf.open(tmp_path / "out"),
        sequence=mf.Windows(16),
        batch=mf.Batch(sequences=4),
        shuffle="none",
    )
    stream = np.concatenate([[*text.encode(), 256] for text in corpus[1]])
    with mf.Feed(recipe, mf.Layout.parse("dp1")) as feed:
        step = next(iter(feed))
        tokens = np.concatenate([np.asarray(each["tokens"]).reshape(-1, 16) for each in step.microbatches])
    windows = {tuple(stream[i * 16 : i * 16 + 16].tolist()) for i in range(stream.size // 16)}
    assert {tuple(row) for row in tokens.tolist()} <= windows


def test_nothing_in_it_is_an_empty_store(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTES, engine=Local(2))
    assert documents(tmp_path / "out") == []


def test_lists_of_tokens_are_taken_as_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 70000]}\n{"tokens": []}\n')
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", Text(eod="9"), engine=Here())
    with mf.open(tmp_path / "out") as store:
        assert store.dtype == np.int32
        assert store.read_stream(np.array([0]), np.array([4])).tolist() == [1, 70000, 9, 9]
    with pytest.raises(MeshfeedError, match=r"line 1 .*token 70000, which uint16"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "narrow", Text(dtype="uint16"), engine=Here())


def test_the_command_says_what_it_made(corpus, tmp_path, capsys):
    words = ["prepare", *map(str, corpus[0]), "--tokenizer", "bytes", "--eod", "--workers", "2"]
    assert main([*words, "--out", str(tmp_path / "out"), "--dedup", "exact", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    unique = list(dict.fromkeys(corpus[1]))
    store = told["stores"]["."]
    assert (store["num_documents"], told["num_duplicates"]) == (len(unique), len(corpus[1]) - len(unique))
    assert store["num_tokens"] == sum(len(text.encode()) + 1 for text in unique)
    assert store["fingerprint"] == mf.open(tmp_path / "out").fingerprint
    assert told["path"] == str(tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out"), "--show", "3", "--tokenizer", "bytes"]) == 0
    shown = capsys.readouterr().out
    assert "document 0" in shown and unique[0] in shown
    assert main([*words, "--out", str(tmp_path / "two"), "--validation", "0.5"]) == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'two/validation'}: " in said.out
    assert "documents skipped" not in said.out
    assert said.err == "", "no bar where there is no terminal"


def test_the_command_says_what_it_does_not_read_and_that_nothing_came(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in/sub").mkdir(parents=True)
    for name in ("a.txt", "b.md", "sub/c.md", "sub/README", ".hidden"):
        Path("in", name).write_text("a")
    words = ["prepare", "in", "--tokenizer", "bytes", "--out"]
    assert main([*words, "out"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'out'}: 1 document, 1 token (uint8)\n"
    assert said.err == (
        "meshfeed: 3 files of other suffixes not read (2 .md, 1 without a suffix); --glob chooses by name\n"
    )
    assert main([*words, "all", "--glob", "*", "--dedup", "exact"]) == 0
    said = capsys.readouterr()
    assert (said.out.splitlines()[1:], said.err) == (["3 repeated documents skipped"], "")
    Path("in/a.txt").rename("in/a.jsonl")
    Path("in/a.jsonl").write_text("\n")
    assert main([*words, "none", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["stores"]["."]["num_documents"] == 0
    assert said.err.endswith(f"meshfeed: {tmp_path / 'none'}: has no documents, so no Feed can read it\n")


def test_an_interrupted_command_says_how_to_go_on(corpus, tmp_path, capsys, monkeypatch):
    class Stops(Here):
        def encode(self, folder, parts):
            yield from super().encode(folder, parts)
            raise KeyboardInterrupt

    words = ["prepare", *map(str, corpus[0]), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    with monkeypatch.context() as patched:
        patched.setattr(prepare_command, "Local", lambda count: Stops())
        assert main(words) == 130
    first, how = capsys.readouterr().err.splitlines()
    assert first == "meshfeed: interrupted" and how.endswith("kept; continue with --resume")
    assert main([*words, "--resume"]) == 0
    assert documents(tmp_path / "out") == expected(corpus[1])


def test_progress_counts_what_was_done_before(corpus, tmp_path):
    told = []
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus[0], tmp_path / "out", BYTES, engine=Here(stop_after=2), part_bytes=900)
    made = prepare(corpus[0], tmp_path / "out", BYTES, engine=Here(), resume=True, on_progress=told.append)
    encoding = [each for each in told if each.doing == "encoding"]
    count = encoding[0].num_parts
    assert [each.done_parts for each in encoding] == list(range(2, count + 1))
    assert encoding[0].num_bytes > 0
    assert encoding[-1].num_tokens == made.manifest["stores"]["."]["num_tokens"]
    assert [each.done_parts for each in told if each.doing == "merging"][-1] == count


def test_inputs_may_lie_far_away(corpus, tmp_path, monkeypatch):
    needs("nginx")
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "www").mkdir()
    some = [path for path in corpus[0] if path.suffix != ".gz"]
    for path in some:
        shutil.copy(path, tmp_path / "www")
    with Nginx(tmp_path / "www") as server:
        urls = [f"{server.url}/{path.name}" for path in some]
        made = prepare(urls, tmp_path / "far", BYTES, engine=Local(2), part_bytes=1500)
        assert [each["url"] for each in made.manifest["request"]["inputs"]] == urls
        with pytest.raises(MissingError, match=r"nothing\.jsonl"):
            prepare([f"{server.url}/nothing.jsonl"], tmp_path / "no", BYTES, engine=Local(2))
    prepare(some, tmp_path / "near", BYTES, engine=Here())
    assert documents(tmp_path / "far") == documents(tmp_path / "near")
