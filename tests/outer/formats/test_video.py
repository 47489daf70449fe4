"""Headers of MP4 and MOV against a whole decoding by PyAV; frames that are wanted; and what hostile files are refused for."""

from __future__ import annotations

import contextlib
import io
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.error import FFmpegError
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import PartError
from meshfeed.formats.matroska import is_matroska
from meshfeed.formats.video import VideoHeader, decoded_frames, is_mp4, read_header, video_header
from soak import SEED, cases
from videos import CODECS, IDENTITY, UNEVEN, all_frames, box, mp4, video, words

FRAGMENTS = "frag_keyframe+empty_moov+default_base_moof"
WRITTEN: dict[str, dict[str, Any]] = {
    **{codec: {"codec": codec} for codec in CODECS},
    "MOV with sound": {"form": "mov", "sound": True},
    "30000/1001": {"rate": Fraction(30000, 1001)},
    "uneven": {"times": UNEVEN},
    "fragments": {"flags": FRAGMENTS},
    "fragments with sound": {"flags": "frag_keyframe+empty_moov", "sound": True},
    "fragments after frames": {"flags": "frag_keyframe"},
    "fragments with an edit list": {"flags": "frag_keyframe+delay_moov"},
    "WebM": {"form": "webm", "codec": "VP9"},
    "WebM of AV1": {"form": "webm", "codec": "AV1"},
    "Matroska with sound": {"form": "matroska", "sound": True},
    "Matroska of 30000/1001": {"form": "matroska", "codec": "MPEG-4", "rate": Fraction(30000, 1001)},
    "Matroska, uneven": {"form": "matroska", "times": UNEVEN},
}


def counted(data: bytes) -> tuple[VideoHeader, int]:
    """The header, and how many bytes were read for it; 0 where all are given."""
    if is_matroska(data):
        return video_header(data), 0
    read = 0

    def ranged(begin: int, end: int) -> bytes:
        nonlocal read
        read += len(data[begin:end])
        return data[begin:end]

    return read_header(ranged, len(data)), read


@pytest.mark.parametrize("name", WRITTEN)
def test_a_header_says_what_decoding_gives(name: str) -> None:
    data = video(**WRITTEN[name])
    rate, frames = all_frames(data)
    header, read = counted(data)
    assert is_mp4(data) != is_matroska(data) and read < 4000
    assert (header.frames, header.height, header.width) == (len(frames), *frames[0].shape[:2]) == (16, 48, 64)
    if name == "Matroska, uneven":
        rate = 15 / 1.4  # FFmpeg tells how finely times are told
    assert header.rate == pytest.approx(rate, rel=1e-12) and header.seconds == pytest.approx(16 / rate)
    assert header.is_variable == ("times" in WRITTEN[name]) and header.has_sound == ("sound" in WRITTEN[name])
    assert header.turns == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_wanted_frames_are_those_of_a_whole_decoding(name: str) -> None:
    data = video(**WRITTEN[name])
    _, frames = all_frames(data)
    rng = np.random.default_rng(SEED)
    wanted = [[0], [15], [6, 7, 8], [*range(16)]]
    wanted += [np.flatnonzero(rng.random(16) < share).tolist() for share in (0.1, 0.2, 0.5)]
    for numbers in wanted:
        found = list(decoded_frames(data, numbers))
        assert len(found) == len(numbers)
        for number, frame in zip(numbers, found):
            assert np.array_equal(frame, frames[number]), number


def test_frames_that_no_wanted_one_needs_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = decoded = 0
    skipping = set[str]()

    class Counting:
        def __init__(self, codec: Any) -> None:
            self._codec = codec

        def __getattr__(self, name: str) -> Any:
            return getattr(self._codec, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "skip_frame":
                skipping.add(value)
            (super().__setattr__ if name == "_codec" else partial(setattr, self._codec))(name, value)

        def decode(self, packet: Any) -> Any:
            nonlocal fed, decoded
            made = self._codec.decode(packet)
            fed, decoded = fed + (packet is not None), decoded + len(made)
            return made

    class Stream:
        def __init__(self, stream: Any) -> None:
            self.codec_context, self.disposition = Counting(stream.codec_context), stream.disposition

    plain, with_b_frames, opened = video(frames=70, codec="H.264"), video(frames=70), av.open

    class Container:
        def __init__(self, *given: Any, **named: Any) -> None:
            self._container: Any = opened(*given, **named)

        def demux(self, stream: Any) -> Any:
            return self._container.demux(self._container.streams.video[0])

        def __enter__(self) -> Any:
            self.streams = type("S", (), {"video": [Stream(self._container.streams.video[0])]})
            return self

        def __exit__(self, *_: object) -> None:
            self._container.close()

    monkeypatch.setattr(av, "open", Container)
    assert len(list(decoded_frames(plain, [1, 36]))) == 2
    assert decoded <= fed < 3 * 7  # a keyframe every 7 frames, and the others all need the one before
    fed = decoded = 0
    assert len(list(decoded_frames(with_b_frames, [*range(6, 70, 7)]))) == 10
    assert decoded < 0.8 * fed  # half of those between keyframes are needed by no other
    assert "NONREF" in skipping
    skipping.clear()
    assert len(list(decoded_frames(video(codec="H.265"), [1, 15]))) == 2
    assert not skipping  # what H.265 calls NONREF may be needed by frames of its own sublayer


def test_the_header_may_come_first(tmp_path: Path) -> None:
    data = video()
    with (
        av.open(io.BytesIO(data), "r") as source,
        av.open(str(tmp_path / "x.mp4"), "w", options={"movflags": "faststart"}) as to,
    ):
        stream = to.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                to.mux(packet)
    other = (tmp_path / "x.mp4").read_bytes()
    assert other.index(b"moov") < other.index(b"mdat") and data.index(b"mdat") < data.index(b"moov")
    assert video_header(other) == video_header(data)


TURNED = {1: (0, 1, -1, 0), 2: (-1, 0, 0, -1), 3: (0, -1, 1, 0)}


@pytest.mark.parametrize("turns", TURNED)
def test_a_turned_video_is_as_displayed(turns: int) -> None:
    data = video()
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (each << 16 for each in TURNED[turns])
    turned = data[:at] + words(a, b, 0, c, d) + data[at + 20 :]
    header = video_header(turned)
    assert (header.height, header.width, header.turns) == ((64, 48) if turns % 2 else (48, 64)) + (turns,)
    with av.open(io.BytesIO(turned), "r") as container:
        frame = next(container.decode(video=0))
        clockwise = -frame.rotation % 360  # type: ignore[attr-defined]
        assert clockwise == 90 * turns
    _, frames = all_frames(data)
    assert np.array_equal(next(decoded_frames(turned, [0])), np.rot90(frames[0], -turns))


def test_the_turn_of_a_whole_movie_counts_too() -> None:
    data = video()
    at = data.index(b"mvhd") + 4 + 36
    turned = data[:at] + words(0, 1 << 16, 0, -1 << 16, 0) + data[at + 20 :]
    header = video_header(turned)
    assert (header.height, header.width, header.turns) == (64, 48, 1)
    with av.open(io.BytesIO(turned), "r") as container:
        assert next(container.decode(video=0)).rotation == -90  # type: ignore[attr-defined]
    wanted = np.rot90(all_frames(data)[1][0], -1)
    assert np.array_equal(next(decoded_frames(turned, [0])), wanted)
    at = data.index(b"tkhd") + 4 + 40
    both = turned[:at] + words(0, -1 << 16, 0, 1 << 16, 0) + turned[at + 20 :]
    assert video_header(both) == video_header(data)


@pytest.mark.parametrize("codec", CODECS)
def test_frames_that_are_wrongly_said_to_be_keyframes_are_not_believed(codec: str) -> None:
    """Without stss, every frame is said to be one."""
    data = video(codec=codec, frames=30)
    _, whole = all_frames(data)
    lying = data.replace(b"stss", b"free")
    assert lying != data
    for numbers in ([3], [11], [17, 18], [2, 16, 29]):
        found = list(decoded_frames(lying, numbers))
        assert all(map(np.array_equal, found, [whole[number] for number in numbers])), numbers


def test_a_cover_is_no_frame() -> None:
    data = video()
    png = b"\x89PNG\r\n\x1a\n" + bytes(50)
    meta = (
        box(b"hdlr", words(0, 0), b"mdirappl", bytes(9)),
        box(b"ilst", box(b"covr", box(b"data", words(14, 0), png))),
    )
    udta = box(b"udta", box(b"meta", words(0), *meta))
    at = data.index(b"trak") - 4
    moov = data.index(b"moov") - 4
    size = int.from_bytes(data[moov : moov + 4], "big") + len(udta)
    covered = data[:moov] + words(size) + data[moov + 4 : at] + udta + data[at:]
    with av.open(io.BytesIO(covered), "r") as container:
        assert len(container.streams.video) == 2
    assert all(map(np.array_equal, decoded_frames(covered, [0, 9]), decoded_frames(data, [0, 9])))


def test_damaged_pixels_are_refused_where_the_decoder_sees_them() -> None:
    data, refused = video(height=96, width=128, codec="H.264"), 0
    begin, end = data.index(b"mdat") + 800, data.index(b"moov")
    for at in np.random.default_rng(SEED).integers(begin, end, 40).tolist():
        bad = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        numbers = list(range(16))
        with av.open(io.BytesIO(bad), "r") as container:
            corrupt = True
            with contextlib.suppress(FFmpegError):
                corrupt = any(each.is_corrupt for each in container.decode(video=0))
        if corrupt:
            refused += 1
            with pytest.raises(PartError, match="cannot be decoded"):
                list(decoded_frames(bad, numbers))
    assert refused > 5


def test_a_header_that_nobody_wrote_is_read() -> None:
    assert video_header(mp4()) == VideoHeader(48, 64, 16, 10.0, False, 0, False)
    uneven = mp4(stts=words(0, 3, 14, 1, 1, 5, 1, 1))
    assert video_header(uneven) == VideoHeader(48, 64, 16, 16 * 10 / 20, True, 0, False)
    rounded = mp4(stts=words(0, 3, 10, 33, 5, 34, 1, 99), scale=1000)  # the last frame may stay
    assert not video_header(rounded).is_variable
    waits = mp4(elst=words(0, 2, 500, -1, 1 << 16, 1600, 0, 1 << 16))
    assert video_header(waits).frames == 16


def fragment(*truns: bytes, tfhd: bytes = words(0x020000, 1)) -> bytes:
    return box(b"moof", box(b"mfhd", words(0, 1)), box(b"traf", box(b"tfhd", tfhd), *truns))


def cut_behind(data: bytes, name: bytes) -> bytes:
    """What is there up to the end of the last box of a name."""
    at = data.rindex(name) - 4
    return data[: at + int.from_bytes(data[at : at + 4], "big")]


TREX = box(b"trex", words(0, 1, 1, 2, 1, 0))
OVERLAPPING: dict[str, Any] = {
    "stts": words(0, 1, 99, 1),
    "stsc": words(0, 1, 1, 1, 1),
    "stco": words(0, 99, *[0] * 99),
}
MANY = 1_000_000
REFUSED = {
    "cut in its frames": (video()[:1500], r"cut off or is damaged: box 'mdat' at byte \d+ tells of \d+ bytes, and \d+"),
    "without its header": (video()[: video().index(b"moov") - 4], r"without its header \(moov\): cut off"),
    "no track": (mp4().replace(b"vide", b"text"), "0 video tracks"),
    "two tracks": (mp4(more=[box(b"trak", box(b"mdia", box(b"hdlr", words(0, 0), b"vide", bytes(13))))]), "2 video tracks"),
    "two headers": (mp4() + mp4(), "two headers"),
    "more frames than bytes": (mp4(stts=words(0, 1, MANY, 1), stsz=words(0, 0, MANY)), "1000000 frames in room for 0"),
    "frames of no byte": (mp4(stts=words(0, 1, -1, 1), stsz=words(0, 1, -1)), "4294967295 frames in room for"),
    "durations of others": (mp4(stts=words(0, 1, 17, 1)), "durations of 17 frames, and 16 frames"),
    "a table larger than its box": (mp4(stts=words(0, MANY, 16, 1)), "tells of 1000000 entries, and has room for 1"),
    "no duration": (mp4(stts=words(0, 1, 16, 0)), "lasts no time"),
    "one frame of no duration": (mp4(stts=words(0, 3, 7, 1, 1, 0, 8, 1)), "a frame that lasts no time"),
    "a frame of no byte": (mp4(stsz=words(0, 0, 16, *[4] * 15, 0)), "a frame of 0 bytes"),
    "cut before its frames": (mp4(stco=words(0, 1, 5000)), r"cut off or is damaged: its frames end at byte 5064, and it has \d+;"),
    "beyond 4 GB": (mp4(stco=words(0, 1, 1, 0)).replace(b"stco", b"co64"), "its frames end at byte 4294967360"),
    "overlapping frames": (mp4(**OVERLAPPING, stsz=words(0, 0, 99, *[900] * 99)), "frames of 89100 bytes in"),
    "no room in chunks": (mp4(stsc=words(0, 1, 1, 15, 1)), "16 frames, and room for fewer"),
    "no chunks": (mp4(stco=words(0, 0)), "room for fewer"),
    "no first chunk": (mp4(stsc=words(0, 1, 2, 16, 1)), "not tell where its frames lie"),
    "sizes of 5 bits": (mp4(sizes=b"stz2", stsz=words(0, 5, 16) + bytes(16)), "sizes of frames in 5 bits"),
    "fragments cut before frames": (cut_behind(video(flags=FRAGMENTS), b"moof"), "its frames end at byte"),
    "a fragment of no byte": (mp4(mvex=[TREX], after=[fragment(box(b"trun", words(0x200, 1, 0)))]), "a frame of 0 bytes"),
    "no frame": (mp4(stts=words(0, 0), stsz=words(0, 0, 0)), "video of 0 frames in"),
    "no scale": (mp4(scale=0), "0 ticks per second"),
    "no size": (mp4(sides=(0, 64)), "64 pixels wide x 0 high"),
    "encrypted": (mp4(form=b"encv"), "encrypted"),
    "mirrored": (mp4(matrix=(-1 << 16, *IDENTITY[1:])), "mirrored"),
    "scaled": (mp4(matrix=(2 << 16, 0, 0, 0, 2 << 16, *IDENTITY[5:])), "mirrored, scaled or slanted"),
    "begins late": (mp4(elst=words(0, 1, 1500, 1, 1 << 16)), "an edit list that leaves out or repeats"),
    "ends early": (mp4(elst=words(0, 1, 1000, 0, 1 << 16)), "an edit list"),
    "twice": (mp4(elst=words(0, 2, 1600, 0, 1 << 16, 1600, 0, 1 << 16)), "an edit list"),
    "slowly": (mp4(elst=words(0, 1, 1600, 0, 1 << 15)), "an edit list"),
    "many edits": (mp4(elst=words(0, 99, *[1600, -1, 1 << 16] * 99)), "an edit list"),
    "many boxes": (mp4(after=[box(b"free") * (1 << 17)]), "more than 131072 boxes"),
    "a size of 64 bits": (mp4(after=[words(1) + b"free" + words(-1, -1)]), "tells of 18446744073709551615 bytes"),
    "a size below its head": (mp4(after=[words(4) + b"free" + bytes(8)]), "tells of 4 bytes"),
    "an endless box": (mp4().replace(mp4()[mp4().index(b"trak") - 4 :][:8], words(0) + b"trak"), "'trak' at byte .* tells of 0 bytes"),
    "fragments of a lie": (mp4(mvex=[TREX], after=[fragment(box(b"trun", words(0x100, MANY, 1)))]), "1000000 frames in"),
    "frames of a fragment": (mp4(mvex=[TREX], after=[fragment(box(b"trun", words(0x100, 300, 1)))]), "tells of 300 entries"),
    "a fragment without a head": (mp4(mvex=[TREX], after=[box(b"moof", box(b"traf"))]), "lacks 'tfhd'"),
    "short": (mp4().replace(b"tkhd", b"free"), "lacks 'tkhd'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_soon(name: str) -> None:
    data, said = REFUSED[name]
    begin = time.process_time()
    with pytest.raises(PartError, match=said):
        video_header(data)
    assert time.process_time() - begin < 3


def test_a_million_frames_that_are_there_are_counted_in_little_memory() -> None:
    """Of unequal lengths, so that their table is as long as it can be."""
    stts = words(0, MANY) + np.tile(np.array([1, 1, 1, 9], ">u4"), MANY // 2).tobytes()
    data = mp4(stts=stts, stsz=words(0, 0, MANY) + words(1) * MANY, stsc=words(0, 1, 1, MANY, 1))
    largest = 0

    def ranged(begin: int, end: int) -> bytes:
        nonlocal largest
        largest = max(largest, end - begin)
        return data[begin:end]

    begin = time.process_time()
    header = read_header(ranged, len(data))
    assert (header.frames, header.rate, header.is_variable) == (MANY, 2.0, True)
    assert largest <= 1 << 16 and time.process_time() - begin < 3


def test_sizes_may_be_short() -> None:
    short = {4: bytes([0x44] * 8), 8: bytes([4] * 16), 16: bytes([0, 4] * 16)}
    for bits, sizes in short.items():
        assert video_header(mp4(sizes=b"stz2", stsz=words(0, bits, 16) + sizes)) == video_header(mp4())


def test_frames_in_each_other_are_refused_also_where_the_header_does_not_tell() -> None:
    """PyAV takes the second table of sizes."""
    second = box(b"stsz", words(0, 0, 99, *[900] * 99))
    data = mp4(**OVERLAPPING, stsz=words(0, 0, 99, *[1] * 99), tables=[second])
    assert video_header(data).frames == 99
    with pytest.raises(PartError, match=r"frames are more than its \d+ bytes"):
        list(decoded_frames(data, [0]))


def test_fragments_add_up() -> None:
    one = fragment(box(b"trun", words(0x100, 2, 4, 5)))  # of their own durations
    other = fragment(box(b"trun", words(0x200, 3, 7, 7, 7)), box(b"trun", words(1, 2, 0)))  # of trex's
    third = fragment(box(b"trun", words(4, 2, 0)), tfhd=words(0x02000B, 1, 0, 0, 1, 6))  # of the fragment's
    foreign = fragment(box(b"trun", words(0x100, 1, 4)), tfhd=words(0, 2))
    header = video_header(mp4(mvex=[TREX], after=[one, other, third, foreign]))
    assert header.frames == 16 + 2 + 5 + 2
    assert header.rate == pytest.approx(25 * 10 / (16 + 9 + 10 + 12))


def test_what_is_no_box_may_stand_behind_the_last_one() -> None:
    data, behind = video(), b"TAG of a camera, \xff\xfe"
    assert video_header(data + behind) == video_header(data)
    assert all(map(np.array_equal, decoded_frames(data + behind, [0, 15]), decoded_frames(data, [0, 15])))
    for refused in (data + box(b"mdat", bytes(9))[:-1], video(flags=FRAGMENTS) + behind):
        with pytest.raises(PartError, match="cut off or is damaged"):  # or a fragment might lack
            video_header(refused)


def test_words_about_a_video_may_be_in_any_encoding() -> None:
    data = video()
    at = data.rindex(b"Lavf")
    frames = decoded_frames(data[:at] + b"\xe9\xff" + data[at + 2 :], [0, 1])
    assert all(map(np.array_equal, frames, all_frames(data)[1]))


@settings(max_examples=cases(60, 2000), deadline=None)
@given(st.sampled_from(sorted(WRITTEN)), st.data())
def test_a_damaged_file_is_a_video_or_is_refused(name: str, data: st.DataObject) -> None:
    """Never another error; what is read of it grows with the file alone, and so do the frames that it has."""
    bad = bytearray(video(**WRITTEN[name]))
    moov = 4 if is_matroska(bad) else bad.index(b"moov")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(moov - 4, len(bad) - 1) | st.integers(0, len(bad) - 1))
        what = data.draw(
            st.binary(min_size=1, max_size=4)
            | st.sampled_from([words(0), words(1), words(-1), words(1 << 31)])
        )
        bad[at : at + len(what)] = what
    cut = bytes(bad[: data.draw(st.just(len(bad)) | st.integers(0, len(bad)))])
    try:
        header, read = counted(cut)
    except PartError:
        return
    assert read <= 4 * len(cut) and 0 < header.frames <= len(cut) and 0 < header.rate < float("inf")
    numbers = sorted({0, header.frames // 2, header.frames - 1})
    try:
        found = list(decoded_frames(cut, numbers))
    except PartError:
        return
    assert [frame.shape for frame in found] == [(header.height, header.width, 3)] * len(numbers)


def test_a_header_that_decoding_contradicts_is_refused() -> None:
    data = video()
    at = data.index(b"stsd") + 8 + 4 + 32  # width and height
    larger = data[:at] + (4096).to_bytes(2, "big") * 2 + data[at + 4 :]
    assert (video_header(larger).height, video_header(larger).width) == (4096, 4096)
    with pytest.raises(PartError, match="a frame 64 x 48, and its header says 4096 x 4096"):
        list(decoded_frames(larger, [0]))
    smaller = data[:at] + (2).to_bytes(2, "big") * 2 + data[at + 4 :]
    with pytest.raises(PartError, match="a frame 64 x 48, and its header says 2 x 2"):
        list(decoded_frames(smaller, [0]))
    with pytest.raises(PartError, match=r"video of 0 frames|cannot be decoded"):
        list(decoded_frames(mp4(), [0]))


# -- Matroska and WebM ------------------------------------------------------------------------------------


def element(name: int, *bodies: bytes, size: bytes = b"") -> bytes:
    """An element of bodies. size: as written, where it is another."""
    body = b"".join(bodies)
    return (
        name.to_bytes((name.bit_length() + 7) // 8, "big")
        + (size or (1 << 56 | len(body)).to_bytes(8, "big"))
        + body
    )


UNKNOWN = b"\x01" + b"\xff" * 7  # a size that was not known when it was written


def track(*more: bytes, kind: int = 1, number: int = 1) -> bytes:
    sides = element(0xE0, element(0xB0, b"\x40"), element(0xBA, b"\x30"), *more)
    return element(0xAE, element(0xD7, bytes([number])), element(0x83, bytes([kind])), sides)


def block(time: int, flags: int = 0x80, number: int = 1, frame: bytes = b"\x10") -> bytes:
    head = bytes([0x80 | number]), time.to_bytes(2, "big", signed=True), bytes([flags])
    return element(0xA3, *head, frame)


def in_track(*elements: bytes) -> bytes:
    return element(0xAE, track()[9:], *elements)


def matroska(
    *tracks: bytes, clusters: list[bytes] | None = None, size: bytes = b"", scale: int = 1_000_000
) -> bytes:
    """16 frames of nothing, ten a second, in two clusters."""
    if clusters is None:
        clusters = [
            element(
                0x1F43B675,
                element(0xE7, time.to_bytes(2, "big")),
                *(block(100 * k) for k in range(8)),
                size=size,
            )
            for time in (0, 800)
        ]
    info = element(0x1549A966, element(0x2AD7B1, scale.to_bytes(4, "big")))
    told = element(0x1654AE6B, *(tracks or (track(),)))
    return element(0x1A45DFA3, b"") + element(0x18538067, info, told, *clusters, size=size)


def test_matroska_is_counted_block_by_block() -> None:
    wanted = VideoHeader(48, 64, 16, 10.0, False, 0, False)
    assert video_header(matroska()) == video_header(matroska(size=UNKNOWN)) == wanted
    grouped = matroska(
        clusters=[element(0x1F43B675, element(0xA0, element(0xA1, block(k)[9:]))) for k in (0, 100, 150)]
    )
    assert video_header(grouped) == VideoHeader(48, 64, 3, 2 / 0.15, True, 0, False)
    assert video_header(matroska(track(), track(kind=2, number=2))).has_sound
    for name, other in {0x23314F: b"\x3f\x80\0\0", 0x86: b"V_VP8\0"}.items():
        assert video_header(matroska(in_track(element(name, other)))) == wanted
    other_track = [block(-1, number=2, frame=b""), *(block(100 * k) for k in range(16))]
    assert video_header(matroska(clusters=other_track)) == wanted


def test_other_bytes_may_stand_behind_the_last_segment() -> None:
    data, padding = video(**WRITTEN["WebM"]), bytes(4096)
    assert video_header(data + padding) == video_header(data)
    assert all(map(np.array_equal, decoded_frames(data + padding, [0, 15]), decoded_frames(data, [0, 15])))
    with pytest.raises(PartError, match="cut off or is damaged"):  # FFmpeg would find more frames
        video_header(data + padding + data)


@pytest.mark.parametrize(
    ("scale", "lasts", "step", "rate"),
    [
        (1_000_000, 33_366_667, 33, 30000 / 1001),
        (1_000_000, 4_000_000_000_000, 4000, 0.25),  # it lies, or the clock does
        (10**9, 40_000_000, 1, 1.0),
        (10**9, 3_000_000_000_000, 3000, 1 / 3000),
        (10**9, 1_500_000_000_000, 1500, 1 / 1500),
        ((1 << 32) - 1, 40_000_000, 1, 10**9 / ((1 << 32) - 1)),
    ],
)
def test_how_long_a_frame_lasts_is_believed_where_times_confirm_it(
    scale: int, lasts: int, step: int, rate: float
) -> None:
    frames = [block(0), block(step)]
    told = in_track(element(0x23E383, lasts.to_bytes(8, "big")))
    assert video_header(matroska(told, clusters=frames, scale=scale)).rate == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (matroska(track(), track(number=2)), "2 video tracks.*-map"),
        (matroska(track(kind=17)), "0 video tracks"),
        (matroska(track(kind=2)), "sound alone.*FILE OUT.flac"),
        (matroska(track(element(0x54AA, b"\2"))), "cropped.*convert"),
        (matroska(track(element(0x7670, element(0x7675, b"\x42\xb4\0\0")))), "turned.*convert"),
        (matroska(in_track(element(0x6D80, b"\1"))), "encrypted.*convert"),
        (matroska(in_track(element(0x23314F, b"\x40\0\0\0"))), "TrackTimestampScale other than 1.*convert"),
        (matroska(in_track(element(0x86, b"V_VP8" + bytes(9))), clusters=[block(0), block(1, frame=b"\0")]), "differ in number"),
        (matroska(clusters=[block(-100), block(0)]), "before time 0.*convert"),
        (matroska(clusters=[block(0), block(100, 0x82), block(200)]), "differ in number.*convert"),
        (matroska(clusters=[block(0), block(0)]), "last no time.*convert"),
        (matroska(clusters=[block(0)]), "a video of one frame; give it as an image"),
        (matroska(clusters=[]), "a video of no frame; give it as an image"),
        (matroska(scale=0), "last no time"),
        (matroska(clusters=[block(0, frame=b""), block(1)]), "0 bytes"),
        (matroska() + matroska()[:-3], "cut off.*get the whole file"),
        (matroska(element(0xAE, element(0xD7, b"\1"), element(0x83, b"\1"))), "0 pixels wide x 0 high"),
        (matroska(clusters=[block(0)] * (1 << 20)), "more than 1048576 elements"),
        (matroska()[:-3], "cut off.*get the whole file"),
        (matroska()[:5], "cut off"),
    ],
)  # fmt: skip
def test_matroska_that_is_refused_is_named_soon(data: bytes, said: str) -> None:
    began = time.process_time()
    with pytest.raises(PartError, match=said):
        video_header(data)
    assert time.process_time() - began < 20


def test_lying_matroska_is_refused_when_it_is_decoded() -> None:
    data = video(**WRITTEN["WebM"])
    at = data.index(b"\xb0\x81\x40")  # 64 pixels wide
    for lying in (data[: at + 2] + b"\x50" + data[at + 3 :], matroska()):
        assert video_header(lying).frames == 16
        with pytest.raises(PartError):
            list(decoded_frames(lying, [0, 15]))


def test_frames_whose_times_do_not_tell_their_order_are_refused() -> None:
    data = video(form="matroska")
    header, at = video_header(data), data.rindex(b"\x81" + (1500).to_bytes(2, "big"))
    for moved in (1400, -1):
        wrong = data[: at + 1] + moved.to_bytes(2, "big", signed=True) + data[at + 3 :]
        with pytest.raises(PartError, match="no time, or two at one time; convert"):
            list(decoded_frames(wrong, [0], header))
