"""Stored video: the header of MP4 and MOV by its boxes, frames by PyAV, of the extra "video".

The header is read by ranges, since `moov` may be anywhere: the first bytes of a box say how long it is, so
that frames are passed over. ISO/IEC 14496-12 has the boxes. What they say is checked against the bytes that
are there: neither memory nor time depends on what a header claims.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from meshfeed.arrays import Bytes, Longs
from meshfeed.errors import PartError
from meshfeed.extras import install
from meshfeed.formats.matroska import is_matroska, matroska_header, matroska_sound
from meshfeed.formats.video_header import CONVERT, VideoHeader

Read = Callable[[int, int], bytes]
"""The bytes begin..end of a file."""
Frame = Bytes

_BEGINS = (b"ftyp", b"styp", b"moov", b"mdat", b"moof", b"sidx", b"wide", b"free", b"skip", b"uuid", b"pnot")
_MOST_BOXES = 1 << 17  # of a file, also of one in fragments of a second over a day
_CHUNK_BYTES = 1 << 16
_UNITY = 1 << 16  # 1 in fixed point
LEAST_HZ, _MOST_HZ = 4_000, 768_000  # of sound
_MOST_SOUND_S = 1 << 20
_TURNS = {
    (_UNITY, 0, 0, _UNITY): 0,
    (0, _UNITY, -_UNITY, 0): 1,
    (-_UNITY, 0, 0, -_UNITY): 2,
    (0, -_UNITY, _UNITY, 0): 3,
}
_SKIPPING = ("h264", "mpeg4")  # may leave out one frame; AV1 would all behind it, H.265 some that others need
_AROUND_PIXELS = 256  # that codecs add to a side, at most


def is_mp4(data: bytes) -> bool:
    """Whether a file begins as MP4 or MOV. So do images in ISO boxes and sound: see `brands_of`."""
    return data[4:8] in _BEGINS


def video_header(data: bytes) -> VideoHeader:
    """The header of MP4, MOV, Matroska or WebM. Raises PartError as `read_header`, and for other files."""
    if is_matroska(data):
        return matroska_header(data)
    if not is_mp4(data):
        raise PartError(f"not MP4, MOV, Matroska or WebM video; {CONVERT}")
    return read_header(lambda begin, end: data[begin:end], len(data))


def read_header(read: Read, size_bytes: int) -> VideoHeader:
    """The header of an MP4 or MOV, some kB of it; also of one in fragments.

    Raises PartError for a file that was cut off, is damaged, contradicts itself, or is of a kind that is not
    read.
    """
    return _movie(read, size_bytes).header()


def sound_size(data: bytes) -> tuple[int, int] | None:
    """Samples of a channel and samples per second of a video's sound track; None for a video without one.

    From the header: the sound on the timeline of the video, from time 0 until the track ends, of Matroska to
    about a packet. Of several tracks, the first. `decoded_track` gives as many. Raises PartError for a file
    that was cut off or is damaged, and for sound of a kind that is not read.
    """
    found = matroska_sound(data) if is_matroska(data) else None
    if is_mp4(data):
        found = _movie(lambda begin, end: data[begin:end], len(data)).sound()
    if found is None:
        return None
    length, rate = found
    if not (0 < length < _MOST_SOUND_S * rate and LEAST_HZ <= rate <= _MOST_HZ):
        raise PartError(f"video with sound of {length} samples at {rate} Hz; {CONVERT}")
    return found


def _movie(read: Read, size_bytes: int) -> _Movie:
    boxes = _Boxes(read)
    moov, moofs = None, list[_Box]()
    try:
        for box in boxes.within(_Box(b"", 0, size_bytes)):
            if box.name == b"moov":
                if moov is not None:
                    raise PartError(f"video with two headers; {CONVERT}")
                moov = box
            elif box.name == b"moof":
                moofs.append(box)
    except _NoBox:  # all frames without fragments are known to be there, whatever is behind them
        if moov is None or moofs or boxes.inside(moov, b"mvex") is not None:
            raise
    if moov is None:
        raise PartError(
            "video without its header (moov): cut off, or still being written; get the whole file"
        )
    return _Movie(boxes, moov, moofs, size_bytes)


class _NoBox(PartError):
    """What stands behind the last box is of no kind that is known, and would end beyond the file."""


class _Box(NamedTuple):
    """A box: its name, where its body lies, and where the box begins."""

    name: bytes
    begin: int
    end: int
    at: int = 0

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(slots=True)
class _Boxes:
    """Boxes of a file, a bounded number of them."""

    read: Read
    left: int = _MOST_BOXES

    def within(self, outer: _Box) -> Iterator[_Box]:
        """The boxes in another one, in order. Raises PartError for one that ends beyond it."""
        at = outer.begin
        while at + 8 <= outer.end:
            self.left -= 1
            if self.left < 0:
                raise PartError(f"video of more than {_MOST_BOXES} boxes; {CONVERT}")
            head = self.read(at, min(at + 16, outer.end))
            size, body = int.from_bytes(head[:4], "big"), at + 8
            if size == 0 and not outer.name:  # to the end of the file
                size = outer.end - at
            elif size == 1:
                size, body = int.from_bytes(head[8:16], "big"), at + 16
            if not body - at <= size <= outer.end - at:
                kind = PartError if outer.name or head[4:8] in _BEGINS else _NoBox
                raise kind(
                    f"video that was cut off or is damaged: box {_shown(head[4:8])} at byte {at} tells of "
                    f"{size} bytes, and {outer.end - at} are there; get the whole file"
                )
            yield _Box(head[4:8], body, at + size, at)
            at += size

    def inside(self, outer: _Box, *names: bytes) -> _Box | None:
        """The first box of a path of names in another one; None without it."""
        found: _Box | None = outer
        for name in names:
            found = None if found is None else next((b for b in self.within(found) if b.name == name), None)
        return found

    def body(self, box: _Box, size: int) -> bytes:
        """The first bytes of a box's body. Raises PartError for a shorter one."""
        if box.size < size:
            raise PartError(
                f"video that is damaged: {box.size} bytes in box {_shown(box.name)}; get it again"
            )
        return self.read(box.begin, box.begin + size)

    def table(self, box: _Box, at: int, rows: int, columns: int) -> Iterator[Longs]:
        """A table of u32 in the body of a box, some rows at a time; int64 [k, columns]."""
        row_bytes = 4 * columns
        if box.begin + at + rows * row_bytes > box.end:
            raise PartError(
                f"video that is damaged: box {_shown(box.name)} tells of {rows} entries, and has room for "
                f"{max(box.size - at, 0) // max(row_bytes, 1)}; get it again"
            )
        step = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
        for row in range(0, rows if columns else 0, step):
            begin = box.begin + at + row * row_bytes
            chunk = self.read(begin, begin + min(step, rows - row) * row_bytes)
            yield np.frombuffer(chunk, ">u4").astype(np.int64).reshape(-1, columns)


@dataclass(slots=True)
class _Durations:
    """How long frames last, and their bytes, summed run by run.

    Attributes:
        frames, ticks, num_bytes: so far.
        offset: ticks from when the first frame of fragments is decoded to when it is displayed.
        first, last: ticks of these frames.
        least, most: ticks of any frame but the last.
    """

    frames: int = 0
    ticks: int = 0
    num_bytes: int = 0
    offset: int = 0
    first: int = 0
    last: int = 0
    least: int = 1 << 32
    most: int = 0

    def add(self, counts: Longs, ticks: Longs) -> None:
        """Add runs of frames that last equally long; int64 [k] twice, below 2**32."""
        counts, ticks = counts[counts > 0], ticks[counts > 0]
        if not counts.size:
            return
        if self.frames:
            self._span(self.last, self.last)
        else:
            self.first = int(ticks[0])
        before = ticks if counts[-1] > 1 else ticks[:-1]
        if before.size:
            self._span(int(before.min()), int(before.max()))
        self.frames += int(counts.sum())
        self.ticks += int(sum(map(int.__mul__, counts.tolist(), ticks.tolist())))  # may pass 2**63
        self.last = int(ticks[-1])

    def _span(self, least: int, most: int) -> None:
        self.least, self.most = min(self.least, least), max(self.most, most)


@dataclass(slots=True)
class _Movie:
    """The boxes of a header, and of fragments behind it."""

    boxes: _Boxes
    moov: _Box
    moofs: Sequence[_Box]
    size_bytes: int

    def header(self) -> VideoHeader:
        traks = self._traks()
        if len(traks[b"vide"]) != 1:
            raise PartError(
                f"MP4 or MOV of {len(traks[b'vide'])} video tracks, where one belongs; leave it out, or "
                "convert it: ffmpeg -i FILE -map 0:v:0 OUT.mp4"
            )
        (trak,) = traks[b"vide"]
        turns = self._turns(self._box(trak, b"tkhd"), 40) + self._turns(self._box(self.moov, b"mvhd"), 36)
        turns %= 4
        height, width = self._size(trak)
        durations = self._durations(trak)
        if not 0 < durations.frames <= self.size_bytes:
            raise PartError(f"video of {durations.frames} frames in {self.size_bytes} bytes; get it again")
        if durations.num_bytes > self.size_bytes:
            raise PartError(
                f"video that is damaged: frames of {durations.num_bytes} bytes in {self.size_bytes}; get it "
                "again"
            )
        if not durations.ticks:
            raise PartError(f"video whose frames last no time; {CONVERT}")
        scale = self._scale(self._box(trak, b"mdia", b"mdhd"))
        self._check_edits(trak, durations, scale)
        if turns % 2:
            height, width = width, height
        return VideoHeader(
            height=height,
            width=width,
            frames=durations.frames,
            rate=durations.frames * scale / durations.ticks,
            is_variable=durations.most - durations.least > 1,  # a tick is rounding
            turns=turns,
            has_sound=bool(traks[b"soun"]),
        )

    def sound(self) -> tuple[int, int] | None:
        if not (traks := self._traks()[b"soun"]):
            return None
        trak, stbl = traks[0], self._box(traks[0], b"mdia", b"minf", b"stbl")
        body = self.boxes.body(self._box(stbl, b"stsd"), 44)
        if body[12:16] == b"enca":
            raise PartError("video whose sound is encrypted; leave it out")
        scale, found = self._scale(self._box(trak, b"mdia", b"mdhd")), self._summed(stbl)
        rate = int.from_bytes(body[40:42], "big")  # too small for some, which the scale has
        self._add_fragments(found, self._number(trak))
        waits, edits = self._edits(trak)
        (duration, begin, speed), *more = edits or [(0, 0, _UNITY)]
        if more or speed != _UNITY:
            raise PartError(f"video with an edit list that leaves out or repeats sound; {CONVERT}")
        of_movie = self._scale(self._box(self.moov, b"mvhd"))
        left = Fraction(max(found.ticks - begin, 0), scale)
        if duration and left * of_movie > duration + 1:  # which is rounded to ticks of the movie
            left = Fraction(duration, of_movie)
        rate = rate if rate >= LEAST_HZ else scale
        return (int((Fraction(waits, of_movie) + left) * rate), rate) if found.frames else None

    def _traks(self) -> dict[bytes, list[_Box]]:
        traks = {b"vide": list[_Box](), b"soun": list[_Box]()}
        for box in self.boxes.within(self.moov):
            if box.name == b"trak" and (handler := self.boxes.inside(box, b"mdia", b"hdlr")) is not None:
                traks.get(self.boxes.body(handler, 12)[8:12], []).append(box)
        return traks

    def _box(self, outer: _Box, *names: bytes) -> _Box:
        """Raises PartError without it."""
        if (found := self.boxes.inside(outer, *names)) is None:
            raise PartError(f"video that is damaged: its header lacks {_shown(names[-1])}; get it again")
        return found

    def _scale(self, box: _Box) -> int:
        """Ticks per second of a mvhd or mdhd."""
        body = self.boxes.body(box, 24)
        at = 20 if body[0] else 12
        if (scale := int.from_bytes(body[at : at + 4], "big")) == 0:
            raise PartError("video that is damaged: 0 ticks per second; get it again")
        return scale

    def _number(self, trak: _Box) -> int:
        box = self._box(trak, b"tkhd")
        at = 20 if self.boxes.body(box, 1)[0] else 12
        return int.from_bytes(self.boxes.body(box, at + 4)[at:], "big")

    def _turns(self, box: _Box, at: int) -> int:
        """Quarter turns clockwise by the matrix of a tkhd or mvhd, where it is of version 0."""
        at += 12 if self.boxes.body(box, 1)[0] else 0
        a, b, _, c, d = np.frombuffer(self.boxes.body(box, at + 36)[at : at + 20], ">i4").tolist()
        if (turns := _TURNS.get((a, b, c, d))) is None:
            raise PartError(f"video that is mirrored, scaled or slanted when displayed; {CONVERT}")
        return turns

    def _size(self, trak: _Box) -> tuple[int, int]:
        """(height, width) of a frame as stored, in pixels."""
        box = self._box(trak, b"mdia", b"minf", b"stbl", b"stsd")
        body = self.boxes.body(box, 44)
        entries, form = int.from_bytes(body[4:8], "big"), body[12:16]
        if entries != 1:
            raise PartError(f"video of {entries} formats in one track, where one belongs; {CONVERT}")
        if form == b"encv":
            raise PartError("video that is encrypted; leave it out")
        height, width = int.from_bytes(body[42:44], "big"), int.from_bytes(body[40:42], "big")
        if not (height and width):
            raise PartError(f"video whose header says {width} pixels wide x {height} high; get it again")
        return height, width

    def _durations(self, trak: _Box) -> _Durations:
        """Those of all frames. Raises PartError where tables contradict each other."""
        stbl = self._box(trak, b"mdia", b"minf", b"stbl")
        found = self._summed(stbl)
        if found.frames > 1 and not found.least:
            raise PartError(f"video with a frame that lasts no time; {CONVERT}")
        sizes = self._sizes(stbl)
        if found.frames != len(sizes):
            raise PartError(
                f"video that is damaged: durations of {found.frames} frames, and {len(sizes)} frames; "
                f"{CONVERT}"
            )
        if len(sizes):
            self._check_places(stbl, sizes)
            found.num_bytes = int(sizes.sum())
        self._add_fragments(found, self._number(trak))
        return found

    def _summed(self, stbl: _Box) -> _Durations:
        """Those of the frames without fragments."""
        found, stts = _Durations(), self._box(stbl, b"stts")
        rows = int.from_bytes(self.boxes.body(stts, 8)[4:8], "big")
        for counts, ticks in (each.T for each in self.boxes.table(stts, 8, rows, 2)):
            found.add(counts, ticks)
        return found

    def _add_fragments(self, found: _Durations, number: int) -> None:
        trex = self._trex(number)
        for moof in self.moofs:
            base: int | None = moof.at
            for traf in (box for box in self.boxes.within(moof) if box.name == b"traf"):
                self._add_fragment(found, moof, traf, base, number, trex)
                base = None  # behind the bytes of the track before

    def _sizes(self, stbl: _Box) -> Longs:
        """Bytes of each frame without fragments; int64 [frames]. Raises PartError for a frame of none."""
        box = self.boxes.inside(stbl, b"stsz")
        if box is None:
            box = self._box(stbl, b"stz2")
        body = self.boxes.body(box, 12)
        size, count = int.from_bytes(body[4:8], "big"), int.from_bytes(body[8:12], "big")
        is_small, bits = box.name == b"stz2", size & 255
        if is_small and bits not in (4, 8, 16):
            raise PartError(f"video that is damaged: sizes of frames in {bits} bits; get it again")
        bits = bits if is_small else 32
        room = self.size_bytes // size if size and not is_small else 8 * (box.size - 12) // bits
        if count > room:
            raise PartError(f"video that is damaged: {count} frames in room for {room}; get it again")
        if is_small:
            read = self.boxes.read(box.begin + 12, box.begin + 12 + (count * bits + 7) // 8)
            sizes = np.frombuffer(read, ">u2" if bits == 16 else np.uint8).astype(np.int64)
            sizes = np.stack((sizes >> 4, sizes & 15), axis=1).ravel()[:count] if bits == 4 else sizes
        else:
            sizes = np.full(count, size) if size else self._table(box, 12, count, 1)[:, 0]
        if not sizes.all():
            raise PartError(f"video with a frame of 0 bytes; {CONVERT}")
        return sizes

    def _check_places(self, stbl: _Box, sizes: Longs) -> None:
        """Raises PartError for frames that lie beyond the end of the file. sizes: of each, in bytes."""
        box, columns = self.boxes.inside(stbl, b"stco"), 1
        if box is None:
            box, columns = self._box(stbl, b"co64"), 2
        offsets = self._table(box, 8, int.from_bytes(self.boxes.body(box, 8)[4:], "big"), columns)
        begins = offsets[:, -1] + (offsets[:, 0].clip(max=1 << 30) << 32 if columns == 2 else 0)
        box = self._box(stbl, b"stsc")
        runs = self._table(box, 8, int.from_bytes(self.boxes.body(box, 8)[4:], "big"), 3)
        firsts = np.append(runs[:, 0] - 1, len(begins)).clip(max=len(begins))  # chunk of each run
        if firsts[0] != 0 or (np.diff(firsts) < 0).any():
            raise PartError("video that is damaged: it does not tell where its frames lie; get it again")
        lasts = runs[:, 1].repeat(np.diff(firsts)).cumsum()  # frames up to each chunk's end
        if not lasts.size or lasts[-1] < len(sizes):
            raise PartError(f"video that is damaged: {len(sizes)} frames, and room for fewer; get it again")
        summed = np.append(0, sizes.cumsum())[np.append(0, lasts.clip(max=len(sizes)))]
        self._check_end(int((begins + np.diff(summed))[np.diff(summed) > 0].max()))

    def _check_end(self, end: int) -> None:
        if end > self.size_bytes:
            raise PartError(
                f"video that was cut off or is damaged: its frames end at byte {end}, and it has "
                f"{self.size_bytes}; get the whole file"
            )

    def _table(self, box: _Box, at: int, rows: int, columns: int) -> Longs:
        """All of a table; int64 [rows, columns]."""
        return np.concatenate([np.zeros((0, columns), np.int64), *self.boxes.table(box, at, rows, columns)])

    def _trex(self, number: int) -> tuple[int, int]:
        """(ticks, bytes) of a frame in fragments that do not tell; 0 without any."""
        mvex = self.boxes.inside(self.moov, b"mvex")
        for box in () if mvex is None else self.boxes.within(mvex):
            if box.name == b"trex":
                body = self.boxes.body(box, 24)
                if int.from_bytes(body[4:8], "big") == number:
                    return int.from_bytes(body[12:16], "big"), int.from_bytes(body[16:20], "big")
        return 0, 0

    def _add_fragment(
        self, found: _Durations, moof: _Box, traf: _Box, base: int | None, number: int, trex: tuple[int, int]
    ) -> None:
        """Add the frames of a fragment, if it is of that track.

        base: of the offsets of its bytes where it tells none, None if not known. trex: see `_trex`.
        """
        (ticks, size), head = trex, self._box(traf, b"tfhd")
        body = self.boxes.body(head, 8)
        if int.from_bytes(body[4:8], "big") != number:
            return
        flags = int.from_bytes(body[1:4], "big")
        at = 8 + 8 * (flags & 1) + 4 * (flags >> 1 & 1)
        if flags & 8:
            ticks = int.from_bytes(self.boxes.body(head, at + 4)[at:], "big")
            at += 4
        if flags & 16:
            size = int.from_bytes(self.boxes.body(head, at + 4)[at:], "big")
        if flags & 1:
            base = int.from_bytes(self.boxes.body(head, 16)[8:], "big")
        elif flags & 0x20000:
            base = moof.at
        end = base
        for box in (each for each in self.boxes.within(traf) if each.name == b"trun"):
            body = self.boxes.body(box, 8)
            flags, count = int.from_bytes(body[2:4], "big"), int.from_bytes(body[4:8], "big")
            columns = (flags >> 8 & 15).bit_count()
            if count > self.size_bytes:
                raise PartError(
                    f"video that is damaged: {count} frames in {self.size_bytes} bytes; get it again"
                )
            rows = self._table(box, 8 + 4 * (flags & 1) + 4 * (flags >> 2 & 1), count, columns)
            if flags & 0x800 and count and not found.frames:
                found.offset = max((int(rows[0, -1]) ^ 1 << 31) - (1 << 31), 0)  # of 32 bits, signed
            if flags & 0x100:
                found.add(np.ones(count, np.int64), rows[:, 0])
            else:
                found.add(np.array([count]), np.array([ticks]))
            sizes = rows[:, flags >> 8 & 1] if flags & 0x200 else np.full(min(count, 1), size)
            if not sizes.all():
                raise PartError(f"video with a frame of 0 bytes; {CONVERT}")
            num_bytes = int(sizes.sum()) if flags & 0x200 else count * size
            found.num_bytes += num_bytes
            if base is not None and flags & 1:
                end = base + int.from_bytes(self.boxes.body(box, 12)[8:], "big", signed=True)
            if end is not None:
                end += num_bytes
                self._check_end(end)

    def _check_edits(self, trak: _Box, durations: _Durations, scale: int) -> None:
        """Raises PartError for an edit list that leaves frames out, repeats or slows them.

        One that waits before the first frame, or begins with it, is what encoders write for B-frames.
        """
        (duration, begin, speed), *more = self._edits(trak)[1] or [(0, 0, _UNITY)]
        start = self._first_offset(trak, durations)
        end = begin + (duration + 1) * scale / self._scale(self._box(self.moov, b"mvhd"))
        is_whole = duration == 0 or end >= start + durations.ticks - durations.last
        if more or speed != _UNITY or begin >= start + max(durations.first, 1) or not is_whole:
            raise PartError(f"video with an edit list that leaves out or repeats frames; {CONVERT}")

    def _edits(self, trak: _Box) -> tuple[int, list[tuple[int, int, int]]]:
        """(how long it waits, edits), each (duration, first tick, speed); durations in ticks of the movie."""
        waits, edits = 0, list[tuple[int, int, int]]()
        if (box := self.boxes.inside(trak, b"edts", b"elst")) is None:
            return waits, edits
        body = self.boxes.body(box, 8)
        wide, count = bool(body[0]), int.from_bytes(body[4:8], "big")
        for rows in self.boxes.table(box, 8, min(count, 65), 5 if wide else 3):
            for row in rows.tolist():
                duration, begin = (row[0] << 32 | row[1], row[2] << 32 | row[3]) if wide else row[:2]
                if begin != (1 << (64 if wide else 32)) - 1:
                    edits.append((duration, begin, row[-1]))
                else:  # nothing is displayed yet
                    waits += duration
        return waits, edits if count <= 64 else edits + 2 * [(0, 0, 0)]

    def _first_offset(self, trak: _Box, durations: _Durations) -> int:
        """Ticks from when the first frame is decoded to when it is displayed."""
        ctts = self.boxes.inside(trak, b"mdia", b"minf", b"stbl", b"ctts")
        if ctts is None or int.from_bytes(self.boxes.body(ctts, 8)[4:8], "big") == 0:
            return durations.offset
        offset = int.from_bytes(self.boxes.body(ctts, 16)[12:16], "big", signed=True)
        return max(offset, 0)


def _shown(name: bytes) -> str:
    return ascii(name.decode("latin-1"))


# -- frames -----------------------------------------------------------------------------------------------


def decoded_frames(data: bytes, numbers: Sequence[int], header: VideoHeader | None = None) -> Iterator[Frame]:
    """Some frames, as displayed, one at a time; uint8 [height, width, 3], red, green and blue.

    Decoded from the last keyframe before the first one on; keyframes and what follows them are passed over
    where no frame is wanted, and so are frames that no other needs. Where a wanted frame does not come so,
    such as behind a keyframe that turns out to be none, all is decoded.

    data: MP4, MOV, Matroska or WebM. numbers: of the frames, in the order of display, ascending and below
    those of `video_header`. header: what that gives, where it is known. Raises PartError for a video that
    cannot be decoded, contradicts its header, or of which the decoder says that it is damaged, and
    ImportError without PyAV.
    """
    header = header or video_header(data)
    try:
        import av.error
        from av.video.reformatter import VideoReformatter
    except ImportError as missing:
        raise ImportError(f"decoding video needs PyAV: {install('video')}") from missing
    to_rgb, stored = VideoReformatter(), (header.height, header.width)
    if header.turns % 2:
        stored = (header.width, header.height)
    try:
        for frame in _frames(av, data, header, stored, numbers):
            if (frame.height, frame.width) != stored:
                raise PartError(
                    f"a frame {frame.width} x {frame.height}, and its header says {stored[1]} x {stored[0]}"
                )
            pixels: Any = to_rgb.reformat(frame, format="rgb24").to_ndarray()
            yield np.rot90(pixels, -header.turns) if header.turns else pixels
    except av.error.FFmpegError as error:
        raise PartError(f"video that cannot be decoded: {error.strerror or error}") from error


def _frames(
    av: Any, data: bytes, header: VideoHeader, stored: tuple[int, int], numbers: Sequence[int]
) -> Iterator[Any]:
    # the format is named, so that no other reader, of playlists or the like, is ever tried
    how: dict[str, Any] = {"format": "mov", "options": {"ignore_editlist": "1"}}
    if is_matroska(data):
        how = {"format": "matroska"}
    with av.open(io.BytesIO(data), "r", metadata_errors="replace", **how) as container:
        picture = av.stream.Disposition.attached_pic  # of a cover
        streams: Any = (each for each in container.streams.video if not each.disposition & picture)
        stream: Any = next(streams, None)
        if stream is None or (codec := stream.codec_context) is None:
            raise PartError("video in a format that PyAV does not decode")
        codec.thread_count = 1
        codec.options = {"max_pixels": str((stored[0] + _AROUND_PIXELS) * (stored[1] + _AROUND_PIXELS))}
        packets, left = list[Any](), len(data)
        for packet in container.demux(stream):
            left -= packet.size
            if left < 0:  # or memory would grow with what is not there
                raise PartError(f"video whose frames are more than its {len(data)} bytes; get it again")
            if packet.size:
                packets.append(packet)
        times = np.array([-1 if each.pts is None else each.pts for each in packets], np.int64)
        order = np.argsort(times, kind="stable")
        if len(packets) != header.frames:
            raise PartError(f"video of {len(packets)} frames, and its header says {header.frames}")
        if any(each.pts is None for each in packets) or (np.diff(times[order]) <= 0).any():
            raise PartError(f"video with frames that have no time, or two at one time; {CONVERT}")
        keys = np.array([i for i, each in enumerate(packets) if each.is_keyframe], np.int64)
        wanted = frozenset(order[list(numbers)].tolist())
        decoding = _Decoding(codec, packets, times, wanted, av.error.FFmpegError)
        for number in numbers:
            at = int(order[number])
            before = keys[(keys <= at) & (times[keys] <= times[at])]
            if before.size and before[-1] > decoding.fed:
                decoding.begin(int(before[-1]))
            frame = decoding.frame(at)
            if frame is None and decoding.passes_over:  # what is said to be keyframes is not, or is damaged
                keys, decoding.passes_over = keys[:0], False
                decoding.begin(0)
                frame = decoding.frame(at)
            if frame is None:
                raise PartError(f"video whose frame {number} is damaged or cannot be decoded")
            yield frame


@dataclass(slots=True)
class _Decoding:
    """Frames of a track, one after the other.

    Attributes:
        codec, packets, error: PyAV's.
        times: of the frames in packets, in ticks; int64.
        wanted: the packets whose frames are.
        passes_over: whether some packets are not decoded.
        begun, fed: the first packet that was decoded, and the next one.
        is_sure: whether it began at the first packet, or at one that turned out to be a keyframe.
    """

    codec: Any
    packets: Sequence[Any]
    times: Longs
    wanted: frozenset[int]
    error: type[Exception]
    passes_over: bool = True
    begun: int = 0
    fed: int = 0
    is_sure: bool = True
    _ready: Iterator[Any] = field(default_factory=lambda: iter(()), repr=False)

    def begin(self, packet: int) -> None:
        """Go on at a packet."""
        self.codec.flush_buffers()
        self.begun = self.fed = packet
        self.is_sure, self._ready = packet == 0, iter(())

    def frame(self, packet: int) -> Any:
        """The frame in a packet; None if it does not come, is damaged, or is_sure is false.

        Raises what PyAV does where no packet is passed over.
        """
        while True:
            frame = next(self._ready, None)
            if frame is not None:
                self.is_sure |= frame.pts == self.times[self.begun] and bool(frame.key_frame)
                if frame.pts == self.times[packet]:
                    return frame if self.is_sure and not frame.is_corrupt else None
            elif self.fed > len(self.packets):
                return None
            else:
                next_one = self.packets[self.fed] if self.fed < len(self.packets) else None
                if self.codec.name in _SKIPPING:
                    skips = self.passes_over and next_one is not None and self.fed not in self.wanted
                    self.codec.skip_frame = "NONREF" if skips else "DEFAULT"
                try:
                    self._ready = iter(self.codec.decode(next_one))
                except self.error:
                    if not self.passes_over:
                        raise
                    return None
                self.fed += 1
