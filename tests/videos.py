"""Small videos, written by PyAV when they are asked for; and the boxes of MP4, for what no writer makes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Frame = npt.NDArray[np.uint8]

CODECS: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "H.264": ("libx264", (("g", "7"), ("bf", "0"))),
    "H.264 with B-frames": ("libx264", (("g", "7"), ("bf", "3"))),
    "H.264 with open groups": ("libx264", (("g", "7"), ("bf", "3"), ("x264-params", "open-gop=1"))),
    "H.265": ("libx265", (("x265-params", "log-level=none:keyint=6"),)),
    "MPEG-4": ("mpeg4", (("g", "5"), ("bf", "2"))),
    "VP9": ("libvpx-vp9", (("g", "6"),)),
    "AV1": ("libsvtav1", (("preset", "12"), ("g", "6"))),
}
"""Name -> encoder and its options. That of H.265 spoils its own memory at some sizes below its blocks of 64."""
UNEVEN = (0, 30, 100, 400, 410, 500, 900, 1000, 1010, 1020, 1030, 1040, 1100, 1200, 1300, 1400)
"""Times of frames in ms, for a variable rate."""


@cache
def video(
    height: int = 48,
    width: int = 64,
    frames: int = 16,
    rate: float | Fraction = 10,
    codec: str = "H.264 with B-frames",
    *,
    form: str = "mp4",
    flags: str = "",
    times: Sequence[int] | None = None,
    sound: bool | str = False,
    hertz: int = 16_000,
    channels: int = 1,
    seconds: float = 0.5,
    late: float = 0,
    seed: int = 0,
) -> bytes:
    """Squares that move. times: of each frame in ms. flags: movflags of FFmpeg's writer.

    sound: silence, or what `tones` says by that codec; of so many hertz, channels and seconds, after `late` seconds.

    Another process may get other bytes, and other pixels: libx264 takes what lies beside small frames in memory, too.
    """
    encoder, options = CODECS[codec]
    squares = np.random.default_rng((seed, height, width)).integers(0, 256, (4, 4, 3), np.uint8)
    out = io.BytesIO()
    with av.open(out, "w", format=form, options={"movflags": flags} if flags else {}) as container:
        stream: Any = container.add_stream(
            encoder, rate=1000 if times else Fraction(rate).limit_denominator()
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = dict(options)
        layout, codec = ("mono", "stereo")[channels - 1], sound if isinstance(sound, str) else "aac"
        heard: Any = container.add_stream(codec, rate=hertz, layout=layout) if sound else None
        for i in range(frames):
            moved = np.roll(squares, i, axis=i % 2)
            scaled = np.kron(moved, np.ones((-(-height // 4), -(-width // 4), 1), np.uint8))[:height, :width]
            scaled[: height // 8, : width // 8] = 12 * i % 256
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(scaled), format="rgb24")
            if times:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if heard is not None:
            samples = tones(channels, hertz, seconds, seed)
            given: Any = av.AudioFrame.from_ndarray(
                samples if isinstance(sound, str) else 0 * samples, "fltp", layout
            )
            given.rate, given.pts, given.time_base = hertz, 0, Fraction(1, hertz)
            fifo = av.AudioFifo()
            for each in av.AudioResampler(heard.format.name, layout, hertz).resample(given):
                fifo.write(each)
            some: list[Any] = []
            while (each := fifo.read(heard.codec_context.frame_size or 1024, partial=True)) is not None:
                some += heard.encode(each)
            for packet in (*some, *heard.encode(None)):
                packet.pts += round(late / packet.time_base)
                packet.dts += round(late / packet.time_base)
                container.mux(packet)
    return out.getvalue()


def tones(channels: int, hertz: int, seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Tones that begin and end all the time, others in each channel; float32 [channels, samples]."""
    rng, time = np.random.default_rng((seed, channels)), np.arange(int(seconds * hertz)) / hertz
    at, loud = (time * 9).astype(int), rng.uniform(0, 0.4, (channels, 2000))
    made = loud[:, at] * np.sin(2 * np.pi * rng.uniform(200, 1500, (channels, 2000))[:, at] * time)
    return np.ascontiguousarray(made, np.float32)


def all_frames(data: bytes) -> tuple[float, list[Frame]]:
    """(frames per second, every frame) by PyAV, decoded from the first to the last; the turn is not made."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        return float(stream.average_rate or 0), [
            each.to_ndarray(format="rgb24") for each in container.decode(stream)
        ]  # type: ignore[misc]


# -- boxes ------------------------------------------------------------------------------------------------


def box(name: bytes, *bodies: bytes) -> bytes:
    """A box of bodies."""
    body = b"".join(bodies)
    return (8 + len(body)).to_bytes(4, "big") + name + body


def words(*values: int) -> bytes:
    """Numbers of 32 bits."""
    return b"".join((each % (1 << 32)).to_bytes(4, "big") for each in values)


IDENTITY = (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def mp4(
    *,
    stts: bytes | None = None,
    stsz: bytes | None = None,
    stsc: bytes = words(0, 1, 1, 16, 1),
    stco: bytes = words(0, 1, 0),
    sizes: bytes = b"stsz",
    elst: bytes | None = None,
    matrix: Sequence[int] = IDENTITY,
    sides: tuple[int, int] = (48, 64),
    scale: int = 10,
    form: bytes = b"avc1",
    tables: Sequence[bytes] = (),
    more: Sequence[bytes] = (),
    mvex: Sequence[bytes] = (),
    after: Sequence[bytes] = (),
) -> bytes:
    """An MP4 of 16 frames whose header is as given; its frames are bytes of nothing.

    stts, stsz, stsc, stco, elst: bodies of these boxes. sizes: name of the box of stsz. sides: (height, width). tables: in stbl. more: in moov. after: behind it.
    """
    entry = (
        bytes(6) + b"\0\1" + bytes(16) + sides[1].to_bytes(2, "big") + sides[0].to_bytes(2, "big") + bytes(50)
    )
    stbl = box(
        b"stbl",
        box(b"stsd", words(0, 1), box(form, entry)),
        box(b"stts", words(0, 1, 16, 1) if stts is None else stts),
        box(b"stsc", stsc),
        box(b"stco", stco),
        box(sizes, words(0, 0, 16, *[4] * 16) if stsz is None else stsz),
        *tables,
    )
    mdia = box(
        b"mdia",
        box(b"mdhd", words(0, 0, 0, scale, 16, 0)),
        box(b"hdlr", words(0, 0), b"vide", bytes(13)),
        box(b"minf", stbl),
    )
    tkhd = box(b"tkhd", words(7, 0, 0, 1, 0, 16, 0, 0, 0, 0, *matrix, sides[1] << 16, sides[0] << 16))
    edts = () if elst is None else (box(b"edts", box(b"elst", elst)),)
    fragments = (box(b"mvex", *mvex),) if mvex else ()
    moov = box(
        b"moov",
        box(b"mvhd", words(0, 0, 0, 1000, 1600, 1 << 16, 0, 0, 0, *IDENTITY, *[0] * 7)),
        box(b"trak", tkhd, *edts, mdia),
        *fragments,
        *more,
    )
    return box(b"ftyp", b"isom", bytes(4), b"isom") + moov + box(b"mdat", bytes(64)) + b"".join(after)
