"""Files of any content, sound or broken, written by hand and not by the writer under test."""

import struct
from pathlib import Path

import numpy as np


def write_raw(
    prefix, *, lengths, pointers, documents, data, code=8, version=1, magic=b"MMIDIDX\0\0", modes=None
):
    """An .idx of exactly these entries beside a .bin of exactly these bytes; returns the prefix."""
    parts = [
        struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(documents)),
        np.asarray(lengths, "<i4").tobytes(),
        np.asarray(pointers, "<i8").tobytes(),
        np.asarray(documents, "<i8").tobytes(),
        b"" if modes is None else np.asarray(modes, "i1").tobytes(),
    ]
    Path(f"{prefix}.idx").write_bytes(b"".join(parts))
    Path(f"{prefix}.bin").write_bytes(data)
    return str(prefix)
