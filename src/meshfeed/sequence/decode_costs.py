"""What decoding costs a rank, counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DecodeCosts:
    """What was decoded for one rank so far, and what it cost.

    Attributes:
        workers: processes that decode; 0 where the reading thread does.
        parts: images, clips of audio and videos.
        bad: of them, that cannot be decoded.
        num_bytes: of them, before decoding.
        busy_s: seconds in which a worker was decoding, summed over workers.
        cpu_s: CPU seconds of these.
        wait_s: seconds that reading took longer for it: without workers all of busy_s.
    """

    workers: int
    parts: int = 0
    bad: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
