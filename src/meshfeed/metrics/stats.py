"""What a step cost on one rank: the `stats` of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from meshfeed.arrays import Floats, Longs
from meshfeed.metrics.stages import in_stages_of_ray

SequenceName = tuple[int, int, int]
"""(source, epoch, index) of a sequence."""


class SlowRank(NamedTuple):
    """The rank of the job that waits longest for its own work: others wait for it.

    Attributes:
        rank, host: which.
        stage: the one of its own stages in which it waits longest; not one in which it waits for others.
        wait_s: seconds a step that it waits in all of these, mean of its last steps, at most 64.
        share: of its time, 0 to 1.
        step: the last of these steps.
    """

    rank: int
    host: str
    stage: str
    wait_s: float
    share: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepStats(Mapping[str, Any]):
    """What a step cost this rank so far, and how balanced its plan is.

    Also a mapping by name, without the values that are None: `stats["bytes_read"]`.

    Attributes:
        exposed_wait_s: seconds that the loop waited, by stage. Stages are start (joining the peers), plan (of
            a later step), read (storage, or a user's iterator), decode (images, audio and video, including
            waits for the workers that decode), exchange, deliver (including waits for peers), build, copy,
            verify and other; see `metrics.STAGE_TABLE`.
        work_s: seconds that the producer worked, by stage.
        queue_depth: reads that were ready, of at most `prefetch`, when the loop asked for the step.
        bytes_read: from storage.
        bytes_fetched: from remote storage, by this process.
        opens: data files opened.
        collectives: collectives called.
        delivered_bytes: sent or received.
        parts_decoded, bytes_decoded: images, audio and videos decoded for this rank to read, and their bytes
            before that. None if this rank decodes nothing, as are the next three.
        parts_bad: those that could not be decoded; see `Multimodal(on_bad=...)`.
        decode_busy_s, decode_cpu_s: seconds and CPU seconds of decoding them, summed over workers; most of it
            ahead of the step.
        efficiency, objective_over_bound, max_over_mean, padding: of the global batch's packs; see `Account`.
            None without packing, as are the next three.
        oversize, empty: the sequences that were too long, and those without tokens.
        cut_loss: of those too long, the ones that truncation left without any of their loss.
        source_drawn, source_epochs: sequences of each source up to this step, and the same in epochs; arrays.
            With those of steps that an amendment skips, as in the next. None for a single source, as is the
            next.
        source_asked: sequences of each source up to this step by the recipe's shares, with fractions; an
            array. Under by="tokens", from the share of its tokens over their mean length.
        source_names: of the sources, which an amendment may add to.
        metrics_lost: steps that a metrics sink has failed to take so far; None without sinks.
        slowest: the rank that waits longest for its own work, as told last; None if no rank does so for a
            hundredth of its time, and without sinks.
    """

    exposed_wait_s: Mapping[str, float] = field(default_factory=dict[str, float])
    work_s: Mapping[str, float] = field(default_factory=dict[str, float])
    queue_depth: int = 0
    bytes_read: int = 0
    bytes_fetched: int = 0
    opens: int = 0
    collectives: int = 0
    delivered_bytes: int = 0
    parts_decoded: int | None = None
    bytes_decoded: int | None = None
    parts_bad: int | None = None
    decode_busy_s: float | None = None
    decode_cpu_s: float | None = None
    efficiency: float | None = None
    objective_over_bound: float | None = None
    max_over_mean: float | None = None
    padding: float | None = None
    oversize: Sequence[SequenceName] | None = None
    empty: Sequence[SequenceName] | None = None
    cut_loss: Sequence[SequenceName] | None = None
    source_drawn: Longs | None = None
    source_epochs: Floats | None = None
    source_asked: Floats | None = None
    source_names: tuple[str, ...] | None = None
    metrics_lost: int | None = None
    slowest: SlowRank | None = None

    @property
    def blocked_s(self) -> dict[str, float]:
        """exposed_wait_s by the stages of Ray Data: seconds of production_wait, data_transfer, batching,
        format, collate and finalize. Our build is three of them in one pass, and counts as collate."""
        return in_stages_of_ray(self.exposed_wait_s)

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in _NAMES else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in _NAMES if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_NAMES = tuple(each.name for each in fields(StepStats))
