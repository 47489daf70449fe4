"""Images, audio, tars and a tokenizer with placeholders for the tests of multimodal stores."""

from __future__ import annotations

import io
import struct
import tarfile
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio|>", "<|im_end|>", "<|video_pad|>"]


def picture(height: int, width: int, form: str = "PNG", seed: int = 0, mode: str = "RGB", **how) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, form, **how)
    return out.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def bomb(height: int, width: int) -> bytes:
    """A PNG of a few bytes whose header says more."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def wav(length: int, rate: int = 16_000, channels: int = 2) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as stream:
        stream.setnchannels(channels)
        stream.setsampwidth(2)
        stream.setframerate(rate)
        stream.writeframes(bytes(2 * channels * length))
    return out.getvalue()


def sound(form: str, length: int, rate: int = 44_100, channels: int = 1, **how: Any) -> bytes:
    """Noise that libsndfile has written. form: FLAC, MP3, or OGG of the subtype that `how` names."""
    samples = np.random.default_rng(length).normal(scale=0.1, size=(length, channels))
    out = io.BytesIO()
    soundfile.write(out, samples.astype(np.float32), rate, format=form, **how)
    return out.getvalue()


def flac(length: int, rate: int = 44_100) -> bytes:
    return sound("FLAC", length, rate)


def tar(path: Path, files: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as out:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def tokenizer(path: Path) -> str:
    """A tokenizers JSON file: byte by byte, and SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(path))
    return str(path)
