"""`meshfeed inspect --html`: texts, pictures and sizes on a page that runs nothing, whatever a store says."""

import base64
import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from meshfeed.cli.main import main
from meshfeed.multimodal import MultimodalWriter, PartSize
from meshfeed.parts import Parts
from meshfeed.text import visible
from videos import video

HOSTILE = (
    'a "cat" $path <script>alert(1)</script><img src=x onerror=alert(2)> & \x00\x1b[2J\x9b31m\u202egrößer'
)
MARK = 256


def stored(image, form, **how):
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


PICTURE = Image.effect_mandelbrot((900, 300), (-3, -2.5, 2, 2.5), 50).convert("RGB")
TURNED = Image.Exif()
TURNED[0x0112] = 6
LOGO = Image.new("RGBA", (40, 30), (200, 0, 0, 90))
IMAGES = [  # bytes, height and width in the index
    (stored(PICTURE, "JPEG"), 300, 900),
    (stored(PICTURE, "JPEG", exif=TURNED), 900, 300),
    (stored(LOGO, "PNG"), 30, 40),
    (stored(PICTURE.convert("CMYK"), "JPEG"), 300, 900),
    (stored(PICTURE.convert("L"), "PNG"), 300, 900),
    (stored(PICTURE, "JPEG")[:-2000], 300, 900),
    (stored(LOGO, "PNG"), 31, 40),
    (b"<script>alert(3)</script>", 5, 5),
    (stored(Image.new("1", (1, 1)), "PNG"), 1, 1),
    (stored(Image.new("1", (4000, 2)), "PNG"), 2, 4000),
]
WRONG = {
    (0, 5): "cannot be shown: image file is truncated",
    (0, 6): "cannot be shown: 40 pixels wide x 30 high, the index says 40 pixels wide x 31 high",
    (0, 7): "cannot be shown: cannot identify image file",
    (0, 9): "NativeImages: 4000 pixels wide x 2 high: one side is more than 200 times the other",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A document with text and images, one of audio, one of text, an empty one, one of thirty images."""
    path = tmp_path_factory.mktemp("page") / "store"
    words = list(HOSTILE.encode())
    with MultimodalWriter(path, {"tokens": np.uint16}) as writer:

        def add(tokens, parts, data):
            writer.add_document(tokens=np.array(tokens, np.uint16))
            at, sizes = (
                np.flatnonzero(np.array(tokens) == MARK),
                np.array([len(each) for each in data], np.int64),
            )
            writer.add_parts(replace(parts, num_bytes=sizes, at=at, starts=np.array([0, len(data)])), data)

        def images(some):
            return Parts.of_images([size for _, *size in some]), [data for data, *_ in some]

        add([MARK, *words, *[MARK] * (len(IMAGES) - 1)], *images(IMAGES))
        sound = replace(
            Parts.of_images([(0, 0)]), kind=np.array([1]), length=np.array([8000]), rate=np.array([16e3])
        )
        add([104, 105, MARK], sound, [bytes(16_000)])
        add(words * 20, Parts.of_images([]), [])
        add([], Parts.of_images([]), [])
        add([MARK] * 30, *images(IMAGES[2:3] * 30))
    return path


class Seen(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def page_of(store, *options, capsys):
    file = store.parent / "page.html"
    assert main(["inspect", str(store), "--html", str(file), "--json", *options]) == 0
    return Seen(file.read_text(encoding="utf-8")), json.loads(capsys.readouterr().out)["page"]


def test_a_page_shows_texts_pictures_and_what_is_wrong(store, capsys):
    seen, told = page_of(store, "--tokenizer", "bytes", capsys=capsys)
    assert told["documents"] == 5 and told["file"].endswith("page.html")
    assert {(each["document"], each["part"]) for each in told["wrong"]} == {*WRONG}
    for each in told["wrong"]:
        assert each["why"].startswith(WRONG[each["document"], each["part"]])
        assert each["why"] in seen.text
    assert f"image 0{visible(HOSTILE)}image 1" in seen.text
    for said in (
        "hiaudio 0",
        "0.50 s at 16,000 Hz16 kB, 12 tokens",
        "900 pixels wide x 300 high",
        "352 tokens",
        "0 tokens as",
    ):
        assert said in seen.text, said
    assert "30 parts" in seen.text and "part 29" in seen.text and "24 shown" in seen.text
    pictures = [value for name, value in seen.attributes if name == "src"]
    assert len(pictures) == len(IMAGES) - 3 + 24
    sizes = []
    for each in pictures[:7]:
        head, _, body = each.partition(",")
        assert head in ("data:image/jpeg;base64", "data:image/png;base64")
        with Image.open(io.BytesIO(base64.b64decode(body, validate=True))) as image:
            image.load()
            sizes.append((image.height, image.width))
    assert sizes == [(160, 480), (240, 80), (30, 40), (160, 480), (160, 480), (1, 1), (1, 480)]


def test_a_page_turns_no_text_around(store, tmp_path, capsys):
    evil = tmp_path / "a\x1b[2J\x9b\u202e\u2066<b>"
    evil.symlink_to(store)
    seen, _ = page_of(evil, "--tokenizer", "bytes", capsys=capsys)
    hidden = {each for each in seen.text if each not in "\n\t" and visible(each) != each}
    assert not hidden and visible(str(evil)) in seen.text


def test_nothing_of_a_store_runs_or_is_fetched(store, capsys):
    for options in (["--tokenizer", "bytes"], []):
        seen, _ = page_of(store, *options, capsys=capsys)
        assert not {"script", "iframe", "link", "object", "form", "base"} & {*seen.tags}
        for name, value in seen.attributes:
            assert not name.startswith("on")
            assert name != "src" or value.startswith("data:image/")
            assert name != "href" or value.startswith("#")
        assert any(value and value.startswith("default-src 'none'") for _, value in seen.attributes)


def test_documents_and_rules_are_chosen(store, capsys):
    rule = "NativeImages(max_pixels=80_000)"
    seen, told = page_of(store, "--documents", "0", "--part-rule", rule, capsys=capsys)
    assert told["documents"] == 1 and "max_pixels=80000" in seen.text and "Whisper" not in seen.text
    assert "1shown of 5 documents" in seen.text and "Token ids: give --tokenizer" in seen.text
    assert main(["inspect", str(store), "--documents", "1"]) == 0
    assert "104 105 256" in capsys.readouterr().out
    file = str(store.parent / "no.html")
    for options, said in (
        (["--html", file, "--documents", "5"], "--documents 5: the store has 5, from 0"),
        (["--html", file, "--part-rule", "NativeImages(9)"], "write a name and options"),
        (["--html", file, "--part-rule", "Strips"], "known rules: "),
        (["--html", file, "--part-rule", "NativeImages(patch=0)"], "patch=0): a whole number from 1"),
        (["--part-rule", "NativeImages"], "has no effect without --html"),
        (["--html", str(store.parent / "none/no.html")], "choose another file to write"),
    ):
        assert main(["inspect", str(store), *options]) == 2
        assert said in capsys.readouterr().err


def test_a_video_is_shown_as_a_strip_of_frames(tmp_path, capsys):
    data, path = video(48, 96), tmp_path / "store"
    with MultimodalWriter(path, {"tokens": np.uint16}) as writer:
        for frames in (16, 17):  # the index is wrong about the second
            part = PartSize(48, 96, frames, 10.0).as_video()
            writer.add_document(tokens=np.array([104, MARK], np.uint16))
            writer.add_parts(replace(part, num_bytes=np.array([len(data)]), at=np.array([1])), [data])
    seen, told = page_of(path, "--tokenizer", "bytes", "--part-rule", "NativeVideo()", capsys=capsys)
    (url,) = [value for name, value in seen.attributes if name == "src"]
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as strip:
        assert strip.size == (4 * 96, 48)
        first, last = (np.asarray(strip.convert("L"))[:4, 96 * k : 96 * k + 8].mean() for k in (0, 3))
    assert first < 40 and last > 140  # its corner becomes lighter
    assert "96 pixels wide x 48 high, 16 frames, 1.60 s" in seen.text
    (wrong,) = told["wrong"]
    assert (wrong["document"], wrong["part"]) == (1, 0)
    assert "16 frames, 96 pixels wide x 48 high, the index says 17 frames" in wrong["why"]
