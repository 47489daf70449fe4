"""Did the interrupted job see what the uninterrupted one saw? Pure functions over what the runs wrote."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

Sequence_ = tuple[int, int, int]
"""(source, epoch, index)"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left behind.

    Attributes:
        losses: step -> loss.
        ledger: a line per sequence and rank.
        costs: rank -> a line per step.
    """

    losses: Mapping[int, float]
    ledger: Sequence[Mapping[str, Any]]
    costs: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, out: Path, name: str) -> Run:
        """From the files of a run; a line that a kill cut short is left out."""
        losses = {line["step"]: line["loss"] for line in _lines(out / f"losses-{name}.jsonl")}
        ledger = [line for path in sorted(out.glob(f"ledger-{name}-rank*.jsonl")) for line in _lines(path)]
        costs = {
            int(path.stem.rsplit("rank", 1)[1]): _lines(path)
            for path in sorted(out.glob(f"steps-{name}-rank*.jsonl"))
        }
        return cls(losses, ledger, costs)

    def batches(self, start: int, stop: float) -> tuple[dict[int, Counter[Sequence_]], list[str]]:
        """(step -> the sequences of its global batch, disagreements between ranks of one replica).

        start, stop: only steps from `start` to before `stop`.
        All ranks of a data-parallel replica, whatever their tp, cp and pp, must be handed the same
        sequences in the same microbatches; the replicas' together are the global batch.
        """
        handed: dict[tuple[int, int], dict[int, list[tuple[int, Sequence_]]]] = defaultdict(dict)
        for line in self.ledger:
            if not start <= line["step"] < stop:
                continue
            at = handed[line["step"], line["coordinate"]["dp"]].setdefault(line["rank"], [])
            at.append((line["microbatch"], _sequence(line)))
        batches: dict[int, Counter[Sequence_]] = defaultdict(Counter)
        problems: list[str] = []
        for (step, dp), by_rank in handed.items():
            first, *others = sorted(by_rank)
            batches[step].update(sequence for _, sequence in by_rank[first])
            problems += [
                f"step {step}: ranks {first} and {other} of replica {dp} were handed different sequences"
                for other in others
                if by_rank[other] != by_rank[first]
            ]
        return dict(batches), problems


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs.

    Attributes:
        num_sequences: that the uninterrupted run saw.
        num_redone: that were read again because the last checkpoint was older than the kill.
        lost, repeated: (step, sequence) of the reference that is missing; that is there and should not be.
        max_difference: largest absolute difference of a step's loss.
        problems: everything wrong, in words.
    """

    num_sequences: int
    num_redone: int
    lost: Sequence[tuple[int, Sequence_]]
    repeated: Sequence[tuple[int, Sequence_]]
    max_difference: float
    problems: Sequence[str]

    @property
    def agree(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def compare(reference: Run, first: Run, then: Run, resumed_at: int, tolerance: float) -> Comparison:
    """Hold an interrupted job against an uninterrupted one.

    What counts of the first run are the steps before `resumed_at`, of the second those from there on;
    steps that the first run did beyond its last checkpoint were done again, and must be the same, too.
    """
    wanted, problems = reference.batches(0, inf)
    before, problems_first = first.batches(0, resumed_at)
    after, problems_then = then.batches(0, inf)
    got = before | after
    redone = {(line["step"], _sequence(line)) for line in first.ledger if line["step"] >= resumed_at}
    problems = [*problems, *problems_first, *problems_then]
    problems += [
        f"step {step}: sequence {sequence}, read before the kill, does not belong there"
        for step, sequence in sorted(redone)
        if sequence not in wanted.get(step, ())
    ]
    problems += [
        f"step {step}: was trained by the first run and by the second"
        for step in before.keys() & after.keys()
    ]
    lost: list[tuple[int, Sequence_]] = []
    repeated: list[tuple[int, Sequence_]] = []
    for step in sorted(wanted.keys() | got.keys()):
        missing = wanted.get(step, Counter()) - got.get(step, Counter())
        extra = got.get(step, Counter()) - wanted.get(step, Counter())
        lost += [(step, sequence) for sequence in missing.elements()]
        repeated += [(step, sequence) for sequence in extra.elements()]
    problems += [f"step {step}: sequence {sequence} was lost" for step, sequence in lost]
    problems += [f"step {step}: sequence {sequence} does not belong there" for step, sequence in repeated]
    difference, loss_problems = _compare_losses(reference, first, then, resumed_at, tolerance)
    return Comparison(
        num_sequences=sum(sum(batch.values()) for batch in wanted.values()),
        num_redone=len(redone),
        lost=lost,
        repeated=repeated,
        max_difference=difference,
        problems=[*problems, *loss_problems],
    )


def _compare_losses(
    reference: Run, first: Run, then: Run, resumed_at: int, tolerance: float
) -> tuple[float, list[str]]:
    problems: list[str] = []
    largest = 0.0
    continued = {step: loss for step, loss in first.losses.items() if step < resumed_at} | dict(then.losses)
    for step in sorted(reference.losses.keys() - continued.keys()):
        problems.append(f"step {step}: the interrupted job has no loss")
    for name, losses in (("first", first.losses), ("then", then.losses)):
        for step, loss in losses.items():
            if step not in reference.losses:
                problems.append(f"step {step}: run {name!r} has a loss, the reference has none")
                continue
            difference = abs(loss - reference.losses[step])
            largest = max(largest, difference)
            if not difference <= tolerance:
                problems.append(
                    f"step {step}: run {name!r} lost {loss}, the reference {reference.losses[step]}"
                )
    return largest, problems


def _sequence(line: Mapping[str, Any]) -> Sequence_:
    return line["source"], line["epoch"], line["index"]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
