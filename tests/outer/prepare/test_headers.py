"""Sizes of images and audio from their headers, against Pillow's own decoding; and what is refused."""

import contextlib
import io
import sys

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from media import bomb, flac, picture, sound, turned, wav
from PIL import Image, ImageOps, features

from meshfeed.errors import PartError, PrepareError, StoreError
from meshfeed.formats.sound import decoded_audio
from meshfeed.formats.video_header import VideoHeader
from meshfeed.prepare.encoding import part_headers
from meshfeed.prepare.encoding.part_headers import Size, size_of
from soak import cases
from videos import box, mp4, video


def decoded(data):
    """(height, width) as displayed, from the decoded pixels."""
    with Image.open(io.BytesIO(data)) as image:
        width, height = ImageOps.exif_transpose(image).size
    return height, width


FORMS = [
    ("JPEG", "RGB"),
    ("JPEG", "CMYK"),
    ("JPEG", "L"),
    ("PNG", "RGBA"),
    ("PNG", "P"),
    ("WEBP", "RGB"),
    ("GIF", "P"),
    ("BMP", "RGB"),
    ("TIFF", "RGB"),
    ("PPM", "RGB"),
]


@pytest.mark.parametrize(("form", "mode"), FORMS)
def test_images_are_as_large_as_pillow_decodes_them(form, mode):
    for height, width in ((1, 1), (5, 9), (64, 3)):
        data = picture(height, width, form, mode=mode)
        assert size_of(data) == Size("image", *decoded(data), 1, 0.0) == Size("image", height, width, 1, 0.0)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_turned_image_has_the_size_that_it_is_displayed_with(form):
    for orientation in range(1, 9):
        data = picture(5, 9, form, exif=turned(orientation))
        size = size_of(data)
        assert (size.height, size.width) == decoded(data) == ((5, 9) if orientation < 5 else (9, 5))


def test_an_animated_image_is_its_first_frame():
    for form in ("GIF", "WEBP", "PNG"):
        frames = [Image.new("RGB", (7, 4), color) for color in ("red", "green", "blue")]
        out = io.BytesIO()
        frames[0].save(out, form, save_all=True, append_images=frames[1:])
        assert size_of(out.getvalue()) == Size("image", 4, 7, 1, 0.0)


def test_audio_is_as_long_as_its_header_says():
    for length, rate, channels in ((1, 8_000, 1), (16_001, 16_000, 2), (999, 44_100, 6)):
        assert size_of(wav(length, rate, channels)) == Size("audio", 0, 0, length, float(rate))
        assert size_of(flac(length, rate)) == Size("audio", 0, 0, length, float(rate))
    streamed = bytearray(wav(100))
    streamed[40:44] = b"\xff" * 4  # as ffmpeg writes to a pipe
    assert size_of(bytes(streamed)).length == 100


COMPRESSED = {
    "mp3": {"form": "MP3"},
    "mp3 of variable bit rate": {"form": "MP3", "bitrate_mode": "VARIABLE", "compression_level": 0.5},
    "vorbis": {"form": "OGG", "subtype": "VORBIS"},
    "opus": {"form": "OGG", "subtype": "OPUS", "rate": 48_000},
}


@pytest.mark.parametrize("how", COMPRESSED.values(), ids=COMPRESSED)
def test_compressed_audio_is_as_long_as_what_is_decoded(how):
    for length, channels in ((3_001, 1), (100_000, 2)):
        data = sound(length=length, channels=channels, **how)
        size = size_of(data)
        assert size == Size("audio", 0, 0, length, float(how.get("rate", 44_100)))
        assert decoded_audio(data, size.length, size.rate, 1 << 20).size == length
        if how["form"] == "MP3":  # text and pictures may stand around it
            tagged = b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + data + b"TAG" + bytes(125)
            assert size_of(tagged) == size


def test_mp3_without_its_header_is_counted_or_refused():
    """The header of LAME is the first frame of the file. No sample is left out without a word."""
    for mode, is_counted in (("CONSTANT", True), ("VARIABLE", False)):
        # noise, then silence: by its first frames, the rest is fewer
        samples = np.random.default_rng(0).normal(scale=0.2, size=100_000) * (np.arange(100_000) < 30_000)
        out = io.BytesIO()
        soundfile.write(out, samples, 44_100, format="MP3", bitrate_mode=mode, compression_level=0.5)
        whole = out.getvalue()
        headless = whole[whole.index(whole[:2], 4) :]
        if is_counted:
            size = size_of(headless)
            assert size.length >= 100_000 and size.length % 1_152 == 0
            assert decoded_audio(headless, size.length, size.rate, 1 << 20).size == size.length
        else:
            with pytest.raises(StoreError, match=r"only the beginning can be decoded.*convert it to FLAC"):
                size_of(headless)
        with pytest.raises(StoreError, match="joined of several"):
            size_of(whole + whole)
        with pytest.raises(StoreError, match="MP3 audio that was cut off: its header tells of"):
            size_of(whole[: len(whole) // 2])


@settings(max_examples=cases(40, 2_000), deadline=None)
@given(st.sampled_from(["WAV", "FLAC", *COMPRESSED]), st.floats(0, 1), st.binary(max_size=4), st.floats(0, 1))
def test_cut_or_damaged_audio_has_a_size_or_is_refused(form, share, bad, where):
    """Never another error; and whoever decodes it gets exactly that many samples, or a PartError."""
    data = sound(length=5_000, **COMPRESSED[form]) if form in COMPRESSED else sound(form, 5_000)
    at = int(where * len(data))
    for each in (data[: int(share * len(data))], data[:at] + bad + data[at + len(bad) :]):
        with contextlib.suppress(StoreError, PartError):
            size = size_of(each)
            assert decoded_audio(each, size.length, size.rate, 1 << 20).size == size.length


SAYS = [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAVEX", "FLOAT"), ("RF64", "PCM_16"), ("RF64", "PCM_24")]
SAYS += [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("form", "kind"), SAYS)
def test_sound_that_was_cut_off_is_refused(form, kind, channels):
    """Wherever it is cut: some bytes at the end, one in ten, a half."""
    samples, out = np.random.default_rng(5).normal(0, 0.1, (48_000, channels)), io.BytesIO()
    soundfile.write(out, samples, 48_000, format=form, subtype=kind)
    data = out.getvalue()
    assert size_of(data).length >= 48_000
    for size in (len(data) - 1, len(data) - 97, len(data) * 9 // 10, len(data) // 2):
        with pytest.raises(
            StoreError, match=r"audio that (was cut off: .*; get the whole file|cannot be decoded)"
        ):
            size_of(data[:size])


@pytest.mark.parametrize("told", [0x7FFF_0000, 0x7FFF_FFFF, 0xFFFF_FFFF])
def test_a_wav_file_that_was_streamed_tells_no_length(told):
    data = wav(100)
    at = data.index(b"data") + 4
    streamed = data[:at] + told.to_bytes(4, "little") + data[at + 4 :]
    assert size_of(streamed).length == 100


def test_an_mp3_with_a_tag_before_it_tells_its_bytes():
    data, tag = sound("MP3", 20_000), b"ID3\x04\0\0\0\0\1\x10" + bytes(144)
    assert size_of(tag + data) == size_of(data)
    with pytest.raises(StoreError, match=f"tells of {len(data)} bytes, and {len(data) - 50} are there"):
        size_of((tag + data)[:-50])


@pytest.mark.parametrize(("module", "data"), [("soundfile", wav(100)), ("PIL", picture(1, 1, "PNG"))])
def test_a_missing_package_is_no_fault_of_the_record(module, data, monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PrepareError, match=r"pip install"):
        size_of(data)


def boxes(*brands):
    """The beginning of a file of ISO boxes: the major brand, and what it is compatible with."""
    box = b"ftyp" + brands[0] + bytes(4) + b"".join(brands)
    return (len(box) + 4).to_bytes(4, "big") + box + bytes(99)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", r"not an image, audio or video: 21 bytes \(a web page\); fetch it again"),
        (bomb(30_000, 30_000), "900000000 pixels"),
        (bomb(10_000, 10_000), "10000 pixels wide x 10000 high, more than --max-pixels 89478485"),
        (bomb(0, 7), "header|not an image"),
        (b"ID3\x04" + bytes(99), "MP3 audio that cannot be decoded"),
        (b"\xff\xfb" + bytes(99), "MP3 audio that cannot be decoded"),
        (b"OggS" + bytes(99), "Ogg audio that cannot be decoded"),
        (2 * sound("OGG", 999), "Ogg audio of several streams"),
        (bytes(4) + b"ftypisom" + bytes(99), "video without its header"),
        (video()[:2000], "video that was cut off"),
        *(
            (box(name, bytes(9)), "video without its header")
            for name in (b"styp", b"uuid", b"pnot", b"moof", b"sidx")
        ),
        (boxes(b"heic", b"mif1"), "a HEIC image, whose size prepare cannot read; convert it to JPEG"),
        (boxes(b"mif1", b"heic"), "a HEIC image"),
        (boxes(b"msf1", b"hevc"), "a HEIC image"),
        (boxes(b"mif1", b"avif"), "not an image|its header is broken"),  # for Pillow to say
        (boxes(b"M4A ", b"isom"), "M4A audio, whose size prepare cannot read; convert it to FLAC"),
        (b"\xff\x0a" + bytes(99), "a JPEG XL image"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99), "a JPEG 2000 image"),
        (b"\x1aE\xdf\xa3" + bytes(99), "video that was cut off or is damaged at byte 4; get the whole file"),
        (b"RIFF" + bytes(4) + b"AVI " + bytes(99), "AVI video"),
        (wav(5)[:30], "WAV audio that cannot be decoded: .*data"),
        (flac(5)[:30], "FLAC audio that cannot be decoded"),
        (wav(0), "audio of 0 samples"),
        (flac(9)[:21] + b"\xf0" + bytes(4) + flac(9)[26:], "audio of 0 samples"),  # of a length not known
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),  # a program, to Pillow
    ],
)
def test_what_is_refused_is_named(data, said):
    with pytest.raises(StoreError, match=said):
        size_of(data)


def test_a_pillow_without_a_format_says_so(monkeypatch):
    """As older ones are without AVIF; a broken image is then still told as one."""
    for form in filter(features.check, ("avif", "webp")):
        data = picture(5, 9, form.upper())
        assert size_of(data) == Size("image", 5, 9, 1, 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(features, "check", lambda name: False)
            with pytest.raises(PrepareError, match=f"(?i)an? {form} image, which this Pillow cannot read"):
                size_of(data)
            patch.delitem(Image.OPEN, form.upper())
            with pytest.raises(PrepareError, match=f"(?i)an? {form} image, which this Pillow cannot read"):
                size_of(data)
            with pytest.raises(StoreError, match="not an image, audio or video"):
                size_of(b"<html>")


def test_a_video_has_the_frames_of_its_header():
    assert size_of(video()) == Size("video", 48, 64, 16, 10.0)
    assert size_of(video(form="mov", sound=True, frames=9)) == Size("video", 48, 64, 9, 10.0)
    assert size_of(video(form="webm", codec="VP9", frames=9)) == Size("video", 48, 64, 9, 10.0)
    with pytest.raises(StoreError, match="64 pixels wide x 48 high, more than --max-pixels 3000"):
        size_of(video(), 3000)
    with pytest.raises(StoreError, match="a video of one frame; give it as an image"):
        size_of(video(frames=1))
    with pytest.raises(StoreError, match=r"4.1943e\+06 frames a second, outside 0 to 1000"):
        size_of(mp4(scale=(1 << 22) - 1))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_by_which_training_could_not_divide_is_refused(monkeypatch, rate):
    header = VideoHeader(48, 64, 16, rate, False, 0, False)
    monkeypatch.setattr(part_headers, "video_header", lambda data: header)
    with pytest.raises(StoreError, match=r"frames a second, outside 0 to 1000; leave it out"):
        size_of(video())


def test_an_image_may_be_larger_if_the_user_says_so():
    assert size_of(bomb(10_000, 10_000), 10**8) == Size("image", 10_000, 10_000, 1, 0.0)
    with pytest.raises(StoreError, match="3 pixels wide x 2 high, more than --max-pixels 5"):
        size_of(picture(2, 3), 5)


@settings(max_examples=cases(40), deadline=None)
@given(st.sampled_from(FORMS), st.floats(0, 1), st.binary(max_size=4), st.floats(0, 1))
def test_a_cut_or_damaged_image_has_a_size_or_is_refused(form, share, bad, where):
    """Never another error, and of a cut one never another size."""
    data = picture(5, 9, form[0], mode=form[1])
    cut = data[: int(share * len(data))]
    with contextlib.suppress(StoreError):
        assert size_of(cut) == Size("image", 5, 9, 1, 0.0)
    at = int(where * len(data))
    with contextlib.suppress(StoreError):
        size_of(data[:at] + bad + data[at + len(bad) :])
