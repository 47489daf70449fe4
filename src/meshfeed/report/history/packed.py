"""Arrays as text inside a page, usually two bytes per number."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

SECONDS_UNIT, SECONDS_SCALE = 1e-6, 2_500.0
"""A duration s becomes round(SECONDS_SCALE * log(1 + s / SECONDS_UNIT)): within 0.02 %, 1 µs to 2 days."""

MISSING = 0xFFFF


def packed_seconds(seconds: np.ndarray) -> dict[str, Any]:
    """Durations in seconds, NaN for none, of any shape."""
    codes = np.round(np.log1p(np.maximum(seconds, 0.0) / SECONDS_UNIT) * SECONDS_SCALE)
    codes = np.where(np.isnan(seconds), MISSING, np.minimum(codes, MISSING - 1))
    return _packed(codes, "u2") | {"unit": SECONDS_UNIT, "scale": SECONDS_SCALE}


def unpacked_seconds(packed: dict[str, Any]) -> np.ndarray:
    """Decode `packed_seconds`; f64 of the same shape."""
    codes = np.frombuffer(base64.b64decode(packed["data"]), "<u2").astype(np.float64)
    seconds = np.expm1(codes / packed["scale"]) * packed["unit"]
    return np.where(codes == MISSING, np.nan, seconds).reshape(packed["shape"])


def packed_integers(values: np.ndarray) -> dict[str, Any]:
    """Integers from 0, negative for none."""
    wide = bool(values.max(initial=0) >= MISSING)
    none = (1 << 32) - 1 if wide else MISSING
    return _packed(np.where(values < 0, none, values), "u4" if wide else "u2")


def listed(values: np.ndarray, digits: int = 4) -> list[float | None]:
    """Numbers of a few significant digits for JSON; None for NaN."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def _packed(values: np.ndarray, kind: str) -> dict[str, Any]:
    raw = np.ascontiguousarray(values.astype(f"<{kind}")).tobytes()
    return {"type": kind, "shape": list(values.shape), "data": base64.b64encode(raw).decode()}
