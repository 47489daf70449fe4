"""What `prepare` may replace, what it must not, and inputs that would get lost in silence."""

import json
import os
import shutil
import socket

import pytest
from texts import Here, documents, jsonl, left_behind, texts, tree
from tokenizers import Tokenizer
from tokenizers.models import BPE

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.errors import AccessError, MissingError, OptionError, PrepareError, StoreError
from meshfeed.files import Folder
from meshfeed.prepare import Chats, Text, prepare
from meshfeed.prepare.inputs.files import MULTIMODAL_KINDS, find_inputs
from services.needs import needs_root

BYTES = Text(tokenizer="bytes")


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"name": "a web page"}'])
def test_what_prepare_has_not_made_is_never_replaced(tmp_path, manifest):
    path = jsonl(tmp_path / "a.jsonl", ["a"])
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("years of work")
    if manifest is not None:
        (out / "manifest.json").write_text(manifest)
    before = tree(tmp_path)
    for options in ({}, {"overwrite": True}, {"resume": True}, {"resume": True, "overwrite": True}):
        with pytest.raises(PrepareError, match=r"not made by `meshfeed prepare`|exists already"):
            prepare([path], out, BYTES, engine=Here(), **options)
    with pytest.raises(PrepareError, match=r"a\.jsonl: is an input"):
        prepare([path], path, BYTES, engine=Here(), overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["job.json", "lock", "old", "out.txt", "parts", "tokenizer.json", "notes"])
def test_a_users_folder_of_the_jobs_name_is_left_alone(tmp_path, name):
    path = jsonl(tmp_path / "a.jsonl", ["a"])
    mine = tmp_path / "out.preparing" / name
    mine.mkdir(parents=True)
    (mine / "chapter.txt").write_text("years of work")
    before = tree(tmp_path)
    for options in ({}, {"overwrite": True}, {"resume": True}, {"resume": True, "overwrite": True}):
        with pytest.raises(PrepareError, match=rf"out\.preparing: .* holds {name}, which it did not write"):
            prepare([path], tmp_path / "out", BYTES, engine=Here(), **options)
        assert tree(tmp_path) == before
    shutil.rmtree(mine)
    prepare([path], tmp_path / "out", BYTES, engine=Here())
    assert left_behind(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["notes.txt", "train/chapter.txt", "mine.values"])
def test_a_users_file_in_an_output_is_not_removed_with_it(tmp_path, name):
    path, out = jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out"
    prepare([path], out, BYTES, engine=Here())
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("years of work")
    before = tree(out)
    with pytest.raises(PrepareError, match=f"out: holds {name}, which prepare did not write"):
        prepare([path], out, BYTES, engine=Here(), overwrite=True)
    assert tree(out) == before
    (out / name).unlink()
    prepare([path], out, BYTES, engine=Here(), overwrite=True)


def test_what_is_read_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", texts(20))
    words = ["--workers", "1", "--overwrite"]
    assert main(["prepare", "a.jsonl", "--train-bpe", "300", "--out", "out", *words]) == 0
    trained = ["--tokenizer", "out/tokenizer.json"]
    before = tree(tmp_path)
    assert main(["prepare", "a.jsonl", *trained, "--out", "out", *words]) == 2
    assert tree(tmp_path) == before
    (tmp_path / "elsewhere").symlink_to(jsonl(tmp_path / "out/more.jsonl", ["more"]))
    with pytest.raises(PrepareError, match=r"elsewhere: is an input in .*out"):
        prepare(["elsewhere"], "out", BYTES, kind="jsonl", engine=Here(), overwrite=True)
    assert main(["prepare", "a.jsonl", *trained, "--out", "other", *words]) == 0


def test_what_appears_during_the_run_is_not_replaced(tmp_path):
    path, out = jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out"

    class Meets(Here):
        def encode(self, folder, parts):
            yield from super().encode(folder, parts)
            out.mkdir()
            (out / "other").write_text("another job's")

    with pytest.raises(PrepareError, match="out: exists already") as caught:
        prepare([path], out, BYTES, engine=Meets())
    assert "finished parts are kept" in caught.value.__notes__[0]
    assert tree(out) == {"other": b"another job's"}
    (out / "other").unlink()
    prepare([path], out, BYTES, engine=Here(stop_after=0), resume=True)
    assert documents(out) == [b"a"] and left_behind(out) == []


@pytest.mark.parametrize("leads", ["nowhere", "disk"])
def test_a_link_as_the_output_is_refused_before_any_work(tmp_path, leads):
    path = jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / leads)
    with pytest.raises(PrepareError, match="out: is a symbolic link; give the path"):
        prepare([path], tmp_path / "out", BYTES, engine=Here(stop_after=0))
    assert left_behind(tmp_path / "out") == []


def test_a_run_under_way_is_named_as_such(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a"])

    class Meets(Here):
        def encode(self, folder, parts):
            with pytest.raises(PrepareError, match="another run is preparing this"):
                prepare([path], tmp_path / "out", BYTES, engine=Here())
            yield from super().encode(folder, parts)

    prepare([path], tmp_path / "out", BYTES, engine=Meets())


def test_what_cannot_be_read_twice_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "bound.jsonl"))
        for path in (tmp_path / "pipe.jsonl", tmp_path / "bound.jsonl", "/dev/null", str(tmp_path / "p*")):
            with pytest.raises(PrepareError, match="not a file that several processes can read"):
                prepare([path], tmp_path / "out", BYTES, engine=Here())
    read, write = os.pipe()  # as a shell gives a command the output of another
    try:
        with pytest.raises(PrepareError, match=f"/fd/{read}: not a file that several processes can read"):
            prepare([f"/proc/self/fd/{read}"], tmp_path / "out", BYTES, kind="jsonl", engine=Here())
    finally:
        os.close(read)
        os.close(write)


def test_a_link_in_a_folder_that_leads_nowhere_is_no_document_less(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    jsonl(folder / "a.jsonl", ["a"])
    (folder / ".lock.jsonl").symlink_to("nobody@host")  # as editors leave them
    (folder / "b.jsonl").symlink_to(tmp_path / "gone")
    for given in (folder, folder / "*.jsonl"):
        with pytest.raises(MissingError, match=r"in/b\.jsonl: missing"):
            prepare([given], tmp_path / "out", BYTES, engine=Here())
    (tmp_path / "gone").write_bytes(b'{"text": "b"}\n')
    prepare([folder], tmp_path / "out", BYTES, engine=Here())
    assert documents(tmp_path / "out") == [b"a", b"b"]


@pytest.mark.parametrize("again", ["a.jsonl", "../in/a.jsonl", "z.jsonl"])
def test_a_file_under_two_names_is_given_twice(tmp_path, again):
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in/a.jsonl", ["a"])
    (tmp_path / "in/z.jsonl").symlink_to("a.jsonl")
    with pytest.raises(PrepareError, match=r"jsonl: given twice, by this name or a link"):
        prepare([tmp_path / "in/a.jsonl", f"{tmp_path}/in/{again}"], tmp_path / "out", BYTES, engine=Here())


def test_a_link_to_a_folder_is_not_passed_over(tmp_path):
    """What is behind it would be lost; a pattern, as for a source tree, says that it may be."""
    for name in ("in/a.jsonl", "elsewhere/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        jsonl(tmp_path / name, [name])
    (tmp_path / "in/more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="in: links to folders, as more/, are not followed; move them"):
        prepare([tmp_path / "in"], tmp_path / "out", BYTES, engine=Here())
    with pytest.raises(OptionError, match="in: links to folders, as more/, are not followed; move them"):
        find_inputs([str(tmp_path / "in")], kinds=MULTIMODAL_KINDS)
    prepare([tmp_path / "in"], tmp_path / "out", BYTES, engine=Here(), pattern="*")
    assert documents(tmp_path / "out") == [b"in/a.jsonl"]


def test_a_folder_that_lacks_a_shard_is_refused(tmp_path):
    jsonl(tmp_path / "train-00001-of-00002.jsonl", ["a"])
    with pytest.raises(OptionError, match=r"1 of the 2 shards train-\*-of-00002 are there; .* --glob 'train"):
        prepare([tmp_path], tmp_path / "out", BYTES, engine=Here())
    prepare([tmp_path], tmp_path / "out", BYTES, engine=Here(), pattern="train*")
    assert documents(tmp_path / "out") == [b"a"]


def test_links_to_one_file_elsewhere_are_as_many_documents(tmp_path):
    (tmp_path / "snapshot").mkdir()  # as the Hub's cache has equal files
    jsonl(tmp_path / "blob", ["a"])
    for name in ("a", "b"):
        (tmp_path / f"snapshot/{name}.jsonl").symlink_to("../blob")
    prepare([tmp_path / "snapshot"], tmp_path / "out", BYTES, engine=Here())
    assert documents(tmp_path / "out") == [b"a", b"a"]


def test_a_folder_below_that_cannot_be_listed_is_refused(tmp_path):
    closed = tmp_path / "in/closed"
    closed.mkdir(parents=True)
    jsonl(tmp_path / "in/a.jsonl", ["a"])
    needs_root()
    for each in (tmp_path, tmp_path / "in"):
        each.chmod(0o755)
    closed.chmod(0o700)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(tmp_path)
            os.setuid(65534)  # root may list anything
            Folder("in").names()
        except AccessError as error:
            status = 0 if "in/closed" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    for name, text in (("a.txt", "a\r\n"), ("b.jsonl", '{"text": "b"}\r\n'), ("c.jsonl", '\n{"text": "c"}')):
        (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    some = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl")]
    prepare(some, tmp_path / "out", BYTES, engine=Here())
    assert documents(tmp_path / "out") == [b"a\r\n", b"b", b"c"]


def test_an_output_of_two_stores_says_which_to_open(tmp_path):
    prepare([jsonl(tmp_path / "a.jsonl", texts(30))], tmp_path / "out", BYTES, validation=0.3, engine=Here())
    out = tmp_path / "out"
    with pytest.raises(
        MissingError, match=f"out: not a token store itself; .* one: {out}/train, {out}/validation$"
    ):
        mf.open(out)


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
@pytest.mark.parametrize("column", [None, "error"])
@pytest.mark.parametrize("name", ["out", "."])
def test_what_was_left_out_is_not_taken_for_documents(tmp_path, name, tokenizer, column):
    bad = jsonl(tmp_path / "a.txt", texts(30))
    bad.write_text(bad.read_text() + "{broken\n")
    out = tmp_path / "in/out"
    prepare([bad], out, BYTES, kind="jsonl", validation=0.3, max_errors=1, engine=Here())
    (tmp_path / "in/unfinished.preparing/out").mkdir(parents=True)
    (tmp_path / "in/unfinished.preparing/meshfeed-prepare.lock").touch()
    (tmp_path / "in/unfinished.preparing/out/errors.jsonl").write_text('{"error": "e"}\n')
    with pytest.raises(MissingError, match=rf"give the path of one: {out}/train|expected a Megatron"):
        mf.open(tmp_path / "in" / name, tokenizer=tokenizer, column=column)
    with pytest.raises(StoreError, match=f"errors.jsonl: lists what .* left out.*: {out}/train, {out}/valid"):
        mf.open(out / "errors.jsonl", tokenizer=tokenizer, column=column)
    with pytest.raises(MissingError, match="no file of a token store has such a name"):
        mf.open(out / "*.jsonl", tokenizer=tokenizer, column=column)
    with pytest.raises(PrepareError, match="nothing to prepare there"):
        prepare([tmp_path / "in"], tmp_path / "again", BYTES, engine=Here())


def test_a_file_of_documents_may_be_called_errors(tmp_path):
    jsonl(tmp_path / "errors.jsonl", ["a"])
    (tmp_path / "manifest.json").write_text('{"format": "a web page"}')
    for path in (tmp_path, tmp_path / "errors.jsonl"):
        with mf.open(path, tokenizer="bytes") as store:
            assert store.num_documents == 1


@pytest.mark.parametrize(
    ("template", "said"), [("{% for", "t.jinja, line 1: not a template"), (None, "has no chat template")]
)
def test_a_template_that_is_none_is_no_fault_of_the_conversations(tmp_path, template, said):
    """Else all of them would be let pass as malformed."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    Tokenizer(BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
    encoding = Chats(
        tokenizer=str(tmp_path / "tokenizer.json"),
        template=None if template is None else str(tmp_path / "t.jinja"),
    )
    with pytest.raises(StoreError, match=said):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", encoding, max_errors=9, engine=Here())
    assert sorted(path.name for path in tmp_path.glob("out*")) == []
