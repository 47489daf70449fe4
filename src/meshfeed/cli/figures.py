"""Short forms of the benchmarks, for the machine at hand. Ratios are within one run, contestants in turn."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import meshfeed as mf
from meshfeed.cli import ranks
from meshfeed.order import Interleaving, draws_between
from meshfeed.order.course import course_of, forget
from meshfeed.plan import best_fit, plan_step
from meshfeed.plan.account import account_of
from meshfeed.roles import DeliveryName
from meshfeed.store import IndexedWriter

_FAR = 10**12
_NOISE = 1.5  # what should be 1, on a machine that does other things too
_ALPHA, _CAPACITY = 25_100, 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure beside its aim.

    Attributes:
        name: which benchmark it is of.
        what: what was measured, against what.
        value: None where it could not be taken; `note` says why.
        unit: of value and aim; "" for a ratio.
        aim: to be reached from below where `at_least`, else from above.
    """

    name: str
    what: str
    value: float | None
    unit: str = ""
    aim: float
    at_least: bool = False
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the aim is reached; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def start() -> list[Figure]:
    """The first batch of a long stream against a short one, at its start and at a resume far in."""

    def first_batch(tokens: int, step: int) -> int:
        store: Any = mf.Lengths(np.full(1000, tokens // 1000, np.int64))
        recipe = mf.Recipe(data=store, sequence=mf.Windows(4096), batch=mf.Batch(sequences=8))
        with mf.Feed(recipe, prefetch=0) as feed:
            feed.load_state_dict(mf.State(recipe=recipe.summary(), step=step).to_json())
            next(next(iter(feed)).microbatches)
            return len(json.dumps(feed.state_dict()))

    took = _in_turn(
        {
            "short": lambda: first_batch(10**6, 0),
            "long": lambda: first_batch(_FAR, 0),
            "resumed": lambda: first_batch(_FAR, 10**6),
        },
        rounds=15,
    )
    return [
        Figure(name="start", what=what, value=_ratio(took[one], took["short"]), aim=_NOISE)
        for one, what in (
            ("long", "time to the first batch, 10^12 tokens : 10^6 tokens"),
            ("resumed", "the same, resumed at step 10^6"),
        )
    ] + [Figure(name="start", what="size of a state", value=first_batch(_FAR, 10**6), unit="bytes", aim=4096)]


def order() -> list[Figure]:
    """Draws far in the stream against draws at its start, and how true a mixture is to its shares."""
    stores: dict[str, Any] = {f"s{k}": (mf.Lengths(np.ones(1000 + k, np.int8)), 1.0 + k) for k in range(10)}
    recipe = mf.Recipe(data=mf.Mixture(stores), sequence=mf.Documents(), batch=mf.Batch(sequences=256))

    def draw(at: int) -> None:
        forget()
        course_of(recipe)
        draws_between(recipe, at, at + 256)

    took = _in_turn({"near": lambda: draw(0), "far": lambda: draw(_FAR)}, rounds=15)
    weights, count = np.random.default_rng(2).dirichlet(np.ones(100)), 10**5
    source, drawn = Interleaving(weights.tolist()).draws(0, count)
    behind = np.abs(drawn - weights[source] * np.arange(count)).max()
    ahead = np.abs(drawn + 1 - weights[source] * np.arange(1, count + 1)).max()
    return [
        Figure(
            name="order",
            what="256 draws of 10 sources at 10^12 : at 0",
            value=_ratio(took["far"], took["near"]),
            aim=_NOISE,
        ),
        Figure(
            name="order",
            what="drift of 100 sources over 10^5 draws",
            value=float(max(behind, ahead)),
            unit="sequences",
            aim=1.0,
        ),
    ]


def planner() -> list[Figure]:
    """Balance of packed steps, and what planning them takes."""
    lengths = _long_tail(4096)

    def planned(
        lengths: npt.NDArray[np.int64], num_ranks: int, least: int | None = None
    ) -> tuple[float, Any]:
        packing = mf.Packing(
            capacity=_CAPACITY, policy="dynamic_cp", cost=mf.CostModel(alpha=_ALPHA), microbatches=least
        )
        began = time.perf_counter()
        plan = plan_step(lengths, packing, dp=num_ranks, cp=1)
        return time.perf_counter() - began, (account_of(plan, packing), plan.num_microbatches)

    _, (account, count) = planned(lengths, 256)
    _, (more, _) = planned(lengths, 256, count + 2)
    seconds, _ = planned(_long_tail(16_384), 1024)
    documents = _long_tail(200_000).clip(max=_CAPACITY)
    began = time.perf_counter()
    _, bins = best_fit(documents, _CAPACITY)
    rate = documents.size / (time.perf_counter() - began)
    waste = 1 - documents.sum() / (bins * _CAPACITY)
    return [
        Figure(
            name="planner",
            what="work over time of 256 ranks (E), fewest microbatches",
            value=account.efficiency,
            aim=0.97,
            at_least=True,
        ),
        Figure(
            name="planner",
            what="the same, two microbatches more",
            value=more.efficiency,
            aim=0.99,
            at_least=True,
        ),
        Figure(
            name="planner", what="planning 16,384 sequences on 1,024 ranks", value=seconds, unit="s", aim=1.0
        ),
        Figure(
            name="planner",
            what=f"waste of best fit, 200,000 documents at {rate / 1e6:.1f} M/s",
            value=float(waste),
            aim=0.001,
        ),
    ]


def roles() -> list[Figure]:
    """The role table of a large job."""
    layout = mf.Layout.parse("tp8-cp4-dp32-pp16", ranks_per_node=8)
    fields = mf.Windows(4096).fields
    took = _in_turn({"share": lambda: list(mf.assign_roles(layout, mf.StageMap(pp=16), fields, "share"))}, 3)
    value = statistics.median(took["share"])
    return [Figure(name="roles", what="role table of 16,384 ranks", value=value, unit="s", aim=2.0)]


def read() -> list[Figure]:
    """Windows per second of CPU time on one thread, against copies out of a memory map.

    A user's own copy writes all four tensors for every batch; meshfeed writes tokens and labels.
    """
    length, count, batch = 4096, 4096, 32
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_corpus(prefix, count * length + 1)
        recipe = mf.Recipe(data=mf.open(prefix), sequence=mf.Windows(length), batch=mf.Batch(sequences=256))
        tokens = np.asarray(np.memmap(f"{prefix}.bin", np.uint16, "r"))

        def copied(written: int) -> None:
            for starts in np.random.default_rng(0).permutation(count).reshape(-1, batch) * length:
                rows, positions = np.empty((written, batch, length), np.int64), np.arange(length)
                for row, at in enumerate(starts.tolist()):
                    rows[0, row], rows[1, row] = tokens[at : at + length], tokens[at + 1 : at + length + 1]
                    if written == 3:
                        rows[2, row] = positions
                if written == 3:
                    np.ones((batch, length), np.float32)

        def fed() -> None:
            with mf.Feed(recipe, micro_batch_size=batch, prefetch=0) as feed:
                for step in feed:
                    for _ in step.microbatches:
                        pass
                    if step.index == count // 256 - 1:
                        return

        contestants = {"all": lambda: copied(3), "equal": lambda: copied(2), "fed": fed}
        took = _in_turn(contestants, rounds=7, clock=time.process_time)
    rate = count / statistics.median(took["fed"])
    return [
        Figure(name="read", what=what, value=_ratio(took[copy], took["fed"]), aim=0.7, at_least=True)
        for copy, what in (
            ("all", f"windows per CPU second on one thread ({rate:,.0f}) : a memory-map copy"),
            ("equal", "the same : a copy of tokens and labels alone, which is what meshfeed writes"),
        )
    ]


def delivery() -> list[Figure]:
    """Four processes as one tp group: bytes from storage for each byte consumed, collectives."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_corpus(prefix, 1 << 20)
        for name, most in _COLLECTIVES.items():
            done = ranks.run(str(prefix), "tp4", name)
            what = f"delivery {name}, four ranks: "
            found += [
                Figure(
                    name="delivery",
                    what=what + "bytes from storage : bytes consumed",
                    value=done.bytes_read / done.bytes_consumed,
                    aim=1.02,
                ),
                Figure(
                    name="delivery",
                    what=what + "collectives a microbatch",
                    value=done.collectives / done.num_microbatches,
                    aim=most,
                ),
            ]
    return found


def far() -> list[Figure]:
    """Waiting for storage with a fifth more than a loop needs, whose answers are sometimes 20 times late."""
    what = "waited after warm-up, storage at 1.2 x demand, 1 % of requests 20 x slow : time of a step"
    try:
        value, note = ranks.waited_far(), ""
    except mf.StoreError as error:
        value, note = None, str(error)
    return [Figure(name="far", what=what, value=value, aim=0.01, note=note)]


MEASURES: Mapping[str, Callable[[], list[Figure]]] = {
    "start": start,
    "order": order,
    "planner": planner,
    "roles": roles,
    "read": read,
    "delivery": delivery,
    "far": far,
}
_COLLECTIVES: Mapping[DeliveryName, float] = {"share": 0.0, "broadcast": 1.0}


def write_corpus(prefix: Path, num_tokens: int) -> None:
    """A .bin/.idx pair of documents of some 1,000 tokens."""
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 50_000, num_tokens).astype(np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in np.split(stream, np.arange(1000, num_tokens, 1000)):
            writer.add_document(document)


def _long_tail(count: int) -> npt.NDArray[np.int64]:
    drawn = np.random.default_rng(4).lognormal(6.5, 1.4, count)
    return drawn.astype(np.int64).clip(1, 8 * _CAPACITY)


def _in_turn(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each in each round, one after the other; a first round, not counted, warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            began = clock()
            run()
            if number:
                seconds[name].append(clock() - began)
    return seconds


def _ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to))
