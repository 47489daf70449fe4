"""Raw text by mf.open: prepared once for a node, whoever dies, and then a store like any other."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from texts import Here, documents, jsonl, left_behind, texts, tree

import meshfeed as mf
import quick
import world
from meshfeed.cli.main import main
from meshfeed.errors import ChangedError, OptionError, StateError, StoreError
from meshfeed.files import Folder
from meshfeed.prepare import Progress, Text, prepare, raw_text
from meshfeed.prepare.inputs.files import find_inputs
from meshfeed.store.format import Place
from meshfeed.store.tokenizer import tokenizer_file
from services.needs import needs
from services.nginx import Nginx

SOME = texts(120, 5)
END = 256  # of a document of bytes
LENGTH = 16


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Lines, packed and not, in eight files whose names follow each other, and a text."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for at, kind in enumerate(("", ".gz", ".zst", ".gz", ".zst", ".gz", ".zst", "")):
        jsonl(folder / f"c-{at}.jsonl{kind}", SOME[15 * at :][:15], blank_every=9)
    (folder / "d.txt").write_text("a text\nof two lines")
    return folder


@pytest.fixture(autouse=True)
def encoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without worker processes, which take longer to start than to work. Ranks, below, have them."""
    monkeypatch.setattr(raw_text, "Local", lambda *_: Here())


def opened(path: Path | str, cache: Path | str, **options: Any) -> mf.store.StreamStore:
    return mf.open(path, tokenizer="bytes", cache=cache, **options)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("c-*", {}),
        ("c-*", {"eod": True}),
        ("c-*", {"eod": "65"}),
        ("c-0.jsonl", {"eod": False}),
        ("c-1.jsonl.gz", {"eod": True}),
        ("d.txt", {}),
    ],
)
def test_it_is_what_prepare_makes(corpus: Path, tmp_path: Path, given: str, options: dict[str, Any]) -> None:
    store = opened(corpus / given, tmp_path / "cache", **options)
    words = {"eod": "--eod"} if options.get("eod") is True else {}
    if isinstance(options.get("eod"), str):
        words = {"eod": f"--eod-token={options['eod']}"}
    out = tmp_path / "out"
    assert (
        main(["prepare", str(corpus / given), "--out", str(out), "--tokenizer", "bytes", *words.values()])
        == 0
    )
    assert tree(Path(store.path)) == tree(out)
    assert store.fingerprint == mf.open(out).fingerprint
    assert left_behind(Path(store.path)) == [f"{Path(store.path).name}.lock"]


def test_its_documents_are_the_lines(corpus: Path, tmp_path: Path) -> None:
    store = opened(corpus / "c-*", tmp_path / "cache", eod=True)
    with store:
        found = [store.read(i, 0, int(store.lengths(np.array([i]))[0])).tolist() for i in range(len(store))]
    assert found == [[*text.encode(), END] for text in SOME]


def test_a_folder_means_its_lines_and_not_its_other_text(corpus: Path, tmp_path: Path) -> None:
    lines = opened(corpus / "c-*", tmp_path / "cache")
    assert opened(corpus, tmp_path / "cache").fingerprint == lines.fingerprint
    assert opened(corpus / "*", tmp_path / "cache").num_documents == lines.num_documents == len(SOME)
    (corpus / "more.parquet").touch()
    for given in (corpus, corpus / "*"):
        with pytest.raises(
            OptionError, match=r"both \.jsonl and \.parquet files; keep each kind in a folder"
        ):
            opened(given, tmp_path / "cache")


def test_a_folder_is_read_as_prepare_reads_it(corpus: Path, tmp_path: Path) -> None:
    """Or refused by one of both; never are files passed over in silence by one alone."""
    names = [
        "b.jsonl",
        ".h.jsonl",
        "_u.jsonl",
        "_d/c.jsonl",
        ".d/c.jsonl",
        "s/_f.jsonl",
        "e.ndjson",
        "f.json.gz",
    ]
    names += [
        "cache-1.arrow",
        "g.jsonl.xz",
        "h.parquet.bz2",
        "é.jsonl",
        "i.jsonl~",
        "j.ndjson.gz",
        "k.txt",
        "L.JSONL",
        "m.Json.GZ",
    ]
    rng, same = np.random.default_rng(3), 0
    for case in range(60):
        folder = tmp_path / str(case)
        for name in ["a.jsonl", *rng.choice(names, 2, replace=False).tolist()]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        place = Place(
            given=str(folder), beside=Folder(str(tmp_path)), name=folder.name, within=Folder(str(folder)),
            column=None, dtype=None, tokenizer="bytes",
        )  # fmt: skip
        files, passed_over = find_inputs([str(folder)])
        try:
            found = raw_text._inputs_at(place)
        except OptionError as error:
            assert (
                passed_over
                and set(passed_over) & {".xz", ".bz2"}
                and "is compressed as none is read here" in str(error)
            )
        else:
            texts = [each.url for each in files if not each.url.endswith(".txt")]  # which are to be named
            assert found == texts, folder
            same += len(found) > 1
    assert same > 20


def test_a_store_is_of_its_tokenizer_which_later_starts_do_not_load(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([corpus / "d.txt"], tmp_path / "bpe", Text(train_bpe=300, eod=True), engine=Here())
    folder, opened = tmp_path / "tokenizer", list[tuple[dict[str, Any], str]]()
    folder.mkdir()
    shutil.copy(tmp_path / "bpe" / "tokenizer.json", folder)
    for end in ("<|endoftext|>", "a"):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        for eod in (None, True, "b"):
            how = {"tokenizer": folder, "eod": eod, "cache": tmp_path / "cache"}
            with mf.open(corpus / "c-*", **how) as store:
                opened.append((how, store.fingerprint))
                last = store.read_stream(np.array([store.num_tokens - 1]), np.array([store.num_tokens]))
                assert eod is None or last == number_of(folder, end if eod is True else "b")
    assert len({found for _, found in opened}) == 4, "without an end, or ended by each of three"
    monkeypatch.setattr("meshfeed.store.tokenizer._loaded", lambda file: pytest.fail("a tokenizer is loaded"))
    for how, fingerprint in opened[3:]:
        assert mf.open(corpus / "c-*", **how).fingerprint == fingerprint


def number_of(folder: Path, token: str) -> int | None:
    return tokenizer_file(str(folder)).load().id_of(token)


# -- by real ranks ------------------------------------------------------------------------------------------


def train(
    rank: int, raw: str, cache: str, made: str, layout: str, state: dict[str, Any] | None, steps: int
) -> tuple[dict[int, list[tuple[int, list[int]]]], dict[str, Any]]:
    """Step -> (window, tokens) of this rank's rows, and the state after some steps. Notes who prepares."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, made, lambda progress: None)
        store = opened(f"{raw}/c-*", cache, eod=True)
    recipe = mf.Recipe(data=store, sequence=mf.Windows(LENGTH), batch=mf.Batch(sequences=8), seed=3, epochs=1)
    seen: dict[int, list[tuple[int, list[int]]]] = {}
    with mf.Feed(recipe, mf.Layout.parse(layout), rank, micro_batch_size=2, pad_rows=True) as feed:
        if state is not None:
            feed.load_state_dict(state)
        for step in feed:
            for microbatch in step.microbatches:
                rows = zip(microbatch.draws.index.tolist(), microbatch["tokens"].tolist())
                seen.setdefault(step.index, []).extend(rows)
            state = feed.state_dict()
            if len(seen) == steps:
                break
    assert state is not None
    return seen, state


def watch(patch: pytest.MonkeyPatch, made: str, look: Callable[[Progress], None]) -> None:
    """From now on this process, where it prepares, notes in a file the parts that it finds, and looks at each.

    Parts are small.
    """
    quick.workers(patch)
    patch.setattr(importlib.import_module("meshfeed.prepare.prepare"), "_LEAST_PART_BYTES", 300)
    real = raw_text.prepare

    def prepare(*args: Any, on_progress: Callable[[Progress], None], **options: Any) -> Any:
        first = True

        def told(progress: Progress) -> None:
            nonlocal first
            if first:
                with Path(made).open("a") as file:
                    file.write(f"{progress.done_parts}\n")
            first = False
            on_progress(progress)
            look(progress)

        return real(*args, on_progress=told, **options)

    patch.setattr(raw_text, "prepare", prepare)


def test_ranks_open_it_at_once_and_a_state_resumes_under_another_layout(corpus: Path, tmp_path: Path) -> None:
    stream = [token for text in SOME for token in (*text.encode(), END)]
    given = str(corpus), str(tmp_path / "cache"), str(tmp_path / "made")
    (first, state), (second, same) = world.run(train, 2, *given, "dp2", None, 3)
    assert state == same and Path(given[2]).read_text() == "0\n", "one rank has prepared it, once"
    rest = world.run(train, 2, *given, "tp2", state, 1_000)
    assert rest[0] == rest[1] and Path(given[2]).read_text() == "0\n"
    windows = [row for each in (first, second, rest[0][0]) for rows in each.values() for row in rows]
    assert sorted(windows) == [(i, stream[LENGTH * i :][:LENGTH]) for i in range(len(stream) // LENGTH)], (
        "every window of the text once"
    )
    out = tmp_path / "out"
    assert main(["prepare", f"{corpus}/c-*", "--out", str(out), "--tokenizer", "bytes", "--eod"]) == 0
    recipe = mf.Recipe(
        data=mf.open(out),
        sequence=mf.Windows(LENGTH),
        batch=mf.Batch(sequences=8),
        seed=3,
        epochs=1,
    )
    with mf.Feed(recipe, micro_batch_size=2, pad_rows=True) as feed:
        feed.load_state_dict(state)  # what it has prepared is the same data
        (step, *_) = feed
    assert step.index == 3


def die_once(rank: int, raw: str, cache: str, made: str) -> str:
    """Opens the text. Whoever is first to prepare it is killed after some parts."""

    def look(progress: Progress) -> None:
        if Path(made).read_text().count("\n") == 1 and progress.done_parts >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, made, look)
        return opened(f"{raw}/c-*", cache, eod=True).path


def test_killed_in_the_middle_the_next_one_goes_on(corpus: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    outcomes = world.start(
        die_once, 3, str(corpus), str(tmp_path / "cache"), str(made), distributed=False
    ).join()
    killed = [outcome for outcome in outcomes if outcome.exitcode == -signal.SIGKILL]
    (path,) = {outcome.result for outcome in outcomes if outcome not in killed}
    assert len(killed) == 1
    begun = [int(line) for line in made.read_text().split()]
    assert len(begun) == 2 and begun[0] == 0 and begun[1] >= 3, "what was encoded was not encoded again"
    out = tmp_path / "out"
    assert main(["prepare", f"{corpus}/c-*", "--out", str(out), "--tokenizer", "bytes", "--eod"]) == 0
    assert tree(Path(path)) == tree(out)
    assert left_behind(Path(path)) == [f"{Path(path).name}.lock"]


# -- files that change, and what is wrong ---------------------------------------------------------------------


def test_a_changed_file_is_prepared_again_and_its_old_state_is_refused(corpus: Path, tmp_path: Path) -> None:
    def feed() -> mf.Feed:
        store = opened(corpus / "c-*", tmp_path / "cache")
        recipe = mf.Recipe(data=store, sequence=mf.Windows(LENGTH), batch=mf.Batch(sequences=4), steps=9)
        return mf.Feed(recipe)

    with feed() as one:
        next(iter(one))
        state, old = one.state_dict(), one.recipe.data
    os.utime(corpus / "c-1.jsonl.gz", ns=(1, 1))
    with feed() as one:
        one.load_state_dict(state)  # the same bytes, read once more
    jsonl(corpus / "c-1.jsonl.gz", SOME[:15][::-1])
    with feed() as one, pytest.raises(StateError):
        one.load_state_dict(state)
    assert one.recipe.data.path == old.path and documents(old.path)[15:30] == [
        text.encode() for text in SOME[:15][::-1]
    ]
    assert len([*Path(old.path).parent.iterdir()]) == 2, "a store and its lock"


def stopped_after_three_parts(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(progress: Progress) -> None:
        if progress.done_parts == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch(patch, str(tmp_path / "made"), stop)
        opened(corpus / "c-*", tmp_path / "cache")


def test_a_job_of_other_files_is_dropped(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after_three_parts(corpus, tmp_path, monkeypatch)
    jsonl(corpus / "c-1.jsonl.gz", SOME[:15])
    assert documents(Path(opened(corpus / "c-*", tmp_path / "cache").path))[15:30] == [
        text.encode() for text in SOME[:15]
    ]


@pytest.mark.parametrize("removed", [("meshfeed-prepare.lock", "job.json"), ("spans.npy",)])
def test_an_unfinished_job_that_lost_some_files_is_begun_anew(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: tuple[str, ...]
) -> None:
    """A system that removes old files of temporary folders takes the first ones first."""
    stopped_after_three_parts(corpus, tmp_path, monkeypatch)
    (job,) = (tmp_path / "cache").glob("u*/kept/text/*.preparing")
    for name in removed:
        (job / name).unlink()
    made = documents(Path(opened(corpus / "c-*", tmp_path / "cache").path))
    assert made == [text.encode() for text in SOME] and not job.exists()


def test_a_file_that_changes_while_it_is_opened(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, str(tmp_path / "made"), lambda progress: os.utime(corpus / "c-3.jsonl.gz"))
    with pytest.raises(ChangedError, match=r"c-3\.jsonl\.gz: was changed after it was read; open it again$"):
        opened(corpus / "c-*", tmp_path / "cache")


def test_what_was_removed_is_made_again_and_what_is_damaged_is_named(corpus: Path, tmp_path: Path) -> None:
    path = Path(opened(corpus / "c-*", tmp_path / "cache").path)
    whole = tree(path)
    for name in ("tokens.bin", "manifest.json"):
        (path / name).unlink()
        opened(corpus / "c-*", tmp_path / "cache")
        assert tree(path) == whole
    shutil.rmtree(path)
    opened(corpus / "c-*", tmp_path / "cache")
    assert tree(path) == whole
    (path / "tokens.bin").write_bytes(b"")
    with pytest.raises(StoreError, match=r"tokens\.idx: byte"):
        opened(corpus / "c-*", tmp_path / "cache")
    assert (path / "manifest.json").exists(), "the work of hours is not removed for an error"


@pytest.mark.parametrize("line", ["{", '{"words": "no text"}', '{"text": 3}'])
def test_a_record_that_is_no_document_is_named(corpus: Path, tmp_path: Path, line: str) -> None:
    jsonl(corpus / "e.jsonl.gz", SOME[:4])
    with gzip.open(corpus / "e.jsonl.gz", "at") as file:
        file.write(f"{line}\n")
    with pytest.raises(StoreError, match=r"e\.jsonl\.gz: line 5: "):
        opened(corpus / "e.jsonl.gz", tmp_path / "cache")
    jsonl(corpus / "e.jsonl.gz", SOME[:4])
    assert opened(corpus / "e.jsonl.gz", tmp_path / "cache").num_documents == 4


def test_a_tokenizer_that_was_trained_here_says_how_documents_end(corpus: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "out", str(corpus / "c-*")
    assert main(["prepare", given, "--out", str(out), "--train-bpe", "300", "--eod"]) == 0
    store = mf.open(given, tokenizer=out / "tokenizer.json", eod=True, cache=tmp_path / "cache")
    assert store.fingerprint == mf.open(out).fingerprint
    whole = json.loads((out / "tokenizer.json").read_text())
    for names in ([], ["[UNK]"], ["<|endoftext|>", "<|im_end|>"]):
        known = [
            {**whole["added_tokens"][0], "id": number, "content": name} for number, name in enumerate(names)
        ]
        (tmp_path / "other.json").write_text(json.dumps({**whole, "added_tokens": known}))
        with pytest.raises(OptionError, match=r"does not say which token ends a document; name it by eod= "):
            mf.open(given, tokenizer=tmp_path / "other.json", eod=True, cache=tmp_path / "cache")


def test_what_is_refused(corpus: Path, tmp_path: Path) -> None:
    for given, options, says in (
        ("c-1.jsonl.gz", {"eod": "no such"}, "has no token 'no such'"),
        ("c-1.jsonl.gz", {"eod": ""}, "has no token ''"),
        ("c-1.jsonl.gz", {"eod": 0}, "eod=0: give a token, or its number as text"),
        ("c-1.jsonl.*", {"dtype": "uint16"}, "text has no option dtype"),
        ("c-0.jsonl", {"tokenizer": None, "eod": True}, r"c-0\.jsonl: eod= is of text; name its tokenizer"),
    ):
        with pytest.raises(OptionError, match=says):
            mf.open(corpus / given, **({"tokenizer": "bytes", "cache": tmp_path / "cache"} | options))
    with pytest.raises(StoreError, match=r"c-1\.jsonl\.gz: found a file, no token store.* with a tokenizer"):
        mf.open(corpus / "c-1.jsonl.gz")
    with pytest.raises(StoreError, match="this path does not exist"):
        opened(corpus / "none.txt", tmp_path / "cache")


def remote(rank: int, url: str, cache: str) -> list[bytes]:
    os.environ["MESHFEED_CACHE"] = cache
    with pytest.raises(OptionError, match="options= do not reach"):
        opened(url, cache, options={"give_up_s": "9"})
    with pytest.MonkeyPatch.context() as patch:
        quick.workers(patch)
        return documents(Path(opened(url, cache).path))


def test_remote_text(corpus: Path, tmp_path: Path) -> None:
    needs("nginx")
    with Nginx(corpus) as server:
        for some in (SOME[:15], SOME[15:30]):
            jsonl(corpus / "f.jsonl.gz", some)
            given = f"{server.url}/f.jsonl.gz", str(tmp_path / "cache")
            (found,) = world.run(remote, 1, *given, distributed=False)
            assert found == [text.encode() for text in some]
            (answers,) = (tmp_path / "cache").glob("u*/answers")
            shutil.rmtree(answers)  # half a minute later


def test_commands_read_it(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokenizer", "bytes", "--eod", "--cache", str(tmp_path / "cache"), "--json"]
    assert main(["inspect", str(corpus / "c-*"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == len(SOME)
    assert main(["trace", str(corpus / "c-*"), "--document", "17", "--sequences", "9", *words]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(line.get("origin", {}).get("file") == str(corpus / "c-1.jsonl.gz") for line in told)
