"""Outputs in object storage: the bytes that a disk would have, whatever happens on the way."""

import json
import os
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
from objects import WRITES, azure_container, killed, leftovers, nothing_wrong, s3_bucket
from test_prepare_tables import save
from texts import Here, jsonl, texts, tree

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.errors import (
    AccessError,
    ChangedError,
    MissingError,
    PrepareError,
    StoreError,
    UnavailableError,
)
from meshfeed.prepare import Text, prepare
from meshfeed.prepare.job.storage_output import step_of
from meshfeed.prepare.job.writer import Writer
from meshfeed.remote.errors import options_of_environment
from meshfeed.remote.retries import Patience
from services.faults import NOTHING, Fault
from soak import some

BYTES = Text(tokenizer="bytes")


@pytest.fixture(scope="module")
def s3():
    with s3_bucket() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def azure():
    with azure_container() as bucket:
        yield bucket


@pytest.fixture(params=["s3", "azure"])
def bucket(request, monkeypatch):
    found = request.getfixturevalue(request.param)
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    return found


@contextmanager
def replaced(**values):
    """Attributes of the writer, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(f"meshfeed.prepare.job.writer.{name}", value)
        yield


def same(bucket, prefix, path):
    """Whether the bytes there are those of a folder."""
    return bucket.objects(prefix) == tree(path)


@some(1)
def test_the_command_writes_what_a_disk_would_get(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    path = jsonl(tmp_path / "a.jsonl", texts(300))
    with path.open("a") as stream:
        stream.write("{broken\n")
    url = f"{bucket.root}/by/command"
    words = ["prepare", str(path), "--train-bpe", "300", "--eod", "--validation", "0.3", "--max-errors", "1"]
    words += ["--workers", "2", "--out"]
    assert main([*words, str(tmp_path / "here")]) == 0
    capsys.readouterr()
    assert main([*words, url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == url
    here = tree(tmp_path / "here")
    assert {"train/dataset.json", "validation/tokens.sums", "errors.jsonl", "tokenizer.json"} <= here.keys()
    assert bucket.objects("by/command") == here
    for name in ("train", "validation"):
        near, far = mf.open(tmp_path / "here" / name), mf.open(f"{url}/{name}")
        assert far.fingerprint == near.fingerprint
        with near, far:
            span = np.array([0]), np.array([near.num_tokens])
            assert np.array_equal(far.read_stream(*span), near.read_stream(*span))
    assert leftovers(tmp_path / "cache" / f"u{os.getuid()}" / "preparing") == []
    assert main([*words, url]) == 2
    assert (
        f"{url}: exists already; choose another --out, or replace it with --overwrite"
        in capsys.readouterr().err
    )
    assert main([*words, url, "--resume"]) == 0, "done is done"
    jsonl(path, texts(50))
    assert main([*words, url, "--resume"]) == 2
    assert "exists already, and was made by another job" in capsys.readouterr().err
    words.remove("--validation"), words.remove("0.3")
    assert main([*words, str(tmp_path / "here"), "--overwrite"]) == 0
    assert main([*words, url, "--overwrite"]) == 0
    assert same(bucket, "by/command", tmp_path / "here"), "none of the old is left"


def whole_or_gone(there, *trees):
    """Whether every store that can be opened there is, with all its files, one of those of the trees."""
    for folder in ("", "train/", "validation/"):
        if f"{folder}dataset.json" not in there:
            continue
        mine = {name: data for name, data in there.items() if "/" not in name.removeprefix(folder)}
        mine = {name: data for name, data in mine.items() if name.startswith(folder) and step_of(name) < 4}
        if not any(all(tree_.get(name) == data for name, data in mine.items()) for tree_ in trees):
            return False
        if f"{folder}tokens.bin" not in mine or f"{folder}tokens.idx" not in mine:
            return False
    return True


@some(1)
@pytest.mark.parametrize(("bucket", "writes"), [("s3", 4), ("azure", 1)], indirect=["bucket"])
def test_killed_at_many_writes_it_goes_on_to_the_same_bytes(bucket, writes, tmp_path):
    """Each run gets so many writes further, and is killed with the next one on its way."""
    path, old = jsonl(tmp_path / "a.jsonl", texts(60)), jsonl(tmp_path / "old.jsonl", texts(40, 1))
    options = {"part_bytes": 900, "work": tmp_path / "work", "validation": 0.3}
    prepare([path], tmp_path / "whole", BYTES, engine=Here(), validation=0.3)
    prepare([old], tmp_path / "before", BYTES, engine=Here())
    whole, before = tree(tmp_path / "whole"), tree(tmp_path / "before")
    url = f"{bucket.root}/killed/often"
    assert not killed(bucket, 99, [old], url, BYTES, work=tmp_path / "work")
    assert bucket.objects("killed/often") == before
    kills = 0
    while killed(bucket, writes, [path], url, BYTES, resume=True, overwrite=True, **options):
        kills += 1
        there = bucket.objects("killed/often")
        assert whole_or_gone(there, before, whole), sorted(there)
    assert kills >= len(whole) // writes
    assert bucket.objects("killed/often") == whole
    assert leftovers(tmp_path / "work") == []


def test_an_interrupted_upload_sends_only_the_rest(bucket, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(60))
    options = {"engine": Here(), "work": tmp_path / "work"}
    url, done = f"{bucket.root}/interrupted", []

    def interrupt(progress):
        done.append((progress.doing, progress.num_bytes))
        if progress.doing == "uploading" and progress.num_bytes > 0:
            raise KeyboardInterrupt

    with replaced(_TELL_S=0.001), pytest.raises(KeyboardInterrupt) as caught:
        prepare([path], url, BYTES, on_progress=interrupt, **options)
    assert "continue with --resume" in caught.value.__notes__[0]
    with pytest.raises(
        PrepareError, match=r"a run on .* is preparing this, or was killed, in .*; resume there"
    ):
        prepare([path], url, BYTES, engine=Here(), work=tmp_path / "other", resume=True)
    assert leftovers(tmp_path / "other") == []
    done.clear()
    prepare([path], url, BYTES, on_progress=lambda each: done.append(each), resume=True, **options)
    uploads = [each for each in done if each.doing == "uploading"]
    prepare([path], tmp_path / "here", BYTES, engine=Here())
    sizes = {name: len(data) for name, data in tree(tmp_path / "here").items()}
    assert uploads[-1].num_bytes == sum(sizes.values())
    assert uploads[-1].done_parts == uploads[-1].num_parts
    assert same(bucket, "interrupted", tmp_path / "here")


def test_two_runs_never_mix(bucket, tmp_path):
    """Whoever claims last wins; the other sees, before any store can be opened, that it has lost."""
    mine, other = jsonl(tmp_path / "a.jsonl", texts(60)), jsonl(tmp_path / "b.jsonl", texts(60, 2))
    url, met = f"{bucket.root}/contended", []

    def meets(progress):
        if progress.doing == "uploading" and not met:
            met.append(True)
            prepare([other], url, BYTES, engine=Here(), work=tmp_path / "theirs", overwrite=True)

    with pytest.raises(ChangedError, match=r"another run replaced this meanwhile; .*--resume --overwrite"):
        prepare([mine], url, BYTES, engine=Here(), work=tmp_path / "ours", on_progress=meets)
    again = {"engine": Here(), "work": tmp_path / "ours", "resume": True}
    with pytest.raises(PrepareError, match="exists already, and was made by another job"):
        prepare([mine], url, BYTES, **again)
    prepare([mine], url, BYTES, overwrite=True, **again)
    prepare([mine], tmp_path / "here", BYTES, engine=Here())
    assert same(bucket, "contended", tmp_path / "here")


def test_what_prepare_has_not_written_stays(bucket, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(5))
    writer = Writer(bucket.root, bucket.options)
    for i, name in enumerate(("model.pt", "deep/tokens.bin", "manifest.json")):
        writer.put(f"foreign{i}/{name}", b"{}")
        with pytest.raises(PrepareError, match=f"foreign{i}: was not made by `meshfeed prepare`"):
            prepare([path], f"{bucket.root}/foreign{i}", BYTES, work=tmp_path / "work", overwrite=True)
        assert bucket.objects(f"foreign{i}") == {name: b"{}"}


def test_where_nobody_may_write_is_said_before_the_work(bucket, tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", texts(5))

    class Idle(Here):
        def encode(self, folder, parts):
            raise AssertionError("this work would be lost")

    def run(url):
        prepare([path], url, BYTES, engine=Idle(), work=tmp_path / "work")

    with pytest.raises(MissingError, match=r"nowhere.*: no such bucket or container; create it, or check"):
        run(bucket.root.replace("made", "nowhere") + "/x")
    forbidden = (403, b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>")
    bucket.faults.plan = lambda number, method, path: Fault(answer=forbidden) if method == "PUT" else NOTHING
    with pytest.raises(AccessError, match=r"refused/manifest\.json: no permission; check the credentials"):
        run(f"{bucket.root}/refused")
    bucket.faults.plan = nothing_wrong
    assert bucket.objects("refused") == {}


def test_pieces_that_fail_in_passing_are_sent_again(bucket, tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 12 << 20).astype(np.uint8).tobytes()
    (tmp_path / "large").write_bytes(data)
    seen = set()

    def once(number, method, path):
        if method not in WRITES or (method, path) in seen:
            return NOTHING
        seen.add((method, path))
        return Fault(answer=(503, b""))

    # by the same way as `prepare` goes: what the environment says
    writer = Writer(bucket.root, options_of_environment(bucket.root, os.environ), Patience(attempts=3))
    bucket.faults.plan = once
    told = []
    with replaced(PIECE_BYTES=5 << 20, _TELL_S=0.001):
        stat = writer.upload("pieces", tmp_path / "large", told.append)
        assert stat.size_bytes == len(data) == max(told)
        assert told == sorted(told)
        assert len(seen) >= 4, "each piece was refused once"
        bucket.faults.plan = lambda number, method, path: Fault(answer=(503, b""))
        with pytest.raises(UnavailableError, match=r"gone: not uploaded: .*503.*; check the network"):
            writer.upload("gone", tmp_path / "large", told.append)
        bucket.faults.plan = nothing_wrong
        with pytest.raises(MissingError, match="nothing: missing"):
            writer.upload("gone", tmp_path / "nothing", told.append)
        assert bucket.objects("pieces") == {}, "an object, no folder"
    assert bytes(writer.read("pieces", 0, len(data), stat.tag)) == data
    writer.delete("pieces")
    writer.delete("pieces")
    with pytest.raises(MissingError):
        writer.stat("pieces")


def test_a_forked_process_is_refused_and_does_not_hang(azure):
    Writer(azure.root, azure.options)
    child = os.fork()
    if not child:
        try:
            Writer(azure.root, azure.options)
        except StoreError as error:
            os._exit(0 if "start it with spawn" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_opens_a_store_goes_last_and_the_manifest_at_the_end():
    names = ["tokens.sums", "tokens.bin", "tokens.idx", "dataset.json", "errors.jsonl", "manifest.json"]
    assert sorted(names, key=step_of) == names
    inside = [f"train/{name}" for name in names[:4]]
    assert [step_of(name) for name in inside] == [step_of(name) for name in names[:4]]
    assert step_of("loss_mask.bin") == step_of("origins.npy") == step_of("tokens.bin")
    foreign = {
        step_of(name) for name in ("train", "train/manifest.json", "a/tokens.bin", "x.bin", "tokens.bin2")
    }
    assert foreign == {step_of("anything")} and step_of("anything") > step_of("manifest.json")


def test_a_saved_dataset_in_a_bucket_is_its_own_files(s3, tmp_path, monkeypatch):
    """Those that its state.json names, by one listing; not what a map has left beside them."""
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    for name, value in s3.environ.items():
        monkeypatch.setenv(name, value)
    folder = save(tmp_path / "saved", [pa.table({"text": ["a", "bc"]}), pa.table({"text": ["def"]})])
    client = Writer(s3.root, s3.options)
    for path in folder.iterdir():
        client.put(f"datasets/{path.name}", path.read_bytes())
    client.put("datasets/cache-0123.arrow", b"of a map")
    prepare(["s3://made/datasets"], tmp_path / "out", BYTES, engine=Here())
    with mf.open(tmp_path / "out") as store:
        assert store.lengths(np.arange(store.num_documents)).tolist() == [1, 2, 3]
