"""What a wrong input, a full disk and a dead worker get."""

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import tarfile
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from texts import Here, documents, jsonl, left_behind, parquet, texts, tree

from meshfeed.cli.main import main
from meshfeed.errors import ChangedError, ChecksumError, OptionError, PrepareError, StoreError
from meshfeed.prepare import Local, Text, prepare
from services.needs import needs, small_disk
from services.nginx import Nginx
from soak import some

BYTES = Text(tokenizer="bytes")
BAD = {
    b"{broken": "not valid JSON",
    b"[1]": "list where a JSON object belongs",
    b'{"txt": "a"}': "no 'text', found 'txt'",
    b'{"text": null}': "null where text belongs",
    b'{"text": 5}': "int where text belongs",
    b'{"text": "\\ud800"}': "text is not Unicode",
    b'{"text": "\xff"}': "not valid UTF-8: byte 10 of the line is 0xff",
}


def lines(path, *some):
    path.write_bytes(b"\n".join(some) + b"\n")
    return path


@pytest.mark.parametrize(
    ("bad", "engine"),
    [(b"{broken", Local(2)), *((bad, Here()) for bad in BAD)],
    ids=["processes", *BAD.values()],
)
def test_the_first_malformed_line_stops_it_named(tmp_path, bad, engine):
    good = b'{"text": "good"}'
    path = lines(tmp_path / "a.jsonl", good, b"", good, good, bad, good)
    with pytest.raises(PrepareError) as caught:
        prepare([path], tmp_path / "out", BYTES, engine=engine, part_bytes=20)
    assert f"{path}: line 5 (byte {path.read_bytes().index(bad)}): {BAD[bad]}" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part_bytes", [10, 10_000])
def test_within_the_limit_malformed_records_are_listed_and_left_out(tmp_path, part_bytes):
    good = b'{"text": "good"}'
    lines(tmp_path / "a.jsonl", *BAD, good, b"", b"{")
    jsonl(tmp_path / "b.jsonl.gz", ["b0"])
    parquet(tmp_path / "c.parquet", ["c0", None, "c2"], 2)
    (tmp_path / "d.txt").write_bytes(b"\xff")
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt")]
    count = len(BAD) + 3
    made = prepare(paths, tmp_path / "out", BYTES, engine=Here(), part_bytes=part_bytes, max_errors=count)
    assert documents(tmp_path / "out") == [b"good", b"b0", b"c0", b"c2"]
    assert made.manifest["num_malformed"] == count
    told = [json.loads(line) for line in (tmp_path / "out/errors.jsonl").read_text().splitlines()]
    places = [(Path(each["file"]).name, each.get("line"), each.get("row")) for each in told]
    a = [("a.jsonl", line, None) for line in [*range(1, len(BAD) + 1), len(BAD) + 3]]
    assert places == [*a, ("c.parquet", None, 1), ("d.txt", None, None)]
    assert all(reason in each["error"] for reason, each in zip(BAD.values(), told))
    with pytest.raises(
        PrepareError, match=rf"{count} malformed documents \(limit: --max-errors {count - 1}\)"
    ):
        prepare(paths, tmp_path / "less", BYTES, engine=Here(), part_bytes=part_bytes, max_errors=count - 1)
    prepare(
        paths, tmp_path / "less", BYTES, engine=Here(), part_bytes=part_bytes, max_errors=count, resume=True
    )
    assert tree(tmp_path / "less") == tree(tmp_path / "out")


def test_other_encodings(tmp_path):
    (tmp_path / "a.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("größe".encode())
    (tmp_path / "c.jsonl").write_bytes(b"".join('{"text": "größe"}\n'.encode(e) for e in ("utf8", "latin-1")))
    (tmp_path / "d.txt").write_bytes("größe".encode("utf-16"))
    paths, out = [tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl")], tmp_path / "out"

    def run(**options):
        return prepare(paths, out, BYTES, engine=Here(), overwrite=True, **options)

    with pytest.raises(
        PrepareError, match=r"a\.txt: not valid UTF-8: byte 2 is 0xf6; .* --encoding utf-8,lat"
    ):
        run()
    made = run(max_errors=2).manifest
    assert (made["num_malformed"], made["num_malformed_inputs"]) == (2, 2)
    assert documents(out) == ["größe".encode()] * 2
    run(text_encoding="utf-8,latin-1")
    assert documents(out) == ["größe".encode()] * 4
    with pytest.raises(
        PrepareError, match=r"a.txt: not valid UTF-8: byte 2 .*, not valid ascii: byte 2 is 0xf6"
    ):
        run(text_encoding="utf-8,ascii")
    with pytest.raises(PrepareError, match="--encoding utf-16: JSON cannot be split in utf-16"):
        run(text_encoding="utf-16")
    for wrong in ("nonsense", "", "utf-8,", "rot13"):
        with pytest.raises(PrepareError, match=f"--encoding {wrong}: .*encoding"):
            run(text_encoding=wrong)
    paths[:] = [tmp_path / "d.txt"]
    run(text_encoding="utf-16")
    assert documents(out) == ["größe".encode()]
    paths[:] = [parquet(tmp_path / "e.parquet", ["a"])]
    with pytest.raises(PrepareError, match="--encoding latin-1: has no effect on tables"):
        run(text_encoding="latin-1")


def test_an_encoding_is_part_of_what_was_asked(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a")

    def run(encoding, **options):
        given = {"text_encoding": encoding, "engine": Here()} | options
        return prepare([tmp_path / "a.txt"] * 1, tmp_path / "out", BYTES, **given)

    with pytest.raises(KeyboardInterrupt):
        run("latin-1", engine=Here(stop_after=0), max_errors=1)
    run("utf-8", resume=True)
    with pytest.raises(PrepareError, match="was made by another job"):
        run("latin-1", resume=True)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_cut_or_damaged_compressed_file_is_refused(tmp_path, name):
    path = jsonl(tmp_path / name, texts(300))
    whole = path.read_bytes()
    for raw in (whole[:-3], whole[: len(whole) // 2], b"", b"no such codec"):
        path.write_bytes(raw)
        with pytest.raises(ChecksumError, match=f"{name}: "):
            prepare([path], tmp_path / "out", BYTES, engine=Here(), max_errors=9, overwrite=True)


def test_an_output_that_exists_is_replaced_only_if_asked(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", ["a"]), jsonl(tmp_path / "b.jsonl", ["b"])
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is nothing
    prepare([a], out, BYTES, engine=Here())
    with pytest.raises(PrepareError, match="exists already; choose another --out"):
        prepare([b], out, BYTES, engine=Here())
    with pytest.raises(PrepareError, match="was made by another job"):
        prepare([b], out, BYTES, engine=Here(), resume=True)
    assert documents(out) == [b"a"]
    prepare([a], out, BYTES, engine=Here(stop_after=0), resume=True)  # done is done
    prepare([b], out, BYTES, engine=Here(), overwrite=True)
    assert documents(out) == [b"b"]
    assert left_behind(out) == []


def test_an_unfinished_run_goes_on_only_as_what_it_was(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(30))
    out = tmp_path / "out"

    def run(encoding=BYTES, **options):
        return prepare([path], out, encoding, **({"engine": Here(), "part_bytes": 300} | options))

    with pytest.raises(KeyboardInterrupt):
        run(engine=Here(stop_after=1))
    with pytest.raises(PrepareError, match="an earlier run did not finish; continue it with --resume"):
        run()
    with pytest.raises(PrepareError, match=r"of another job: encoder was .*'eod': False.* and is .*True"):
        run(Text(tokenizer="bytes", eod=True), resume=True)
    with pytest.raises(PrepareError, match="of another job: dedup was False and is True"):
        run(dedup=True, resume=True)
    old = path.stat()
    jsonl(path, texts(31))
    with pytest.raises(PrepareError, match=r"of another job: inputs was .*a\.jsonl"):
        run(resume=True)
    jsonl(path, texts(30))
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    run(resume=True, part_bytes=9)  # how it is cut was said at first


def test_a_column_of_text_files_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(PrepareError, match="--column foo: has no effect on files of text"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", Text(tokenizer="bytes", column="foo"), engine=Here())


@pytest.mark.parametrize("name", ["in.tar", "in.tar.gz"])
def test_a_tar_of_texts_is_no_text(tmp_path, name):
    (tmp_path / "a.txt").write_text("a")
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith(".gz") else "w") as out:
        out.add(tmp_path / "a.txt", "a.txt")
    with pytest.raises(PrepareError, match=rf"{name}: a tar, which would be one text"):
        prepare([tmp_path / name], tmp_path / "out", BYTES, engine=Here())


def test_an_input_that_changes_meanwhile_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(30))

    class Changes(Here):
        def encode(self, folder, parts):
            yield from super().encode(folder, parts)
            os.utime(path, ns=(0, 0))

    with pytest.raises(ChangedError, match=r"a\.jsonl: was changed after it was read"):
        prepare([path], tmp_path / "out", BYTES, engine=Changes())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("begin", [0, 3])
def test_no_part_is_of_an_input_that_had_changed(tmp_path, begin):
    """It is restored then, as the message says, and its time with it."""
    path, kept = jsonl(tmp_path / "a.jsonl", [f"old {i}" for i in range(30)]), tmp_path / "kept"
    shutil.copy2(path, kept)
    prepare([path], tmp_path / "whole", BYTES, engine=Here(), part_bytes=99)

    class Changes(Here):
        def encode(self, folder, parts):
            for part in parts:
                if part == begin:
                    jsonl(path, [f"new {i}" for i in range(30)])
                yield from super().encode(folder, [part])

    with pytest.raises(ChangedError, match=r"a\.jsonl: was changed after it was read"):
        prepare([path], tmp_path / "out", BYTES, engine=Changes(), part_bytes=99)
    shutil.copy2(kept, path)
    prepare([path], tmp_path / "out", BYTES, engine=Here(), part_bytes=99, resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_object_that_was_replaced_by_one_as_long_is_another_input(tmp_path, monkeypatch):
    needs("nginx")
    (tmp_path / "www").mkdir()
    path = jsonl(tmp_path / "www/a.jsonl", texts(30))
    with Nginx(tmp_path / "www") as server:
        for node, resume, error in (1, False, KeyboardInterrupt), (2, True, PrepareError):
            monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / f"node{node}"))
            os.utime(path, (node, node))
            how = {"engine": Here(stop_after=None if resume else 2), "part_bytes": 99, "resume": resume}
            with pytest.raises(error, match="of another job: inputs was" * resume):
                prepare([f"{server.url}/a.jsonl"], tmp_path / "out", BYTES, **how)


def test_two_runs_of_one_output_do_not_meet(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a"])

    class Meets(Here):
        def encode(self, folder, parts):
            with pytest.raises(PrepareError, match="another run is preparing this"):
                prepare([path], tmp_path / "out", BYTES, engine=Here(), resume=True)
            yield from super().encode(folder, parts)

    prepare([path], tmp_path / "out", BYTES, engine=Meets())
    assert documents(tmp_path / "out") == [b"a"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere/*.jsonl"], "nothing|missing"),
        (["a.jsonl", "a.jsonl"], "given twice"),
        (["."], "given twice"),
        (["a.jsonl", "--glob", "*.py"], ""),
        ([""], "an input is an empty path; is a variable of the shell not set"),
        (
            ["sub/lines.json"],
            "sub/lines.json: JSON lines, a list of records, or one document as it stands.*--format",
        ),
        (
            ["sub", "--glob", "*.py", "--glob", "*.json"],
            "sub/lines.json: JSON lines, a list of records, or one document",
        ),
        (
            ["sub/rows.csv"],
            "sub/rows.csv: rows of a table, to be made JSON lines, or one document .* text",
        ),
        (["sub", "--glob", "*.csv"], "sub/rows.csv: rows of a table, to be made"),
        (["sub/rows.TSV.gz"], "sub/rows.TSV.gz: rows of a table, to be made"),
        (["sub/rows.csv", "--format", "text"], ""),
        (["sub", "--glob", "*"], ""),
        (["sub/lines.json", "--format", "jsonl"], ""),
        (["a.jsonl", "--tokenizer", "org/model"], "org/model: missing; give its path on this node"),
        (["sub"], "nothing to prepare there; .*--glob"),
        (["a.jsonl", "--validation", "1"], "--validation 1.0: a share"),
        (["a.jsonl", "--eod-token", "<end>"], "has no token '<end>'"),
        (["a.jsonl", "--workers", "0"], "'0': write a whole number from 1"),
        (["a.jsonl", "--chat-date", "today"], "'today': write a date such as 2025-06-01"),
        (["a.jsonl", "--chat-date", "2025-06-01"], "needs --chat"),
        (["a.jsonl", "--ray-address", "auto"], "--ray-address has no effect without --engine ray"),
        (["a.jsonl", "--sbatch=-p cpu"], "--sbatch has no effect without --engine slurm"),
        (["a.jsonl", "--out", "https://h/x"], "https://h/x: cannot write to a web server; give s3://"),
        (["a.jsonl", "--out", "gcs://b/x"], "gcs://b/x: scheme 'gcs' is unknown; use s3, gs, az"),
        (["a.jsonl", "--out", "s3://b/x", "--engine", "slurm"], "name a folder that all of them see: --work"),
        (["a.jsonl", "--work", "w"], "--work w: only for an output in storage; .* made next to out"),
        (["a.jsonl", "--dtype", "uint8", "--eod"], "257 tokens, of which uint8 holds 256"),
        (["a.jsonl", "--chat"], "bytes: has no chat template; give a transformers directory"),
        (
            ["a.jsonl", "--column", "absent"],
            "1 malformed document .limit: --max-errors 0.; .*\\n.*no 'absent', found",
        ),
        (
            ["a.jsonl", "--column", "text.body"],
            "nested keys are not searched: lift the key first, as jq -c '{text: .text.body}'",
        ),
    ],
)
def test_what_cannot_be_asked_is_said_at_once(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.py").write_text("x")
    (tmp_path / "sub/lines.json").write_text('{"text": "a"}\n')
    (tmp_path / "sub/rows.csv").write_text("text\na\n")
    (tmp_path / "sub/rows.TSV.gz").write_bytes(gzip.compress(b"text\na\n"))
    more = ["a.jsonl"] if options == ["."] else []
    status = main(["prepare", "--out", "out", "--workers", "1", "--tokenizer", "bytes", *options, *more])
    assert status == (2 if said else 0)
    err = capsys.readouterr().err
    assert not said or re.search(said, err), err
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        ["a.jsonl", "sub"] + ([] if said else ["out"])
    )


@pytest.mark.parametrize("stopped", [PrepareError("of the engine"), KeyboardInterrupt()])
def test_a_run_that_encoded_nothing_leaves_nothing(tmp_path, stopped):
    path = jsonl(tmp_path / "a.jsonl", ["a"])

    class Stops(Here):
        def encode(self, folder, parts):
            (folder / "parts/00000000.1f.tmp").touch()  # of a worker that was killed
            raise stopped
            yield

    with pytest.raises(type(stopped)) as caught:
        prepare([path], tmp_path / "out", BYTES, engine=Stops())
    assert caught.value.__notes__ == [
        f"{tmp_path}/out.preparing: no part was finished, so nothing is kept; run it again"
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]
    prepare([path], tmp_path / "out", BYTES, engine=Here())


def test_what_is_trained_stays_though_nothing_was_encoded(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(KeyboardInterrupt) as caught:
        prepare([path], tmp_path / "out", Text(train_bpe=300), engine=Here(stop_after=0))
    assert "continue with --resume" in caught.value.__notes__[0]
    assert (tmp_path / "out.preparing/tokenizer.json").exists()


@contextmanager
def full_disk(num_bytes):
    """A limit on the size of files stands for the disk; worker processes have it, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("real_workers")
@some(2)
@pytest.mark.parametrize("engine", [Here(), Local(2)], ids=["here", "processes"])
@pytest.mark.parametrize(("part_bytes", "where"), [(None, "parts/0"), (8000, "out/tokens.bin")])
def test_a_full_disk_stops_it_cleanly_and_it_goes_on_with_space(tmp_path, part_bytes, where, engine):
    some = texts(1000)
    path = jsonl(tmp_path / "a.jsonl", some)
    with full_disk(60_000), pytest.raises(StoreError, match=f"{where}.*: File too large") as caught:
        prepare([path], tmp_path / "out", BYTES, engine=engine, part_bytes=part_bytes)
    if part_bytes is None:  # the only part: nothing was encoded
        assert left_behind(tmp_path / "out") == []
    else:
        assert "finished parts are kept; continue with --resume" in caught.value.__notes__[0]
        assert not list((tmp_path / "out.preparing").rglob("*.tmp"))
    assert not (tmp_path / "out").exists()
    prepare([path], tmp_path / "out", BYTES, engine=engine, resume=True)
    assert documents(tmp_path / "out") == [text.encode() for text in some]
    assert left_behind(tmp_path / "out") == []


@pytest.mark.parametrize(("room", "where"), [("64k", "parts/"), ("400k", "out/")])
def test_a_disk_without_space_stops_the_command_and_space_lets_it_go_on(tmp_path, capsys, room, where):
    path, disk = jsonl(tmp_path / "a.jsonl", texts(1500)), tmp_path / "disk"
    words = ["prepare", str(path), "--tokenizer", "bytes", "--eod", "--workers", "2", "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    with small_disk(disk, room):
        assert main([*words, str(disk / "out")]) == 2
        err = capsys.readouterr().err
        assert re.match(rf"meshfeed: {disk}/out\.preparing/{where}.*: No space left on device", err), err
        kept = where != "parts/"  # the only part
        assert ("continue with --resume" if kept else "run it again") in err and "Traceback" not in err
        assert left_behind(disk / "out") == ["out.preparing"] * kept and not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert main([*words, str(disk / "out"), "--resume"]) == 0
        assert tree(disk / "out") == tree(tmp_path / "whole")
        assert left_behind(disk / "out") == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed, perhaps out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("raise SystemExit(3)", "ended with status 3"),
    ],
)
def test_a_worker_that_dies_is_named_with_its_part(tmp_path, monkeypatch, how, said):
    path = jsonl(tmp_path / "a.jsonl", texts(200))
    entry = tmp_path / "entry.py"
    entry.write_text(f"import os, signal; {how}")
    with monkeypatch.context() as patched:
        patched.setattr("meshfeed.prepare.without_torch.__file__", str(entry))
        with pytest.raises(PrepareError, match=f"part 0: the worker that encoded it {said}.*--resume"):
            prepare([path], tmp_path / "out", BYTES, engine=Local(1))
    prepare([path], tmp_path / "out", BYTES, engine=Local(1), resume=True)
    assert documents(tmp_path / "out") == [text.encode() for text in texts(200)]


@pytest.mark.usefixtures("real_workers")
def test_workers_end_with_the_run(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(200))
    with (
        pytest.raises(StoreError, match="no job"),
        closing(Local(2).encode(tmp_path / "no job", [0, 1])) as parts,
    ):
        next(parts)
    engine = Local(2)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with pytest.raises(KeyboardInterrupt):

        def interrupt(progress):
            if progress.done_parts == 1:
                raise KeyboardInterrupt

        prepare([path], tmp_path / "out", BYTES, engine=engine, part_bytes=500, on_progress=interrupt)
    assert set(children.read_text().split()) <= before


def test_a_job_which_may_hold_passwords_is_its_users_alone(tmp_path):
    path = lines(tmp_path / "a.jsonl", *(b'{"text": "one"}' for _ in range(9)), b"{broken")
    with pytest.raises(PrepareError, match="1 malformed"):
        prepare([path], tmp_path / "out", BYTES, part_bytes=1, engine=Here())
    (job,) = tmp_path.glob("*/job.json")
    assert job.stat().st_mode & 0o777 == 0o600


def test_a_folder_of_train_and_test_is_refused_unless_a_pattern_is_given(tmp_path):
    for name in ("train/0.jsonl", "test/0.jsonl", "train.txt", "notes-test-1.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(tmp_path / "in" / name, ["a"])
    with pytest.raises(OptionError, match=r"in: train\S+ and test/0\.jsonl: give the folder of one split"):
        prepare([tmp_path / "in"], tmp_path / "out", BYTES, engine=Here())
    shutil.rmtree(tmp_path / "in/test")
    prepare([tmp_path / "in"], tmp_path / "out", BYTES, engine=Here())
    jsonl(tmp_path / "in/test.jsonl", ["a"])
    prepare([tmp_path / "in"], tmp_path / "both", BYTES, engine=Here(), pattern="*.jsonl")
    assert len(documents(tmp_path / "both")) == 2
    for pair in (("Train.jsonl", "Test.jsonl"), ("ptb.train.txt", "ptb.valid.txt")):
        folder = tmp_path / pair[0]
        folder.mkdir()
        for name in pair:
            jsonl(folder / name, ["a"])
        with pytest.raises(OptionError, match=f"{pair[0]} and {pair[1]}: give the folder of one split"):
            prepare([folder], tmp_path / "no", BYTES, engine=Here())
