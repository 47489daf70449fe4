"""`prepare --multimodal`: what it makes of tars, of attacks, and that nothing but the input decides it."""

import base64
import contextlib
import io
import json
import os
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kills import dies_at
from media import SPECIAL, bomb, flac, picture, tar, tokenizer, turned, wav
from PIL import Image
from texts import Here, left_behind, tree
from tokenizers import Tokenizer, models, pre_tokenizers

import meshfeed as mf
import mosaic
from meshfeed.cli.main import main
from meshfeed.errors import ChangedError, ChecksumError, MissingError, PrepareError, StoreError
from meshfeed.formats.video import sound_size
from meshfeed.multimodal import MultimodalStore
from meshfeed.parts import KINDS
from meshfeed.prepare import Chats, Multimodal, Text, prepare
from meshfeed.prepare.inputs.named import fetch_from
from meshfeed.prepare.inputs.samples import SampleColumns
from services.needs import needs
from services.nginx import Nginx
from soak import cases
from videos import video

PAD, START, END, AUDIO, _, VIDEO = SPECIAL
PNG, JPG, TURNED = picture(5, 9), picture(8, 4, "JPEG", seed=1), picture(3, 7, "JPEG", exif=turned(6))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("words") / "tokenizer.json")


@pytest.fixture
def captions(words):
    around = {"image": f"{START}{PAD}{END}"}
    return Multimodal(
        text=Text(tokenizer=words), tokens={"image": PAD, "audio": AUDIO, "video": VIDEO}, around=around
    )


def read(path, words):
    """(text with placeholders, [(kind, height, width, length, bytes)]) of each sample."""
    decode = Tokenizer.from_file(words)
    with mf.open(path) as store:
        assert isinstance(store, MultimodalStore)
        parts, found = store.parts(np.arange(store.num_documents)), []
        for i in range(store.num_documents):
            tokens = store.read(i, 0, int(store.lengths(np.array([i]))[0]))
            mine = range(*parts.starts[i : i + 2].tolist())
            ids = [decode.token_to_id({0: PAD, 1: AUDIO, 2: VIDEO}[int(parts.kind[k])]) for k in mine]
            assert tokens[parts.at[mine]].tolist() == ids
            data = store.read_parts(np.full(len(mine), i), np.arange(len(mine)))
            assert [len(each) for each in data] == parts.num_bytes[mine].tolist()
            sizes = zip(
                *(getattr(parts, name)[mine].tolist() for name in ("kind", "height", "width", "length"))
            )
            text = decode.decode(tokens.tolist(), skip_special_tokens=False)
            found.append((text, [(KINDS[kind], *size, each) for (kind, *size), each in zip(sizes, data)]))
        list(store.verify())
    return found


IMAGE = f"{START}{PAD}{END}"
FILES = [
    ("a/0001.jpg", JPG),
    ("a/0001.txt", "a cat, größer".encode()),
    ("a/0001.json", json.dumps({"caption": "of another crawl", "url": "https://x/y.jpg"}).encode()),
    ("a/0002.0.png", PNG),
    ("a/0002.1.jpg", TURNED),
    ("a/0002.json", json.dumps({"text": "<image>first <image>second"}).encode()),
    ("b/0002.json", json.dumps({"texts": [None, "then", None], "images": ["1.jpg", None, "0.png"]}).encode()),
    ("b/0002.0.png", PNG),
    ("b/0002.1.jpg", JPG),
    ("b/0003.wav", wav(16_000)),
    ("b/0003.json", json.dumps({"text": "hear: <audio>"}).encode()),
    ("b/0004.txt", b"words alone"),
    ("b/0005.mp4", video()),
    ("b/0005.0.png", PNG),
    ("b/0005.json", json.dumps({"text": "<video> shows <image>"}).encode()),
    ("b/0006.mov", video(form="mov", sound=True)),
    ("b/0006.txt", b"with sound"),
]
WANTED = [
    (f"{IMAGE}a cat, größer", [("image", 8, 4, 1, JPG)]),
    (f"{IMAGE}first {IMAGE}second", [("image", 5, 9, 1, PNG), ("image", 7, 3, 1, TURNED)]),
    (f"{IMAGE}then{IMAGE}", [("image", 8, 4, 1, JPG), ("image", 5, 9, 1, PNG)]),
    (f"hear: {AUDIO}", [("audio", 0, 0, 16_000, wav(16_000))]),
    ("words alone", []),
    (f"{VIDEO} shows {IMAGE}", [("video", 48, 64, 16, video()), ("image", 5, 9, 1, PNG)]),
    (f"{VIDEO}with sound", [("video", 48, 64, 16, video(form="mov", sound=True))]),
]


def test_tars_of_webdataset_are_samples_in_order(tmp_path, captions, words):
    tar(tmp_path / "in.tar", FILES)
    made = prepare([tmp_path / "in.tar"], tmp_path / "out", captions, engine=Here())
    assert read(tmp_path / "out", words) == WANTED
    assert made.manifest["stores"]["."]["num_parts"] == 9
    assert left_behind(tmp_path / "out") == []


@pytest.mark.parametrize("around", ["<img>", "<img>\n", "\n<img>"])
def test_text_behind_a_picture_does_not_begin_a_text(tmp_path, around):
    """Tokenizers put a space before a whole text, as the models' processors encode it, and not before its pieces."""
    words = ["<unk>", "▁", "▁a", "what", "▁what", "\n"]
    made = Tokenizer(models.Unigram([(word, len(word) - 9.0) for word in words], 0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<img>"])
    made.save(str(tmp_path / "t.json"))
    tar(tmp_path / "in.tar", [("0.0.png", PNG), ("0.1.png", PNG), ("0.txt", b"a<image>what<image>a")])
    text = Text(tokenizer=str(tmp_path / "t.json"))
    how = Multimodal(text=text, tokens={"image": "<img>"}, around={"image": around})
    prepare([tmp_path / "in.tar"], tmp_path / "out", how, engine=Here())
    with mf.open(tmp_path / "out") as store:
        tokens = store.read(0, 0, store.num_tokens).tolist()
    assert tokens == made.encode(f"a{around}what{around}a", add_special_tokens=False).ids


def test_a_placeholder_that_a_tokenizer_does_not_see_in_a_text_is_refused(tmp_path):
    ranks = (base64.b64encode(bytes([i])).decode() + f" {i}\n" for i in range(256))
    (tmp_path / "t.gpt2.tiktoken").write_text("".join(ranks))
    text = Text(tokenizer=str(tmp_path / "t.gpt2.tiktoken"))
    with pytest.raises(PrepareError, match=r"has no token '<\|endoftext\|>' that it sees in a text"):
        Multimodal(text=text, tokens={"image": "<|endoftext|>"}).encoder()


def test_numbered_files_of_a_tar_are_in_the_order_of_their_numbers(tmp_path, captions):
    """As webdataset's TarWriter and `tar --sort=name` write them, 10 comes before 2."""
    names = sorted([f"{k}.png" for k in range(12)] + [f"b{k:02}.{k}.png" for k in range(2)] + ["z.png"])
    heights = {"z.png": 60, "b00.0.png": 50, "b01.1.png": 51} | {f"{k}.png": 2 + k for k in range(12)}
    files = [(f"0.{name}", picture(heights[name], 3)) for name in names]
    tar(tmp_path / "in.tar", [*files, ("0.txt", b"<image>" * 15)])
    prepare([tmp_path / "in.tar"], tmp_path / "out", captions, engine=Here())
    with mf.open(tmp_path / "out") as store:
        assert store.parts(np.array([0])).height.tolist() == [*range(2, 14), 50, 51, 60]


def test_numbered_columns_of_mds_are_in_the_order_of_their_numbers(tmp_path, captions):
    """Its writer sorts columns by name."""
    images = {f"image_{k}": Image.open(io.BytesIO(picture(2 + k, 3))) for k in range(12)}
    columns = dict.fromkeys(images, "png") | {"text": "str"}
    with mosaic.imported(keep=()).MDSWriter(out=str(tmp_path / "m"), columns=columns) as writer:
        writer.write({**images, "text": "<image>" * 12})
    prepare([tmp_path / "m"], tmp_path / "out", captions, engine=Here())
    with mf.open(tmp_path / "out") as store:
        assert store.parts(np.array([0])).height.tolist() == [*range(2, 14)]


def test_the_output_depends_on_the_input_alone(tmp_path, captions):
    """However it is cut, in whatever order parts are encoded, and killed at every one of them."""
    (tmp_path / "in").mkdir()
    for i in range(5):
        own = [(f"{i}.png", picture(2 + i, 3, seed=i)), (f"{i}.txt", b"of its own")]
        tar(tmp_path / f"in/{i}.tar", own + [(f"{i}{name}", data) for name, data in FILES])
    (tmp_path / "in/0.tar.idx").write_bytes(b"of Energon")
    (tmp_path / "in/.nv-meta").mkdir()
    (tmp_path / "in/.nv-meta/split.yaml").write_text("of Energon, too")
    options = {"dedup": True, "validation": 0.5}
    prepare([tmp_path / "in"], tmp_path / "whole", captions, engine=Here(), **options)
    whole = tree(tmp_path / "whole")
    manifest = json.loads(whole["manifest.json"])
    counts = [store["num_documents"] for store in manifest["stores"].values()]
    assert manifest["num_duplicates"] == 4 * len(WANTED) and sum(counts) == 5 + len(WANTED) and min(counts)
    for seed in range(2):
        out = tmp_path / f"out{seed}"
        common = {"part_bytes": 1, "resume": True, **options}
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                prepare([tmp_path / "in"], out, captions, engine=Here(seed, stop_after=1), **common)
        prepare([tmp_path / "in"], out, captions, engine=Here(seed), **common)
        assert tree(out) == whole and left_behind(out) == []
    prepare([tmp_path / "in"], out, captions, engine=Here(), overwrite=True, **options)
    assert tree(out) == whole and left_behind(out) == []


def test_killed_at_a_step_it_goes_on_to_the_same_bytes(tmp_path):
    """Creations, renames and removals of files; `make soak` kills before each of them."""
    how = Multimodal(text=Text(tokenizer="bytes"), tokens={"image": "\x01"})
    for i in range(2):
        tar(tmp_path / f"{i}.tar", [("0.png", picture(2 + i, 3)), ("0.txt", b"x"), ("1.txt", b"y")])
    inputs = [tmp_path / "0.tar", tmp_path / "1.tar"]
    prepare(inputs, tmp_path / "whole", how, engine=Here(), part_bytes=1)
    step, killed = 0, True
    while killed:
        step += cases(9, 1)
        out = tmp_path / f"out{step}"
        killed = dies_at(step, lambda out=out: prepare(inputs, out, how, engine=Here(), part_bytes=1))
        prepare(inputs, out, how, engine=Here(), part_bytes=1, resume=True)
        assert tree(out) == tree(tmp_path / "whole") and left_behind(out) == [], step
    assert step > 30, "the steps were not seen"


BAD = [
    ("1.jpg", b"<html>404</html>", "1: part 0 (image): not an image, audio or video"),
    ("2.png", bomb(30_000, 30_000), "2: part 0 (image): Image size (900000000 pixels)"),
    ("3.png", b"", "3: part 0 (image): empty"),
    ("4.jpg", JPG[:30], "4: part 0 (image): "),
    ("5.jpg", wav(9), "5: part 0: audio, but the record says image"),
    ("6.mp4", video()[:900], "6: part 0 (video): video that was cut off or is damaged: box 'mdat'"),
]


def test_broken_parts_are_refused_by_name_or_dropped_and_counted(tmp_path, captions, words):
    """Others stay: mislabelled, of one pixel, in four colors."""
    good = [("7.jpg", PNG), ("8.jpg", picture(1, 1)), ("9.jpg", picture(4, 5, "JPEG", mode="CMYK"))]
    files = [(name, data) for name, data, _ in BAD] + good
    named = [each for name, data in files for each in ((name, data), (f"{name[0]}.txt", b"x"))]
    path = tar(tmp_path / "in.tar", named)
    with pytest.raises(PrepareError, match=r"1 malformed document \(limit: --max-errors 0\)") as refused:
        prepare([path], tmp_path / "out", captions, engine=Here())
    assert f"{path}: sample 0: 1: part 0 (image): not an image, audio or video" in str(refused.value)
    made = prepare([path], tmp_path / "out", captions, engine=Here(), max_errors=6)
    assert made.manifest["num_malformed"] == 6
    told = [json.loads(line) for line in (tmp_path / "out/errors.jsonl").read_text().splitlines()]
    assert [each["sample"] for each in told] == list(range(6))
    for each, (_, _, said) in zip(told, BAD):
        assert each["error"].startswith(said), each
    sizes = [part[:3] for _, parts in read(tmp_path / "out", words) for part in parts]
    assert sizes == [("image", 5, 9), ("image", 1, 1), ("image", 4, 5)]


def test_samples_that_make_no_sense_are_refused_by_name(tmp_path, captions):
    def said(*files):
        path = tar(tmp_path / "in.tar", list(files))
        prepare([path], tmp_path / "out", captions, engine=Here(), max_errors=1, overwrite=True)
        (line,) = (tmp_path / "out/errors.jsonl").read_text().splitlines()
        return json.loads(line)["error"]

    def of(told, *files):
        return said(("0.json", json.dumps(told).encode()), *files)

    assert "0: no 'text' or 'caption' or 'texts'" in of({}, ("0.png", PNG))
    apart = said(("0.png", PNG), ("1.txt", b"x"), ("1.png", PNG), ("0.json", b'{"text": "x"}'))
    assert (
        "0: no .json or .txt among its files: png; the files of a sample are side by side in the tar, named alike up to"
        in apart
    )
    heic = b"\0\0\0\x10ftypheic" + bytes(20)
    assert "0: part 0 (image): a HEIC image, whose size prepare" in said(("0.heic", heic), ("0.txt", b"x"))
    assert "0: part 0 (image): a JPEG XL image" in said(("0.jxl", b"\xff\x0a" + bytes(20)), ("0.txt", b"x"))
    assert "0: .json: not valid JSON" in said(("0.json", b"{"))
    assert "0: .json: list where an object belongs" in said(("0.json", b"[]"))
    assert "0: .txt: not valid UTF-8" in said(("0.txt", b"\xff"))
    assert "0: 2 of <image> in the text, but 1 of image in the record" in of(
        {"text": "<image><image>"}, ("0.png", PNG)
    )
    spelled = of({"text": f"an {PAD} here"}, ("0.png", PNG))
    assert "0: 2 placeholders in its tokens, and 1 parts; its text spells a placeholder" in spelled
    assert "1 images, and 2 of 2 texts are null" in of({"texts": [None, None]}, ("0.png", PNG))
    assert "'9.png' is not among" in of({"text": "x", "images": ["0.png", "9.png"]}, ("0.png", PNG))
    assert ".png is there twice" in said(("0.png", PNG), ("0.PNG", PNG))
    assert "or give --chat for conversations" in of({"conversations": []}, ("0.png", PNG))
    assert "more than 16,777,216 bytes" in said(("0.png", bytes(17 << 20)), ("0.txt", b"x"))
    captions = replace(captions, tokens={"image": PAD})
    assert "part 0: audio; say which token stands for it" in said(("0.flac", flac(9)), ("0.txt", b"x"))


def test_a_tar_cannot_reach_outside_itself(tmp_path, captions, words):
    """Names of a tar are never paths: what leads outside, absolute or linked, is a key, or refused."""
    (tmp_path / "secret.png").write_bytes(PNG)
    before = tree(tmp_path)
    told = json.dumps({"text": "x", "image": str(tmp_path / "secret.png")}).encode()
    outside = [
        ("../../evil.png", PNG),
        ("../../evil.txt", b"up"),
        ("/etc/evil.png", JPG),
        ("/etc/evil.txt", b"at"),
    ]
    tar(tmp_path / "in.tar", [*outside, ("z.json", told)])
    with tarfile.open(tmp_path / "in.tar", "a") as out:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo(f"link{kind.decode()}.png")
            member.type, member.linkname = kind, str(tmp_path / "secret.png")
            out.addfile(member)
    prepare([tmp_path / "in.tar"], tmp_path / "out", captions, engine=Here(), max_errors=4)
    errors = (tmp_path / "out/errors.jsonl").read_text()
    assert errors.count("a link, a device or sparse") == 3 and "secret.png' is not among the files" in errors
    assert read(tmp_path / "out", words) == [
        (f"{IMAGE}up", [("image", 5, 9, 1, PNG)]),
        (f"{IMAGE}at", [("image", 8, 4, 1, JPG)]),
    ]
    kept = {name: data for name, data in tree(tmp_path).items() if not name.startswith(("out/", "in.tar"))}
    assert kept == before


def test_a_cut_or_damaged_tar_loses_no_sample_in_silence(tmp_path, captions):
    raw = tar(tmp_path / "in.tar", FILES[:6]).read_bytes()
    end = len(raw.rstrip(b"\0")) // 512 * 512 + 512  # the last file's end, whole blocks
    for size in (100, 512, 700, 1024, end - 512, end - 100):
        (tmp_path / "in.tar").write_bytes(raw[:size])
        with pytest.raises((ChecksumError, PrepareError), match=r"in\.tar") as refused:
            prepare([tmp_path / "in.tar"], tmp_path / f"out{size}", captions, engine=Here())
        assert "copy it again" in str(refused.value), size
    (tmp_path / "in.tar").write_bytes(raw[:end])  # whole, without the blocks of zeros
    made = prepare([tmp_path / "in.tar"], tmp_path / "out", captions, engine=Here())
    assert made.manifest["stores"]["."]["num_documents"] == 2
    (tmp_path / "in.tar").write_bytes(raw + raw)
    with pytest.raises(StoreError, match=rf"byte {len(raw)}: more follows the end of the tar"):
        prepare([tmp_path / "in.tar"], tmp_path / "out2", captions, engine=Here())
    at = raw.index(b"a/0002.json")
    (tmp_path / "in.tar").write_bytes(raw[:at] + b"\xff" * 200 + raw[at + 200 :])
    with pytest.raises(ChecksumError, match=f"byte {at}: damaged, or it ends within a file"):
        prepare([tmp_path / "in.tar"], tmp_path / "out2", captions, engine=Here())


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|video_pad|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_conversations_keep_their_loss_mask(tmp_path, words):
    """LLaVA's, and messages with items; without a word of loss on a placeholder."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chats = Chats(tokenizer=words, template=str(tmp_path / "chat.jinja"))
    how = Multimodal(text=chats, tokens={"image": PAD, "video": VIDEO})
    seen = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "when?"}]}]
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]
    items = [
        {"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "so "}, {"type": "image"}]},
    ]
    plain = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a dog"}]
    tar(
        tmp_path / "in.tar",
        [
            ("0.png", PNG),
            ("0.json", json.dumps({"image": "coco/17.jpg", "conversations": turns}).encode()),
            ("1.0.png", PNG),
            ("1.json", json.dumps(items[:1] + plain[1:]).encode()),
            ("2.jpg", JPG),
            ("2.json", json.dumps({"messages": plain}).encode()),
            ("3.json", json.dumps({"messages": items}).encode()),
            ("3.0.png", PNG),
            ("4.json", json.dumps({"messages": [plain[0], items[1]]}).encode()),
            ("4.png", PNG),
            ("5.json", json.dumps({"messages": seen + plain[1:]}).encode()),
            ("5.mp4", video()),
        ],
    )
    prepare([tmp_path / "in.tar"], tmp_path / "out", how, engine=Here(), max_errors=1)
    assert "3: 2 of <image> in the text, but 1" in (tmp_path / "out/errors.jsonl").read_text()
    found = read(tmp_path / "out", words)
    assert [text for text, _ in found] == [
        f"user: {IMAGE}\nwhat?<|im_end|>\nassistant: a cat<|im_end|>\n",
        f"user: {IMAGE}and?<|im_end|>\nassistant: a dog<|im_end|>\n",
        f"user: {IMAGE}what?<|im_end|>\nassistant: a dog<|im_end|>\n",
        f"user: what?<|im_end|>\nassistant: so {IMAGE}<|im_end|>\n",
        f"user: {VIDEO}when?<|im_end|>\nassistant: a dog<|im_end|>\n",
    ]
    decode = Tokenizer.from_file(words).decode
    answers = [
        "a cat<|im_end|>",
        "a dog<|im_end|>",
        "a dog<|im_end|>",
        f"so {START}{END}<|im_end|>",
        "a dog<|im_end|>",
    ]
    with mf.open(tmp_path / "out") as store, store.columns["loss_mask"] as masks:
        for i, said in enumerate(answers):
            size = int(store.lengths(np.array([i]))[0])
            marked = store.read(i, 0, size)[masks.read(i, 0, size) == 1]
            assert decode(marked.tolist(), skip_special_tokens=False) == said


def test_a_chat_loses_no_text_to_the_images_beside_it():
    """Without a mark they come first in the first question; <image> is one also in an item of text."""
    image = {"type": "image"}

    def content(given):
        record = {"messages": [{"role": "user", "content": given}], "images": [b"abc"]}
        sample = SampleColumns(chat=True).sample(record, lambda name: b"")
        assert [part.data for part in sample.parts] == [b"abc"]
        return sample.text.messages[0]["content"]

    def text(said):
        return {"type": "text", "text": said}

    assert content([text("What is shown?")]) == content("What is shown?") == [image, text("What is shown?")]
    marked = [text("Here: "), image, text(" what?")]
    assert content([text("Here: <image> what?")]) == content("Here: <image> what?") == marked
    assert content(None) == [image]
    with pytest.raises(StoreError, match="message 0: content is dict where text belongs"):
        content({"text": "x"})


def test_each_answer_has_the_images_until_then(tmp_path, words):
    """A conversation for each answer; and columns beside the messages are read as in chats of text."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    turns = [
        {"from": "human", "value": "<image>what?"},
        {"from": "gpt", "value": "a cat"},
        {"from": "human", "value": "and <image>?"},
        {"from": "gpt", "value": "a dog"},
    ]
    row = {"conversations": turns, "system": "see"}
    tar(tmp_path / "in.tar", [("0.0.png", PNG), ("0.1.jpg", JPG), ("0.json", json.dumps(row).encode())])
    lost = tmp_path / "lost.tar"
    tar(lost, [("0.0.png", PNG), ("0.1.jpg", JPG), ("0.json", json.dumps(row | {"mood": "x"}).encode())])
    chats = Chats(tokenizer=words, template=str(tmp_path / "chat.jinja"), train_on="each")
    how = Multimodal(text=chats, tokens={"image": PAD})
    prepare([tmp_path / "in.tar"], tmp_path / "out", how, engine=Here())
    first = f"system: see<|im_end|>\nuser: {IMAGE}what?<|im_end|>\nassistant: a cat<|im_end|>\n"
    seen = [("image", 5, 9, 1, PNG), ("image", 8, 4, 1, JPG)]
    assert read(tmp_path / "out", words) == [
        (first, seen[:1]),
        (f"{first}user: and {IMAGE}?<|im_end|>\nassistant: a dog<|im_end|>\n", seen),
    ]
    with pytest.raises(PrepareError, match=r"the record has 'mood': nothing reads that.*--ignore-keys mood"):
        prepare([lost], tmp_path / "out2", how, engine=Here())
    kept = Multimodal(text=replace(chats, ignore=["mood"]), tokens={"image": PAD})
    prepare([lost], tmp_path / "out3", kept, engine=Here())
    assert read(tmp_path / "out3", words) == read(tmp_path / "out", words)


def test_the_command(tmp_path, words, capsys):
    (tmp_path / "in").mkdir()
    tar(tmp_path / "in/0.tar", FILES)
    common = ["prepare", str(tmp_path / "in"), "--tokenizer", words, "--workers", "2"]
    options = ["--multimodal", "--image-token", PAD, "--image-text", IMAGE, "--audio-token", AUDIO]
    options += ["--video-token", VIDEO]
    assert main([*common, "--out", str(tmp_path / "out"), *options, "--eod-token", "<|im_end|>"]) == 0
    assert "7 documents" in (said := capsys.readouterr().out) and "9 parts" in said
    assert [text for text, _ in read(tmp_path / "out", words)] == [f"{text}<|im_end|>" for text, _ in WANTED]
    assert main(["inspect", str(tmp_path / "out"), "--verify", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_parts"] == 9 and told["verified"]
    sizes = {"median_pixels": 38.5, "most_pixels": 45, "parts": 6}
    assert told["image"] == sizes | {"bytes": 3 * len(PNG) + 2 * len(JPG) + len(TURNED)}
    assert told["audio"] == {"parts": 1, "bytes": len(wav(16_000)), "median_seconds": 1, "most_seconds": 1}
    assert told["video"]["parts"] == 2 and told["video"]["bytes"] > len(video())
    for wrong, why in (
        (["--image-token", PAD], "needs --multimodal"),
        (["--max-pixels", "9"], "needs --multimodal"),
        (["--multimodal"], "name the token that stands for an image"),
        (["--multimodal", "--image-token", "<|nothing|>"], "has no token '<|nothing|>'"),
        (["--multimodal", "--image-token", PAD, "--image-text", "x"], "must have --image-token in it once"),
        (["--multimodal", "--image-token", PAD, "--audio-token", PAD], "give each its own"),
    ):
        assert main([*common, "--out", str(tmp_path / "no"), *wrong]) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "in/0.txt").write_text("not read from a folder")
    common[1] = str(tmp_path / "in/0.txt")
    assert main([*common, "--out", str(tmp_path / "no"), *options]) == 2
    assert "0.txt: not a file of webdataset, jsonl, json, parquet, arrow, mds" in capsys.readouterr().err


ROWS = [
    {"text": "of <image> and <image>", "images": ["sub/a.png", "b.jpg"]},
    {"text": "a caption", "image": "b.jpg"},
    {"texts": ["one", None, "two", None], "images": [None, "sub/a.png", None, "b.jpg"]},
    {"texts": [None, "of a list without gaps"], "images": ["b.jpg"]},
    {"text": "in the row itself", "image": "data:image/png;base64," + base64.b64encode(PNG).decode()},
    {"caption": "words alone"},
    {"text": "<video> shows <image>", "images": ["sub/a.png"], "video": "sub/c.mp4"},
    {"text": "with sound", "videos": ["d.mov"]},
]
OF_ROWS = [
    (f"of {IMAGE} and {IMAGE}", [("image", 5, 9, 1, PNG), ("image", 8, 4, 1, JPG)]),
    (f"{IMAGE}a caption", [("image", 8, 4, 1, JPG)]),
    (f"one{IMAGE}two{IMAGE}", [("image", 5, 9, 1, PNG), ("image", 8, 4, 1, JPG)]),
    (f"{IMAGE}of a list without gaps", [("image", 8, 4, 1, JPG)]),
    (f"{IMAGE}in the row itself", [("image", 5, 9, 1, PNG)]),
    ("words alone", []),
    (f"{VIDEO} shows {IMAGE}", [("video", 48, 64, 16, video()), ("image", 5, 9, 1, PNG)]),
    (f"{VIDEO}with sound", [("video", 48, 64, 16, video(form="mov", sound=True))]),
]


@pytest.fixture
def rows(tmp_path):
    """A folder with rows of JSON that name files beside them."""
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/a.png").write_bytes(PNG)
    (tmp_path / "in/b.jpg").write_bytes(JPG)
    (tmp_path / "in/sub/c.mp4").write_bytes(video())
    (tmp_path / "in/d.mov").write_bytes(video(form="mov", sound=True))
    (tmp_path / "in/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "in"


def test_a_resumed_job_is_of_the_pictures_as_they_are(tmp_path, captions):
    """Refused if a picture of a part that is kept has changed; else what a new run makes, byte for byte."""
    rng, refused, kept = np.random.default_rng(5), 0, 0
    for case in range(cases(9, 60)):
        folder, out, new = (tmp_path / f"{case}{name}" for name in ("in", "out", "new"))
        folder.mkdir()
        there = [f"{k}.png" for k in range(7)]
        for k, name in enumerate(there):
            (folder / name).write_bytes(picture(2 + k, 3, seed=k))
        rows = [{"text": "a row", "images": rng.choice(there, rng.integers(3)).tolist()} for _ in range(9)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        how = {"part_bytes": 60, "engine": Here(case)}
        stop, changed = int(rng.integers(10)), rng.choice(there, rng.integers(3), replace=False).tolist()
        with contextlib.suppress(KeyboardInterrupt):
            prepare([folder / "rows.jsonl"], out, captions, **how | {"engine": Here(case, stop)})
        for name in changed:
            (folder / name).write_bytes(picture(20, 30, seed=case))
            os.utime(folder / name, ns=(case, case))
        prepare([folder / "rows.jsonl"], new, captions, **how)
        try:
            prepare([folder / "rows.jsonl"], out, captions, resume=True, **how)
            kept += bool(changed)
        except ChangedError as error:
            assert any(f"{folder / name}: was changed" in str(error) for name in changed)
            prepare([folder / "rows.jsonl"], out, captions, resume=True, overwrite=True, **how)
            refused += 1
        assert tree(out) == tree(new) and left_behind(out) == []
        named = json.loads((out / "named.json").read_text())
        assert {*named} == {str(folder / name) for row in rows for name in row["images"]}
    assert min(refused, kept) > 1, (refused, kept)


def test_a_picture_that_changes_between_two_records_ends_the_run(tmp_path):
    """Also one that is gone, and one that has come."""
    named, path = dict[str, str](), tmp_path / "a.png"
    for names, change in ("a.png", path.unlink), ("b.png", lambda: (tmp_path / "b.png").write_bytes(PNG)):
        path.write_bytes(PNG)
        with contextlib.suppress(MissingError):
            fetch_from(str(tmp_path), 999, named=named)(names)
        change()
        with pytest.raises(PrepareError, match=rf"{names}: was changed after it was read"):
            fetch_from(str(tmp_path), 999, named=named)(names)


def test_a_finished_output_is_not_of_other_pictures(tmp_path, rows, captions):
    how = {"engine": Here(), "resume": True}
    prepare([rows / "rows.jsonl"], tmp_path / "out", captions, **how)
    old = tree(tmp_path / "out")
    (rows / "new.png").write_bytes(PNG)
    prepare([rows / "rows.jsonl"], tmp_path / "out", captions, **how)
    assert tree(tmp_path / "out") == old
    (rows / "b.jpg").write_bytes(PNG)
    with pytest.raises(ChangedError, match=r"in/b\.jpg: was changed"):
        prepare([rows / "rows.jsonl"], tmp_path / "out", captions, **how)
    assert tree(tmp_path / "out") == old and left_behind(tmp_path / "out") == []
    prepare([rows / "rows.jsonl"], tmp_path / "out", captions, **how, overwrite=True)
    assert tree(tmp_path / "out")["parts.bin"] != old["parts.bin"]


def test_a_resumed_job_is_of_the_shards_as_they_are(tmp_path, captions):
    """Though the index of MDS, of the same names and sizes, is the same."""
    image = Image.open(io.BytesIO(PNG))
    with mosaic.imported(keep=()).MDSWriter(
        out=str(tmp_path / "in"), columns={"text": "str", "image": "png"}, size_limit=500
    ) as writer:
        for i in range(6):
            writer.write({"text": f"<image>{i}", "image": image})
    shards = sorted((tmp_path / "in").glob("shard.*"))
    assert len(shards) > 2
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "in"], tmp_path / "out", captions, engine=Here(1, 1), part_bytes=1)
    (part,) = (int(each.name) for each in (tmp_path / "out.preparing/parts").iterdir())
    other = shards[part - 1]
    os.utime(other, ns=(1, 1))
    os.utime(shards[part], ns=(2, 2))
    with pytest.raises(ChangedError, match=f"{shards[part].name}: was changed"):
        prepare([tmp_path / "in"], tmp_path / "out", captions, engine=Here(), resume=True)
    prepare([tmp_path / "in"], tmp_path / "out", captions, engine=Here(), resume=True, overwrite=True)
    prepare([tmp_path / "in"], tmp_path / "new", captions, engine=Here())
    assert tree(tmp_path / "out") == tree(tmp_path / "new")
    os.utime(other, ns=(3, 3))
    with pytest.raises(ChangedError, match=f"{other.name}: was changed"):
        prepare([tmp_path / "in"], tmp_path / "out", captions, engine=Here(), resume=True)


def test_json_lines_name_parts_by_path(tmp_path, rows, captions, words):
    """From the file's folder or another, in every cut; never from outside it."""
    for part_bytes in (10, 100, None):
        out = tmp_path / f"out{part_bytes}"
        prepare([rows / "rows.jsonl"], out, captions, engine=Here(), part_bytes=part_bytes)
        assert read(out, words) == OF_ROWS
    (tmp_path / "lines").mkdir()
    lines = (rows / "rows.jsonl").rename(tmp_path / "lines/rows.jsonl")
    elsewhere = replace(captions, folder=str(rows))
    prepare([lines], tmp_path / "out", elsewhere, engine=Here(), part_bytes=100)
    assert tree(tmp_path / "out")["parts.bin"] == tree(tmp_path / "out10")["parts.bin"]

    def said(name, how=elsewhere):
        lines.write_text(json.dumps({"text": "x", "image": name}))
        prepare([lines], tmp_path / "out", how, engine=Here(), max_errors=1, overwrite=True)
        errors = tmp_path / "out/errors.jsonl"
        return json.loads(errors.read_text())["error"] if errors.exists() else ""

    assert said(str(rows / "b.jpg")) == ""
    assert "outside" in said("/etc/passwd") and "--parts-folder" in said("/etc/passwd")
    for name in ("../in/b.jpg", "sub/../../x.png", "~/x.png", "%2e%2e/x.png"):
        assert "without '..'" in said(name), name
    assert "image[0]: " in said("none.png") and "none.png: missing" in said("none.png")
    assert "a data URL that cannot be read" in said("data:image/png;base64,@@")
    for nothing in (
        {"images": [None]},
        {"images": ["b.jpg", None]},
        {"image": {"bytes": None, "path": None}},
    ):
        lines.write_text(json.dumps({"text": "x"} | nothing))
        prepare([lines], tmp_path / "out", elsewhere, engine=Here(), max_errors=1, overwrite=True)
        errors = (tmp_path / "out/errors.jsonl").read_text()
        assert "]: null where a path, a URL or bytes belong; leave the list empty" in errors
    none = [{"images": []}, {"image": None}, {"image": "b.jpg"}]
    lines.write_text("".join(json.dumps({"text": "x"} | each) + "\n" for each in none))
    prepare([lines], tmp_path / "out", elsewhere, engine=Here(), overwrite=True)
    assert "image[0]: int where a path, a URL or bytes belong" in said(5)
    assert "image[0]: data:image/png: a data URL" in said("data:image/png,raw")
    lines.write_text(json.dumps({"text": "x", "images": ["b.jpg"] * 9}))
    limit = {"max_errors": 1, "max_record_bytes": 8 * len(JPG), "overwrite": True}
    prepare([lines], tmp_path / "out", elsewhere, engine=Here(), **limit)
    assert "images[8]: its parts have more than" in (tmp_path / "out/errors.jsonl").read_text()


def test_rows_of_parquet_have_bytes_or_paths(tmp_path, rows, captions, words):
    """As `datasets` writes images: structs of bytes and path."""
    as_struct = {"sub/a.png": {"bytes": PNG, "path": "a.png"}, "b.jpg": {"bytes": None, "path": "b.jpg"}}
    table = [
        {
            name: [as_struct.get(ref) for ref in value] if name == "images" else value
            for name, value in row.items()
        }
        for row in ROWS
    ]
    columns = {
        name: [row.get(name) for row in table]
        for name in ("text", "caption", "texts", "images", "image", "videos")
    }
    columns["video"] = [{"bytes": video(), "path": "c.mp4"} if "video" in row else None for row in table]
    pq.write_table(pa.table(columns), rows / "rows.parquet", row_group_size=2)
    for part_bytes in (1, None):
        out = tmp_path / f"out{part_bytes}"
        prepare([rows / "rows.parquet"], out, captions, engine=Here(), part_bytes=part_bytes)
        assert read(out, words) == OF_ROWS
    pq.write_table(pa.table({"text": ["x", "y"], "image": [b"<html>", PNG]}), rows / "rows.parquet")
    prepare([rows / "rows.parquet"], tmp_path / "out", captions, engine=Here(), max_errors=1)
    told = json.loads((tmp_path / "out/errors.jsonl").read_text())
    assert told["row"] == 0 and told["error"].startswith("part 0 (image): not an image")
    assert read(tmp_path / "out", words) == [(f"{IMAGE}y", [("image", 5, 9, 1, PNG)])]


def test_parts_below_a_folder_in_storage_are_read_and_those_that_fail_are_counted(
    tmp_path, rows, captions, words, monkeypatch
):
    needs("nginx")
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    with Nginx(rows, "location /closed/ { return 403; }") as server:
        names = (
            "b.jpg",
            f"{server.url}/none.jpg",
            "closed/b.jpg",
            f"{server.url}/sub/a.png",
            "https://h/a.jpg",
        )
        lines = [json.dumps({"text": "x", "image": name}) + "\n" for name in names]
        (rows / "rows.jsonl").write_text("".join(lines))
        far = replace(captions, folder=server.url)
        made = prepare([rows / "rows.jsonl"], tmp_path / "out", far, engine=Here(), max_errors=3)
        how = {"engine": Here(), "max_errors": 3, "resume": True}
        assert prepare([rows / "rows.jsonl"], tmp_path / "out", far, **how) == made
        (rows / "sub/a.png").write_bytes(picture(30, 30))
        with pytest.raises(ChangedError, match=rf"{server.url}/sub/a\.png: was changed"):
            prepare([rows / "rows.jsonl"], tmp_path / "out", far, **how)
    told = [json.loads(line) for line in (tmp_path / "out/errors.jsonl").read_text().splitlines()]
    assert [each["line"] for each in told] == [2, 3, 5]
    assert "none.jpg" in told[0]["error"] and "closed/b.jpg" in told[1]["error"]
    assert "not below the folder of its file" in told[2]["error"]
    sizes = [part[1:3] for _, parts in read(tmp_path / "out", words) for part in parts]
    assert sizes == [(8, 4), (5, 9)]


def test_samples_of_mds_keep_the_bytes_of_their_images(tmp_path, captions, words):
    """Several shards, cut anywhere; what is broken is named by its sample."""
    columns = {"text": "str", "image": "png", "images": "list[jpeg]", "audio": "bytes", "score": "int"}
    with mosaic.imported(keep=()).MDSWriter(
        out=str(tmp_path / "m"), columns=columns, size_limit=2_000
    ) as writer:
        for i in range(9):
            image = Image.open(io.BytesIO(picture(2 + i, 3, seed=i)))
            several = [Image.open(io.BytesIO(JPG))] * (i % 3)
            text = "<image>" * (1 + i % 3) + f"<audio> of {i}"
            audio = wav(i) if i != 5 else b"<html>"
            writer.write({"text": text, "image": image, "images": several, "audio": audio, "score": i})
    assert len(list((tmp_path / "m").glob("*.mds"))) > 1
    for part_bytes in (1, None):
        into = tmp_path / f"out{part_bytes}"
        prepare([tmp_path / "m"], into, captions, engine=Here(), part_bytes=part_bytes, max_errors=2)
        told = [json.loads(line) for line in (into / "errors.jsonl").read_text().splitlines()]
        assert [each["sample"] for each in told] == [0, 5]
        assert "audio of 0 samples" in told[0]["error"] and "not an image, audio or video" in told[1]["error"]
        found = read(into, words)
        assert [text for text, _ in found] == [
            IMAGE * (1 + i % 3) + f"{AUDIO} of {i}" for i in range(9) if i not in (0, 5)
        ]
        for (_, parts), i in zip(found, (1, 2, 3, 4, 6, 7, 8)):
            kinds = ["image"] * (1 + i % 3) + ["audio"]
            assert [part[0] for part in parts] == kinds
            assert parts[0][1:3] == (2 + i, 3) and parts[-1][3] == i and parts[-1][4] == wav(i)
            assert all(part[1:3] == (8, 4) for part in parts[1:-1])
    assert tree(tmp_path / "out1") == tree(tmp_path / "outNone")


HEARD, LOUD = video(sound="aac", seconds=1.5), video(form="matroska", sound="flac", seconds=0.7, seed=1)
WITH_SOUND = [
    ("a.mp4", HEARD),
    ("a.json", json.dumps({"text": "see <video> and <image>, <video>"}).encode()),
    ("a.0.png", PNG),
    ("a.1.mkv", LOUD),
]


def test_the_sound_of_videos_is_a_part_of_the_same_bytes(tmp_path, captions, words, capsys):
    files = sorted(WITH_SOUND)
    tar(tmp_path / "0.tar", files)
    prepare([tmp_path / "0.tar"], tmp_path / "out", replace(captions, sound_track="behind"), engine=Here())
    decode = Tokenizer.from_file(words)
    with mf.open(tmp_path / "out") as store:
        parts = store.parts(np.array([0]))
        tokens = store.read(0, 0, int(store.lengths(np.array([0]))[0])).tolist()
        first, second = (LOUD, HEARD) if files[1][1] == LOUD else (HEARD, LOUD)
        sizes = [sound_size(each) for each in (first, second)]
        assert (
            decode.decode(tokens, skip_special_tokens=False)
            == f"see {VIDEO}{AUDIO} and {IMAGE}, {VIDEO}{AUDIO}"
        )
        assert [KINDS[each] for each in parts.kind] == ["video", "audio", "image", "video", "audio"]
        assert list(zip(parts.length[[1, 4]].tolist(), parts.rate[[1, 4]].tolist())) == sizes
        every = np.arange(5)
        assert store.read_parts(0 * every, every) == [first, first, PNG, second, second]
        assert (tmp_path / "out/parts.bin").read_bytes() == first + PNG + second
        store.will_need_part_ranges(*store.part_ranges(0 * every, every))
    list(mf.open(tmp_path / "out").verify())
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["audio"]["parts"] == 2 and told["audio"]["bytes"] == 0
    within = replace(captions, sound_track="within", tokens={"image": PAD, "video": VIDEO})
    prepare([tmp_path / "0.tar"], tmp_path / "within", within, engine=Here())
    with mf.open(tmp_path / "within") as store:
        shared = store.parts(np.array([0]))
        tokens = store.read(0, 0, int(store.lengths(np.array([0]))[0])).tolist()
        assert decode.decode(tokens, skip_special_tokens=False) == f"see {VIDEO} and {IMAGE}, {VIDEO}"
        assert shared.is_within.tolist() == [False, True, False, False, True]
        assert shared.at[[1, 4]].tolist() == shared.at[[0, 3]].tolist()
        assert store.read_parts(0 * every, every) == [first, first, PNG, second, second]
    list(mf.open(tmp_path / "within").verify())
    assert main(["inspect", str(tmp_path / "within"), "--html", str(tmp_path / "page.html")]) == 0
    assert "audio 1" in (tmp_path / "page.html").read_text()
    silent = tar(tmp_path / "1.tar", [("a.mp4", video()), ("a.txt", b"still")])
    how = replace(captions, sound_track="behind")
    with pytest.raises(PrepareError, match=r"part 0: a video without a sound track; .*--silent"):
        prepare([silent], tmp_path / "no", how, engine=Here())
    prepare([silent], tmp_path / "quiet", replace(how, silent=True), engine=Here())
    assert read(tmp_path / "quiet", words) == [(f"{VIDEO}still", [("video", 48, 64, 16, video())])]
    broken = tar(
        tmp_path / "2.tar", [("a.mp4", video(sound="aac").replace(b"mp4a", b"enca")), ("a.txt", b"x")]
    )
    with pytest.raises(PrepareError, match=r"part 0 \(video\): video whose sound is encrypted"):
        prepare([broken], tmp_path / "no", how, engine=Here(), overwrite=True)
    for wrong, said in (
        ({"tokens": {"video": VIDEO}}, "name the token that stands for sound: --audio-token"),
        ({"tokens": {"audio": AUDIO}}, "name the token that stands for a video: --video-token"),
        ({"sound_track": None, "silent": True}, "--silent: needs --sound-track"),
    ):
        with pytest.raises(PrepareError, match=said):
            prepare(
                [silent], tmp_path / "no", replace(how, around=None, **wrong), engine=Here(), overwrite=True
            )


def test_the_sound_of_videos_in_a_conversation(tmp_path, words):
    heard = "{% elif c.type == 'audio' %}<|audio|>{% else %}{{ c.text }}"
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("{% else %}{{ c.text }}", heard))
    talk = [
        {"role": "user", "content": "one <video> two <video>"},
        {"role": "assistant", "content": "heard"},
    ]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": talk, "videos": ["a.mp4", "b.mp4"]}) + "\n")
    for name, data in (("a.mp4", video()), ("b.mp4", HEARD)):
        (tmp_path / name).write_bytes(data)
    chats = Chats(tokenizer=words, template=str(tmp_path / "chat.jinja"))
    how = Multimodal(text=chats, tokens={"video": VIDEO, "audio": AUDIO}, sound_track="behind", silent=True)
    prepare([tmp_path / "c.jsonl"], tmp_path / "out", how, engine=Here())
    with mf.open(tmp_path / "out") as store:
        tokens = store.read(0, 0, int(store.lengths(np.array([0]))[0])).tolist()
        text = Tokenizer.from_file(words).decode(tokens, skip_special_tokens=False)
        assert f"one {VIDEO} two {VIDEO}{AUDIO}<|im_end|>" in text
        assert [KINDS[each] for each in store.parts(np.array([0])).kind] == ["video", "video", "audio"]
