"""The sound track of a video: as many samples as its header says, where they belong; and what is refused by name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from meshfeed.errors import PartError
from meshfeed.formats.sound import decoded_audio
from meshfeed.formats.sound_track import decoded_track
from meshfeed.formats.video import sound_size
from soak import SEED, cases
from videos import box, mp4, tones, video, words

FRAGMENTS = "frag_keyframe+empty_moov+delay_moov"
EXACT, ROUGH = 1e-4, 0.03  # how far samples are from those given, at most, on average
WRITTEN: dict[str, tuple[dict[str, Any], float]] = {
    "AAC": ({"sound": "aac"}, ROUGH),
    "AAC in fragments": ({"sound": "aac", "flags": FRAGMENTS}, ROUGH),
    "MP3": ({"sound": "libmp3lame", "hertz": 44_100}, ROUGH),
    "Opus": ({"sound": "libopus", "hertz": 48_000}, ROUGH),
    "FLAC": ({"sound": "flac"}, EXACT),
    "ALAC": ({"sound": "alac", "form": "mov"}, EXACT),
    "PCM": ({"sound": "pcm_s16le", "form": "mov"}, EXACT),
    "AAC in Matroska": ({"sound": "aac", "form": "matroska"}, ROUGH),
    "Opus in WebM": ({"sound": "libopus", "form": "webm", "codec": "VP9", "hertz": 48_000}, ROUGH),
    "MP3 in Matroska": ({"sound": "libmp3lame", "form": "matroska", "hertz": 44_100}, ROUGH),
    "FLAC in Matroska": ({"sound": "flac", "form": "matroska"}, EXACT),
    "PCM in Matroska": ({"sound": "pcm_s16le", "form": "matroska"}, EXACT),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_header_says_how_much_there_is_and_it_lies_where_it_was_given(name: str) -> None:
    how, error = WRITTEN[name]
    rng = random.Random(f"{SEED} {name}")
    for k in range(cases(5, 40)):
        hertz = how.get("hertz") or rng.choice([16_000, 44_100, 48_000])
        more: dict[str, Any] = {"channels": rng.choice([1, 2]), "seconds": rng.uniform(0.3, 3), "seed": k}
        late = rng.choice([0, rng.randrange(100) / 100])  # times are rounded to ms
        given = tones(more["channels"], hertz, more["seconds"], k).mean(axis=0)
        data = video(**how | {"hertz": hertz, "late": late}, **more)
        length, rate = sound_size(data) or (0, 0)
        begin = round(late * hertz)
        assert rate == hertz
        if "Matroska" in name or name in ("MP3", "Opus in WebM"):  # to a packet
            assert abs(length - begin - given.size) < 0.13 * hertz
        else:
            assert abs(length - begin - given.size) <= (0.002 * hertz if late else 0)
        found = decoded_track(data, length, rate, 1 << 40)
        assert found.size == length and not found[: max(begin - 2000, 0)].any()
        slack = round(0.002 * hertz) if late else 0  # edit lists are in ms
        both = min(length - begin, given.size) - slack
        off = [
            np.abs(found[begin + lag :][:both] - given[:both]).mean()
            for lag in range(-slack, slack + 1)
            if begin + lag >= 0
        ]
        assert min(off) < error
        first = decoded_audio(data, length, rate, 3000)
        assert np.array_equal(first, found[:3000])


def test_a_video_without_sound_has_none() -> None:
    assert sound_size(video()) is None is sound_size(video(form="matroska")) is sound_size(b"GIF89a")
    with pytest.raises(PartError, match="a video of no sound, and the index says 9 at 16000 Hz"):
        decoded_track(video(), 9, 16_000, 9)


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_what_is_cut_off_or_contradicts_the_index_is_refused_by_name(form: str) -> None:
    data = video(sound="aac", form=form, seconds=2.0, frames=3)
    length, rate = sound_size(data) or (0, 0)
    for other, said in (
        ((length + 1, rate), "samples at 16000 Hz, and the index says"),
        ((length, 8000), "at 8000 Hz"),
    ):
        with pytest.raises(PartError, match=said):
            decoded_track(data, *other, 9)
    with pytest.raises(PartError, match="cut off"):
        sound_size(data[: len(data) * 2 // 3])
    # nothing of it but its header is sound any more
    at = data.index(b"mdat") + 8 if form == "mp4" else data.index(b"\x1f\x43\xb6\x75") + 40
    stop = data.index(b"moov") - 4 if form == "mp4" else len(data) - 600
    silent = data[:at] + bytes(stop - at) + data[stop:]
    with pytest.raises(PartError, match=r"video (whose|that|with)"):
        decoded_track(silent, *(sound_size(silent) or (length, rate)), 1 << 40)


def trak(
    elst: bytes | None = None,
    *,
    form: bytes = b"mp4a",
    scale: int = 16_000,
    ticks: int = 9000,
    rate: int = 16_000,
) -> bytes:
    """A sound track of MP4 of two packets."""
    entry = bytes(6) + b"\0\1" + bytes(8) + b"\0\1\0\x10" + bytes(4) + words(rate << 16)
    stbl = box(
        b"stbl",
        box(b"stsd", words(0, 1), box(form, entry)),
        box(b"stts", words(0, 1, 2, ticks)),
    )
    mdia = box(
        b"mdia",
        box(b"mdhd", words(0, 0, 0, scale, 0, 0)),
        box(b"hdlr", words(0, 0), b"soun", bytes(13)),
        box(b"minf", stbl),
    )
    edts = () if elst is None else (box(b"edts", box(b"elst", elst)),)
    return box(b"trak", box(b"tkhd", words(7, 0, 0, 2, 0, 16)), *edts, mdia)


def test_edit_lists_delay_and_cut() -> None:
    whole = 18_000  # ticks, and samples; 1000 ticks of the movie are a second
    for elst, length in (
        (None, whole),
        (words(0, 1, 0, 1000, 1 << 16), whole - 1000),
        (words(0, 1, 500, 1000, 1 << 16), 8000),
        (words(0, 2, 250, -1, 1 << 16, 500, 0, 1 << 16), 12_000),
        (words(0, 2, 250, -1, 1 << 16, 0, 0, 1 << 16), whole + 4000),
    ):
        assert sound_size(mp4(more=[trak(elst)])) == (length, 16_000)
    assert sound_size(mp4(more=[trak(rate=0, scale=48_000)])) == (whole, 48_000)
    assert sound_size(mp4(more=[trak(rate=8_000)])) == (whole // 2, 8_000)
    for wrong, said in (
        (trak(words(0, 2, 250, 0, 1 << 16, 500, 9, 1 << 16)), "edit list that leaves out or repeats sound"),
        (trak(words(0, 1, 250, 0, 1 << 15)), "edit list that leaves out or repeats sound"),
        (trak(words(0, 1, 0, 99_999, 1 << 16)), "sound of 0 samples"),
        (trak(form=b"enca"), "sound is encrypted"),
        (trak(rate=0, scale=600), "at 600 Hz"),
        (trak(ticks=(1 << 32) - 1, scale=1, rate=48_000), "sound of .* samples at 48000 Hz"),
    ):
        with pytest.raises(PartError, match=said):
            sound_size(mp4(more=[wrong]))


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_damaged_bytes_are_told_and_nothing_else(form: str) -> None:
    data = video(sound="aac", form=form, seconds=0.6, frames=4)
    rng = random.Random(SEED)
    for _ in range(cases(150, 5000)):
        some = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            some[rng.randrange(len(some))] = rng.randrange(256)
        try:
            size = sound_size(bytes(some))
            if size is not None:
                found = decoded_track(bytes(some), *size, 20_000)
                assert found.size == min(size[0], 20_000)
        except PartError as error:
            assert str(error)
