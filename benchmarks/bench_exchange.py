"""Rerouting items whose lengths are known only once they are read: one buffer against a collective per key.

The usual way is that of Megatron-core's HybridCPDataLoaderWrapper: its own class gathers lengths and
reroutes, on the CPU (what it asks of CUDA is answered by the CPU). Samples are then packed by `torch.cat`,
key by key. Where middle pipeline stages need lengths, they are broadcast as Megatron's development branch
does it: a count, then one float32 tensor of number of microbatches, token sums and cu_seqlens. meshfeed
gathers lengths, reroutes all keys in one buffer, and builds its fields; position ids it makes from lengths,
where the other way moves them.

Both plan with meshfeed's planner, and end with the same packed tokens, labels, loss masks and position ids,
which is checked. Eight processes over gloo on one machine. A step is timed from the end of the one before
it to its last microbatch, on the slowest rank. `step.stats` is read after that: it accounts for the plan's
balance and padding, which the other way does not compute. CPU is that of all ranks together, their gloo
threads and the system's part included: where there are fewer cores than ranks, time is hardly anything else.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import numpy as np
import torch
import torch.distributed as dist
from measure import Row, from_ranks

import meshfeed as mf

RANKS, ROUNDS, CAPACITY, AIM = 8, 5, 16_384, 0.5
COUNT = 64  # items that each data-parallel rank gives to a step
CASES = ("dp8", "dp8, short items", "dp8, short items, 8 keys", "dp2-pp4, short items")
PEER = "Megatron-core's reroute by key"
FURTHER = ("advantages", "log_probs", "old_log_probs", "returns")
ENDS = ("first", "last")  # both ways give the ends of the pipeline all keys, and the middle lengths alone
KEYS = mf.exchange.Keys(
    mf.Field(name="tokens", dtype="int64", stages=ENDS, split=True),
    mf.Field(name="labels", dtype="int64", stages=ENDS, split=True),
    mf.Field(name="loss_mask", dtype="float32", stages=ENDS, split=True),
)
FURTHER_KEYS = (mf.Field(name=name, dtype="float32", stages=ENDS, split=True) for name in FURTHER)
EIGHT_KEYS = mf.exchange.Keys(*KEYS.declared, *FURTHER_KEYS)
PACKING = mf.Packing(capacity=CAPACITY, policy="in_order")


def measured(short: bool) -> Iterator[Row]:
    """Every case."""
    cases, steps, rounds = (CASES[1:2], 3, 1) if short else (CASES, 12, ROUNDS)
    given = from_ranks(rank_main, RANKS, len(cases), cases, steps, rounds)
    for case, taken in zip(cases, given, strict=True):
        yield from rows_of(case, taken)


def rows_of(case: str, taken: dict[str, dict[str, Any]]) -> Iterator[Row]:
    """Ratios of times, and collectives."""
    usual, ours = taken[PEER], taken["meshfeed"]
    for name, of in (("median time of a step", "seconds"), ("CPU time of all ranks in a step", "cpu_s")):
        yield Row(
            name=f"{name}, {case}",
            against=PEER if "pp" not in case else f"{PEER}, and its broadcast of lengths",
            value=statistics.median(
                float(np.median(a) / np.median(b)) for a, b in zip(ours[of], usual[of], strict=True)
            ),
            aim=AIM,
        )
    for name, of in (("collectives in a step", "collectives"), ("bytes of rank 0 in a step", "bytes")):
        yield Row(name=f"{name}, {case}", against=PEER, value=ours[of] / usual[of])


def items_of(owner: int, step: int, case: str) -> list[dict[str, torch.Tensor]]:
    """Items of long-tailed lengths, from 16 tokens to the capacity; short ones have a sixteenth."""
    rng = np.random.default_rng([owner, step])
    lengths = np.exp(rng.normal(6.5, 1.1, COUNT)).astype(int).clip(16, CAPACITY)
    made: list[dict[str, torch.Tensor]] = []
    for length in (lengths // 16 + 1 if "short" in case else lengths).tolist():
        tokens = torch.from_numpy(rng.integers(0, 50_000, length))
        mask = torch.ones(length)
        item = {
            "tokens": tokens,
            "labels": tokens + 1,
            "loss_mask": mask,
            "position_ids": torch.arange(length),
        }
        made.append(item | {name: mask + 1 for name in FURTHER if "8 keys" in case})
    return made


class Counted:
    """Collectives of torch.distributed, counted; bytes are those of the tensors that are passed."""

    def __init__(self) -> None:
        self.calls = self.num_bytes = 0
        for name in ("all_gather", "all_to_all_single", "broadcast"):
            setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [*args, *kwargs.values()]
            tensors += [each for arg in args if isinstance(arg, list) for each in arg]
            self.calls += 1
            self.num_bytes += sum(
                t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)
            )
            return call(*args, **kwargs)

        return counted


class Usual:
    """Megatron-core's wrapper, with the plan given."""

    def __init__(self, layout: mf.Layout, groups: dict[str, Any], counted: Counted) -> None:
        from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper

        self.layout, self.counted, self.pp_group = layout, counted, groups["pp"]
        self.coord = layout.coord(dist.get_rank())
        config = SimpleNamespace(max_seqlen_per_dp_cp_rank=CAPACITY)
        members = SimpleNamespace(dp_cp=groups["dp"], dp=groups["dp"], tp=groups["tp"])
        self.wrapper = HybridCPDataLoaderWrapper(None, config, members)

    def step(self, items: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Each microbatch: packed keys, and on middle stages cu_seqlens alone."""
        packs: list[dict[str, torch.Tensor]] = []
        if self.coord.pp in (0, self.layout.pp - 1):
            lengths = torch.tensor([len(item["tokens"]) for item in items], dtype=torch.int32)
            # 0.16.1 takes global ranks for places in the group, which holds without pipeline stages only
            torch.distributed.get_process_group_ranks = lambda group: list(range(group.size()))
            gathered, offsets = self.wrapper.get_global_seqlens(lengths)
            named, mine = self.wrapper.get_global_id_seqlens(len(items), offsets, gathered)
            plan = mf.plan.plan_step(gathered, PACKING, dp=self.layout.dp)
            groups = [
                [
                    np.flatnonzero((plan.microbatch == m) & (plan.first_rank == d)).tolist()
                    for d in range(plan.num_ranks)
                ]
                for m in range(plan.num_microbatches)
            ]
            got = self.wrapper.reroute_samples_to_hdp_ranks(items, mine, named, groups, offsets)
            for group in groups:
                own = [got[number] for number in group[self.coord.dp]]
                pack = {key: torch.cat([each[key] for each in own]) for key in items[0]} if own else {}
                ends = np.cumsum([0, *(gathered[number] for number in group[self.coord.dp])])
                packs.append(pack | {"cu_seqlens": torch.from_numpy(ends.astype(np.int32))})
        if self.layout.pp > 2:
            packs = self._tell(packs)
        return packs

    def _tell(self, packs: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        source = self.layout.group_of(dist.get_rank(), "pp").tolist()[0]
        told = torch.zeros(0)
        if self.coord.pp == 0:
            head = [len(packs), sum(int(p["cu_seqlens"][-1]) for p in packs), 0.0]
            flat = [x for p in packs for x in (torch.tensor([len(p["cu_seqlens"])]), p["cu_seqlens"])]
            told = torch.cat([torch.tensor(head), *(each.float() for each in flat)])
        size = torch.tensor([told.numel()], dtype=torch.int32)
        dist.broadcast(size, source, group=self.pp_group)
        told = told if self.coord.pp == 0 else torch.empty(int(size))
        dist.broadcast(told, source, group=self.pp_group)
        if packs:
            return packs
        made, at = list[dict[str, torch.Tensor]](), 3
        for _ in range(int(told[0])):
            count = int(told[at])
            made.append({"cu_seqlens": told[at + 1 : at + 1 + count].int()})
            at += 1 + count
        return made


def rank_main(rank: int, port: int, results: Any, cases: tuple[str, ...], steps: int, rounds: int) -> None:
    """One process: every case, and in each both contestants in turn."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    counted = Counted()
    for case in cases:
        taken = measure_case(case, rank, steps, rounds, counted)
        if rank == 0:
            results.put(taken)
    dist.destroy_process_group()


def measure_case(
    case: str, rank: int, steps: int, rounds: int, counted: Counted
) -> dict[str, dict[str, Any]]:
    """Seconds of every step, and CPU seconds of all ranks in a step, by contestant and round."""
    layout = mf.Layout.parse(case.split(",")[0])
    coord, ends = layout.coord(rank), np.isin(layout.coords()[:, 3], (0, layout.pp - 1))
    owns, owners = bool(ends[rank]), None if layout.pp == 1 else np.flatnonzero(ends).tolist()
    batches = [items_of(coord.dp, step, case) if owns else [] for step in range(steps + 1)]
    groups = {dims: own_group(layout, dims, rank) for dims in ("dp", "pp", "tp")}
    given = [
        [{name: item[name] for name in item if name != "position_ids"} for item in items] for items in batches
    ]
    usual, keys = Usual(layout, groups, counted), EIGHT_KEYS if "8 keys" in case else KEYS
    iterator = given * (rounds + 1) if owns else None
    exchange = mf.Exchange(
        iterator, layout, packing=PACKING, keys=keys, transport=mf.Transport(readers=owners)
    )
    steps_taken: list[mf.Step] = []
    contestants = {  # each lives through all rounds, as through a training run
        PEER: map(usual.step, batches * (rounds + 1)),
        "meshfeed": exchange_steps(exchange, steps_taken),
    }
    taken: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_s": []} for name in contestants}
    for round_ in range(rounds + 1):
        for name, contestant in contestants.items():
            dist.barrier()
            packed, ends, cpu = list[Any](), list[float](), list[float]()
            for made in islice(contestant, len(batches)):
                ends.append(time.perf_counter())
                cpu.append(cpu_s())
                packed += [] if round_ else made
                if len(ends) == 1:  # caches are the other's, and at first peers are met: not part of a step
                    counted.calls = counted.num_bytes = 0
                    steps_taken.clear()
            for step in steps_taken:
                counted.calls += step.stats.collectives
                counted.num_bytes += step.stats.delivered_bytes
            steps_taken.clear()
            took, used = torch.from_numpy(np.diff(ends)), torch.tensor((cpu[-1] - cpu[0]) / steps)
            figures = taken[name] | {
                "collectives": counted.calls / steps,
                "bytes": counted.num_bytes / steps,
            }
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(used)
            taken[name] = figures if round_ else figures | {"packed": packed}
            if round_:
                figures["seconds"].append(took.numpy())
                figures["cpu_s"].append(used.item())
    for contestant in contestants.values():
        if next(contestant, None) is not None:  # an Exchange ends with its peers
            raise SystemExit(f"rank {rank}: more steps than were given")
    ours, theirs = (taken[name].pop("packed") for name in ("meshfeed", PEER))
    for mine, its in zip(ours, theirs, strict=True):
        names = its.keys() if "tokens" in its else ["cu_seqlens"] * (not mine.is_dummy)
        if not all(torch.equal(mine[name].reshape(-1), its[name].reshape(-1)) for name in names):
            raise SystemExit(f"rank {rank}: the two ways ended with other bytes")
    count = torch.tensor(sum(len(item["tokens"]) for items in batches for item in items))
    dist.all_reduce(count)
    for figures in taken.values():
        figures["tokens"] = int(count) / len(batches) / (layout.tp * len({0, layout.pp - 1}))
    return taken


def cpu_s() -> float:
    """Seconds that this process has computed so far, all its threads and the system's part."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def exchange_steps(exchange: mf.Exchange, taken: list[mf.Step]) -> Iterator[list[Any]]:
    """The same through an Exchange, on the calling thread. taken: gets its steps."""
    with exchange:
        for step in exchange:
            taken.append(step)
            yield list(step.microbatches)


def own_group(layout: mf.Layout, dims: str, rank: int) -> Any:
    """This rank's process group along some dimensions; every rank makes all of them."""
    made = [(ranks, dist.new_group(ranks)) for ranks in layout.groups(dims).tolist()]
    return next(group for ranks, group in made if rank in ranks)


if __name__ == "__main__":
    measure.main(__doc__, measured)
