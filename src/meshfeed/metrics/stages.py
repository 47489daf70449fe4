"""The stages of loading data, and what they are called in Ray Data and Megatron-LM: the one table of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

RAY_STAGES = ("production_wait", "data_transfer", "batching", "format", "collate", "finalize")
"""The stages by which Ray Data divides the time that a training loop is blocked, in its order."""


class Span(NamedTuple):
    """An interval of the producer's time, in seconds of `time.monotonic`."""

    stage: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        does: what happens in it.
        ray: the stage of Ray Data to which it belongs; None if Ray has none.
        megatron: the timer of Megatron-LM in which a wait for it falls.
        follows: whether a rank in it waits for other ranks; the cause is whatever delays those.
    """

    does: str
    ray: str | None = None
    megatron: str = "batch-generator"
    follows: bool = False


STAGE_TABLE: Mapping[str, Stage] = {
    "start": Stage(does="joining the peers", megatron="train/valid/test-data-iterators-setup"),
    "plan": Stage(does="planning a step and announcing its reads", ray="production_wait"),
    "read": Stage(does="reading storage, or a user's iterator", ray="production_wait"),
    "decode": Stage(does="decoding images, audio and video", ray="production_wait"),
    "exchange": Stage(does="exchanging items", ray="data_transfer", follows=True),
    "deliver": Stage(does="sending to peers, and waiting for them", ray="data_transfer", follows=True),
    "build": Stage(does="making fields: batching, format and collate in one pass", ray="collate"),
    "copy": Stage(does="copying to the device", ray="finalize"),
    "verify": Stage(does="comparing replicas"),
    "other": Stage(does="time outside all stages"),
}

STAGES = tuple(STAGE_TABLE)
"""The names of all stages."""

FOLLOWS = frozenset(name for name, stage in STAGE_TABLE.items() if stage.follows)
"""The stages in which a rank waits for other ranks."""


def summed(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The seconds of each stage, added up."""
    sums = dict[str, float]()
    for stage, each in seconds:
        sums[stage] = sums.get(stage, 0.0) + each
    return sums


def in_stages_of_ray(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, summed by the six stages of Ray Data, in its order. Other stages are left out."""
    of_ray = ((STAGE_TABLE[name].ray, each) for name, each in seconds.items())
    return dict.fromkeys(RAY_STAGES, 0.0) | summed((ray, each) for ray, each in of_ray if ray is not None)
