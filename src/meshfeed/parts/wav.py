"""WAV audio: its header, and its samples."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PartError

_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE  # how samples are coded, by Microsoft's RIFF


@dataclass(frozen=True, slots=True)
class WavHeader:
    """What the header of WAV audio says.

    Attributes:
        coding: 1 for integers, 3 for floating point; others are compressed.
        channels: number of them.
        rate: samples of a channel per second.
        frame_bytes: of the samples of all channels at one time.
        sample_bits: of one sample.
        begin: where in the bytes the samples begin.
        num_bytes: of all samples, as far as they are there.
    """

    coding: int
    channels: int
    rate: int
    frame_bytes: int
    sample_bits: int
    begin: int
    num_bytes: int

    @property
    def length(self) -> int:
        """Samples of one channel."""
        return self.num_bytes // max(self.frame_bytes, 1)


def is_wav(data: bytes) -> bool:
    """Whether bytes begin as WAV does."""
    return data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE"


def wav_header(data: bytes) -> WavHeader | None:
    """The header of WAV audio: zeros without a chunk "fmt ", None without a chunk "data" after it."""
    at, form = 12, (0, 0, 0, 0, 0)
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"fmt " and size >= 16 and at + 24 <= len(data):
            coding, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", data, at + 8)
            if coding == _EXTENSIBLE and size >= 40 and at + 34 <= len(data):
                (coding,) = struct.unpack_from("<H", data, at + 32)  # its GUID begins with the coding
            form = coding, channels, rate, frame_bytes, bits
        if name == b"data":
            # a writer that could not seek back leaves a size that no file has
            return WavHeader(*form, begin=at + 8, num_bytes=min(size, len(data) - at - 8))
        at += 8 + size + size % 2
    return None


def wav_samples(data: bytes, header: WavHeader, most: int) -> npt.NDArray[np.float64]:
    """The first samples of each channel, from -1 to 1; float64 [samples, channels], at most `most`.

    Raises PartError for samples that are not linear PCM of 8, 16, 24 or 32 bits, or finite floats of 32 or
    64.
    """
    form = header.coding, header.sample_bits
    if form not in _DTYPES or header.frame_bytes != header.channels * header.sample_bits // 8:
        raise PartError(
            f"WAV audio of coding {header.coding}, {header.sample_bits} bits, {header.frame_bytes} bytes for "
            f"{header.channels} channels; write it as linear PCM"
        )
    stop = header.begin + header.frame_bytes * min(header.length, most)
    stored = np.frombuffer(data[header.begin : stop], _DTYPES[form])
    if header.sample_bits == 24:  # the upper three bytes of 32 bits
        wide = np.zeros((stored.size // 3, 4), np.uint8)
        wide[:, 1:] = stored.reshape(-1, 3)
        stored = wide.view("<i4")
    samples = stored.reshape(-1, header.channels).astype(np.float64)
    if header.coding == _FLOATS:
        if not np.isfinite(samples).all():
            raise PartError("WAV audio with samples that are not finite; write it again")
        return samples
    # 8 bits are from 0 to 255, and others around 0
    return samples / 128 - 1 if header.sample_bits == 8 else samples / -float(np.iinfo(stored.dtype).min)


_DTYPES = {
    (_INTEGERS, 8): "u1",
    (_INTEGERS, 16): "<i2",
    (_INTEGERS, 24): "u1",
    (_INTEGERS, 32): "<i4",
    (_FLOATS, 32): "<f4",
    (_FLOATS, 64): "<f8",
}
