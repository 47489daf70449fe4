"""Pictures and sound under names that prepare does not read: refused by name, whatever holds them."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import mosaic
from meshfeed.cli.main import main
from meshfeed.errors import StoreError
from meshfeed.prepare.inputs.samples import PART_KEYS, SUFFIXES, Sample, SampleColumns, suffix_by_content
from meshfeed.prepare.inputs.webdataset import sample_of

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)).save(file, form)
    return file.getvalue()


PICTURE = {"bytes": picture(), "path": None}
TABLES: dict[str, dict[str, Any]] = {
    "jpg": {"text": ["a cat"], "jpg": pa.array([PICTURE], STRUCT)},
    "image_1": {"text": ["<image 1> and 2"], "image_1": pa.array([PICTURE], STRUCT)},
    "second_image": {
        "text": ["a cat"],
        "image": pa.array([PICTURE], STRUCT),
        "second_image": pa.array([PICTURE], STRUCT),
    },
    "picture": {"text": ["a cat"], "picture": pa.array([picture("JPEG")], pa.binary())},
    "pages": {"text": ["a cat"], "pages": pa.array([[PICTURE]], pa.list_(STRUCT))},
}
HARMLESS: dict[str, Any] = {
    "text": ["a cat"],
    "image": pa.array([PICTURE], STRUCT),
    "sha256": pa.array([bytes(range(32))], pa.binary()),
    "url": ["https://example.org/cat.jpg"],  # where img2dataset found the image
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made: Any = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<image>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def prepared(source: Path, tokenizer: str, *options: str) -> int:
    """The exit status of the command."""
    command = ["prepare", str(source), "--out", str(source.parent / "out"), "--multimodal", *options]
    return main([*command, "--tokenizer", tokenizer, "--image-token", "<image>", "--workers", "1"])


def told_of(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("lost", TABLES)
def test_a_column_of_pictures_is_read_or_refused(
    tmp_path: Path, tokenizer: str, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(TABLES[lost]), tmp_path / "in" / "a.parquet")
    assert prepared(tmp_path / "in", tokenizer) != 0
    assert f"'{lost}' holds a " in (told := capsys.readouterr().err) and f"--image-column {lost}" in told
    assert not (tmp_path / "out").exists()
    assert prepared(tmp_path / "in", tokenizer, "--image-column", lost) == 0
    assert f"{len(TABLES[lost]) - 1} part" in told_of(capsys)


@pytest.mark.parametrize(
    "feature", [{"_type": "Image"}, {"feature": {"_type": "Image"}, "_type": "List"}], ids=str
)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_what_datasets_declares_to_be_pictures_is_read(
    tmp_path: Path, tokenizer: str, feature: dict[str, Any], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    several = "feature" in feature
    column = pa.array([[PICTURE, PICTURE] if several else PICTURE], pa.list_(STRUCT) if several else STRUCT)
    features = {"scan": feature, "text": {"_type": "Value"}}
    beside = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"text": ["a cat"], "scan": column}).replace_schema_metadata(beside)
    if form == "parquet":
        pq.write_table(table, tmp_path / "in" / "a.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "in" / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    assert prepared(tmp_path / "in", tokenizer) == 0, told_of(capsys)
    assert f"{1 + several} part" in told_of(capsys)


@pytest.mark.parametrize("said", [b"[]", b"{", b'{"info": {"features": {"image": 0}}}', b'{"info": 1}'])
def test_what_others_write_beside_a_schema_declares_nothing(
    tmp_path: Path, tokenizer: str, said: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table(HARMLESS).replace_schema_metadata({b"huggingface": said})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    assert prepared(tmp_path / "in", tokenizer) == 0, told_of(capsys)
    assert "1 part" in told_of(capsys)


def test_no_part_at_all_is_an_error(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "a cat", "photo": "cat"}\n')
    assert prepared(tmp_path / "in", tokenizer) != 0
    assert "no document has a part: name their columns" in told_of(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["img", "image_path", "file_name"])
def test_a_name_of_a_picture_is_read_or_refused(
    tmp_path: Path, tokenizer: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.png").write_bytes(picture())
    (tmp_path / "in" / "metadata.jsonl").write_text(json.dumps({"text": "a cat", key: "x.png"}) + "\n")
    assert prepared(tmp_path / "in", tokenizer) != 0
    assert f"'{key}' holds a png that is not read" in capsys.readouterr().err
    assert prepared(tmp_path / "in", tokenizer, "--image-column", key) == 0, told_of(capsys)
    assert "1 part" in told_of(capsys)


def shuffled_record(rng: np.random.Generator) -> dict[str, Any]:
    """A row with parts under any keys, each named differently; interleaved, with marks, or a caption."""
    filled = [key for key in PART_KEYS if rng.random() < 0.3]
    record: dict[str, Any] = {}
    for key in filled:
        names = [f"{key}{k}" for k in range(rng.integers(1, 3))]
        record[key] = names if key.endswith("s") or len(names) > 1 else names[0]
    kinds = [PART_KEYS[key] for key in filled for _ in range(np.size(record[key]))]
    if rng.random() < 0.6:
        count = rng.choice([len(kinds), kinds.count("image"), *(np.size(record[key]) for key in filled)])
        return record | {"texts": list(rng.permutation([None] * count + ["a"]))}
    marks = "".join(f"<{kind}>" for kind in rng.permutation(kinds))
    return record | {"text": f"{marks if rng.random() < 0.5 else ''} a"}


def test_every_part_of_a_row_is_in_its_sample_or_refused() -> None:
    rng, taken, lost = np.random.default_rng(0), 0, 0
    for _ in range(2_000):
        record = shuffled_record(rng)
        given = sorted(name for key in PART_KEYS for name in np.atleast_1d(record.get(key, [])).tolist())
        try:
            made = SampleColumns(chat=False).sample(record, str.encode)
        except StoreError as error:
            assert "would be lost" in str(error) or "texts are null" in str(error), record
            lost += "would be lost" in str(error)
        else:
            assert isinstance(made, Sample)
            assert sorted(each.data.decode() for each in made.parts) == given, record
            taken += "texts" in record and len(given) > 0
    assert taken > 100 and lost > 100, (taken, lost)


def test_every_part_of_a_tar_is_in_its_sample_or_refused() -> None:
    rng, taken, lost = np.random.default_rng(1), 0, 0
    for _ in range(1_000):
        parts = [f"{k}.{rng.choice(['png', 'wav', 'mp4'])}" for k in range(rng.integers(1, 5))]
        named = [each for each in parts if rng.random() < 0.7]
        record: dict[str, Any] = {"text": "a"}
        for each in rng.permutation(named).tolist():
            record.setdefault(f"{SUFFIXES[each[-3:]]}s", []).append(f"1.{each}")
        if named and rng.random() < 0.3 and all(each.endswith("png") for each in named):
            record = {"texts": [None] * len(named), "images": record["images"]}
        files = {each: each.encode() for each in parts} | {"json": json.dumps(record).encode(), "txt": b"b"}
        try:
            made = sample_of("1", files, SampleColumns(chat=False))
        except StoreError as error:
            assert "is not named by the .json, and would be lost" in str(error) and 0 < len(named) < len(
                parts
            )
            lost += 1
        else:
            assert sorted(each.data.decode() for each in made.parts) == parts
            taken += 1
    assert min(taken, lost) > 100, (taken, lost)


@pytest.mark.parametrize("suffix", [".img", ".image", ""])
def test_a_picture_in_a_tar_is_read_or_refused(
    tmp_path: Path, tokenizer: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as tar:
        for name, data in (("README", b"of cats"), (f"a{suffix}", picture()), ("a.txt", b"a cat")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert prepared(tmp_path / "in", tokenizer) != 0
    assert f"{suffix or 'a file without a suffix'} begins like a png" in capsys.readouterr().err


def test_a_column_that_mds_declares_to_be_pictures_is_read(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"text": "str", "scan": "png", "pages": "list[jpeg]"}
    image = Image.open(io.BytesIO(picture()))
    with mosaic.imported(keep=()).MDSWriter(out=str(tmp_path / "in"), columns=columns) as writer:
        writer.write({"text": "a cat", "scan": image, "pages": [image, image]})
    assert prepared(tmp_path / "in", tokenizer) == 0, told_of(capsys)
    assert "3 parts" in told_of(capsys)


def test_columns_beside_a_picture_that_hold_none_are_left(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(HARMLESS), tmp_path / "in" / "a.parquet")
    assert prepared(tmp_path / "in", tokenizer) == 0, capsys.readouterr().err
    assert "1 part" in "".join(capsys.readouterr())


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_pictures_are_known_by_their_first_bytes(form: str) -> None:
    assert suffix_by_content(picture(form)) == {"JPEG": "jpg", "TIFF": "tif"}.get(form, form.lower())
    assert suffix_by_content(b"a text") is suffix_by_content(b"BMW") is suffix_by_content(b"") is None


def test_a_sparse_file_in_a_tar_is_called_so(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    with (tmp_path / "a.png").open("wb") as file:
        file.write(picture())
        file.truncate(1 << 20)
    (tmp_path / "a.txt").write_text("a cat")
    made = ["tar", "--sparse", "-cf", str(tmp_path / "in" / "a.tar"), "-C", str(tmp_path), "a.png", "a.txt"]
    subprocess.run(made, check=True)
    assert prepared(tmp_path / "in", tokenizer) != 0
    assert "a.png is a link, a device or sparse; make the tar of plain files" in told_of(capsys)


@pytest.mark.parametrize("codec", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_called_so(
    tmp_path: Path, tokenizer: str, codec: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", f"w:{codec}") as tar:
        tar.addfile(tarfile.TarInfo("a.png"), io.BytesIO())
    assert prepared(tmp_path / "in", tokenizer) != 0
    name = {"gz": "gzip", "bz2": "bzip2"}.get(codec, codec)
    assert f"compressed by {name}; give the tar that is in it" in told_of(capsys)


def test_a_folder_of_lerobot_is_called_so(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("meta/info.json", "data/chunk-000/file-000.parquet", "videos/front/chunk-000/file-000.mp4"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(b"")
    assert prepared(tmp_path / "in", tokenizer) != 0
    assert "a LeRobot dataset: its rows are states of a robot" in told_of(capsys)
