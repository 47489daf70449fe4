"""Megatron's --step-batch-size-schedule as a Batch."""

from __future__ import annotations

from meshfeed.batch import Batch
from meshfeed.errors import RecipeError

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_of_schedule(schedule: str, seq_length: int | None = None) -> Batch:
    """The Batch of Megatron's --step-batch-size-schedule, such as "0:768 250B:1536 500B:3072".

    A step has the size of the last threshold that Megatron has consumed before it. seq_length: its
    --seq-length, by which thresholds are tokens; None if they are samples.
    Raises RecipeError for what Megatron refuses: no size from 0 on, thresholds that do not ascend, no number.
    """
    stages: list[tuple[int, int]] = []
    for entry in schedule.replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise RecipeError(f"batch_of_schedule({schedule!r}): {entry!r} is not THRESHOLD:SIZE")
        stages.append((_number(threshold, schedule) // (seq_length or 1), _number(size, schedule)))
    stages.sort(key=lambda stage: stage[0])
    starts = [start for start, _ in stages]
    if starts[:1] != [0] or len(set(starts)) < len(starts):
        raise RecipeError(f"batch_of_schedule({schedule!r}): thresholds are 0 and others, each once")
    batch = Batch(sequences=stages[0][1])
    for start, size in stages[1:]:
        batch = batch.amended(batch.step(start - 1) + 1, size)  # of two in one step, the later holds
    return batch


def _number(text: str, schedule: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        return int(float(text if unit == 1 else text[:-1]) * unit)
    except (ValueError, OverflowError):
        wrong = f"{text!r} is no number such as 768, 1.5M or 250B"
        raise RecipeError(f"batch_of_schedule({schedule!r}): {wrong}") from None
