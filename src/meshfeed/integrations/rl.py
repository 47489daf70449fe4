"""Drop-in functions for reinforcement learning frameworks, over the planner.

Each has the arguments and results of the function that it replaces, so that users only change an import:

    verl       rearrange_micro_batches, get_seqlen_balanced_partitions, get_reverse_idx
               of verl/utils/seqlen_balancing.py
    slime      build_dp_schedule of slime/utils/dp_schedule.py
    NeMo-RL    get_packer of nemo_rl/data/packing, which BatchedDataDict.shard_by_batch_size calls

No microbatch is empty, none with several rows exceeds its cap of tokens, and all ranks have equally many. A
row that exceeds the cap by itself is refused; under slime, it is alone in its microbatch. The frameworks move
rows and results themselves, by the indices that they get.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshfeed.arrays import Longs
from meshfeed.errors import PlanError
from meshfeed.plan import CostModel, Packing, StepPlan, plan_step
from meshfeed.plan.packing import step_time
from meshfeed.whole import whole

_COST = CostModel(alpha=25_100)
_MOST_TOKENS = np.iinfo(np.int32).max

MORE_COUNTS = 8
"""Equal packs are tried in the fewest microbatches, and in this many larger numbers."""


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    cost: CostModel = _COST,
) -> tuple[list[Any], list[list[int]]]:
    """verl: one rank's rows in microbatches of equal work.

    batch: a TensorDict with nested `input_ids`, or with `attention_mask` [rows, width].
    max_token_len: tokens that a microbatch can hold; unlike verl's own, it is never exceeded.
    dp_group: ranks that agree on the number of microbatches if same_micro_num_in_dp; None for all.
    num_batches_divided_by: the number is a multiple of this. min_num_micro_batch: it is at least this.
    use_dynamic_bsz_balance: the least work comes first and last, where a pipeline fills and drains.
    force_group_size: this many consecutive rows, such as the answers to one question, stay together, in
    order.
    cost: what a row costs.
    Returns the microbatches, and the rows of each. `get_reverse_idx` of all rows restores their order.
    Raises PlanError for a group longer than max_token_len, fewer groups than microbatches, or rows that do
    not divide into groups; if ranks agree on the number, all of them raise it.
    """
    select_rows = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    ids = batch["input_ids"]
    tokens = (ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)).tolist()
    cap = _count("max_token_len", max_token_len)
    quantum = _count("num_batches_divided_by", num_batches_divided_by or 1)
    least = _count("min_num_micro_batch", min_num_micro_batch or 1)
    size = _count("force_group_size", force_group_size)
    # a group is planned as one row, at the cost of equally long ones
    of_groups = [sum(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    window = None if cost.window is None else cost.window * size
    grouped = replace(cost, alpha=cost.alpha * size, window=window, overhead=cost.microbatch_overhead * size)
    packing = Packing(capacity=cap, cost=grouped)

    def plan(**asked: int) -> list[list[int]]:
        if len(tokens) % size:
            raise PlanError(f"{len(tokens)} rows do not divide into groups of force_group_size={size}")
        lengths = _lengths_of(of_groups)
        _check_fit(lengths, "max_token_len", cap, size)
        return packs_of_ranks(lengths, packing, quantum=quantum, **asked)

    if same_micro_num_in_dp and dist.is_initialized():
        kind = "rows" if size == 1 else f"groups of {size} rows"
        packs = _as_many_on_each(plan, least, of_groups, dp_group, kind)
    else:
        packs = plan(at_least=least)
    packs = [[row for group in pack for row in range(group * size, (group + 1) * size)] for pack in packs]
    if use_dynamic_bsz_balance:
        lengths = _lengths_of(tokens)
        work = np.array([cost.work(lengths[pack]).sum() for pack in packs])
        order = np.argsort(work, kind="stable").tolist()
        packs = [packs[at] for at in order[::2] + order[1::2][::-1]]
    return [select_rows(batch, pack) for pack in packs], packs


def _as_many_on_each(
    plan: Callable[..., list[list[int]]],
    least: int,
    tokens: list[int],
    group: dist.ProcessGroup | None,
    kind: str,
) -> list[list[int]]:
    """This rank's packs, their number the maximum over ranks. If one rank raises PlanError, all do."""
    packs: list[list[int]] = []
    refusal = None
    try:
        packs = plan(at_least=least)
    except PlanError as error:
        refusal = error
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor([len(packs), len(tokens), refusal is not None], device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    if refusal is not None:
        raise refusal
    counts = [tensor.tolist() for tensor in gathered]
    most = max(count for count, _, _ in counts)
    for rank, (_, num_rows, refused) in enumerate(counts):
        if refused:
            raise PlanError(f"rank {rank} of the group cannot pack its rows; it says why")
        if num_rows < most:
            raise PlanError(
                f"rank {rank} of the group: {num_rows} {kind} for {most} microbatches, which another rank "
                f"needs; give each rank more rows, or a larger max_token_len"
            )
    if missing := most - len(packs):
        as_many = plan(at_least=most, more=0)
        added = [list[int]() for _ in range(missing)]
        packs = as_many if len(as_many) == most else without_empty(packs + added, _lengths_of(tokens))
    return packs


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """verl: rows in parts of equal sums, for the ranks of a step.

    seqlen_list: tokens or work of each row. equal_size: each part has equally many rows.
    Returns the rows of each part, ascending. Raises PlanError for no part, fewer rows than parts, or a number
    of rows that equal sizes do not divide.
    """
    k_partitions = _count("k_partitions", k_partitions)
    num_rows = len(seqlen_list)
    if equal_size and num_rows % k_partitions:
        raise PlanError(
            f"{num_rows} rows in {k_partitions} parts of equal size; give a multiple of the parts"
        )
    numbers = [*map(whole, seqlen_list)]  # those of NumPy and torch would overflow in the sum
    unit = sum(numbers) // _MOST_TOKENS + 1  # sums of work exceed what a pack can count
    amounts = _lengths_of([int(number // unit) for number in numbers])
    packing = Packing(
        capacity=_MOST_TOKENS,
        cost=CostModel(alpha=1e15),  # linear in the amount
        max_sequences=num_rows // k_partitions if equal_size else None,
        microbatches=1,
    )
    plan = plan_step(amounts, packing, dp=k_partitions)
    return [sorted(part) for part in without_empty(_rows_of(plan, k_partitions, 1), amounts)]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """verl: the inverse of a permutation. result[idx_map[i]] is i, so results[result] is in input order."""
    return np.argsort(np.asarray(idx_map, np.int64)).tolist()


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    cost: CostModel = _COST,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """slime: which samples each data-parallel rank trains on, microbatch by microbatch, in each step.

    The arguments of slime, `args`, give `use_dynamic_batch_size` with `max_tokens_per_gpu`, or else
    `micro_batch_size` and `balance_data`; and `pipeline_model_parallel_size`, 1 if it is missing.
    train_parallel_config: `dp_size`, `cp_size`, `vpp_size`, `microbatch_group_size_per_vp_stage`.
    total_lengths, rollout_indices: tokens and rollout of each sample. global_batch_size: rollouts of a step;
        the last ones that fill no step are left out.
    cost: what a sample costs.
    Returns for each rank its samples, and the indices of each microbatch among them; for each step the number
    of microbatches of a rank, and the rollouts. A sample that is longer than the cap is alone, as in slime.
    Raises PlanError for fewer rollouts than a step has, fewer samples than microbatches, or microbatches of
    micro_batch_size samples that do not divide among the ranks.
    """
    sizes = ("dp_size", "cp_size", "vpp_size")
    dp, cp, vpp = (_count(name, train_parallel_config[name]) for name in sizes)
    group = "microbatch_group_size_per_vp_stage"
    quantum = _count(group, train_parallel_config[group]) if vpp > 1 else 1
    size = None if args.use_dynamic_batch_size else _count("micro_batch_size", args.micro_batch_size)
    if size is None:
        # context parallelism cuts no less than 2 tokens for each rank
        cap = _count("max_tokens_per_gpu", args.max_tokens_per_gpu, least=2 if cp > 1 else 1)
        packing = Packing(capacity=cap, cost=cost, oversize="truncate")
    else:
        policy = "balanced" if args.balance_data else "in_order"
        packing = Packing(capacity=_MOST_TOKENS, policy=policy, cost=cost, max_sequences=size)
    pp = _count("pipeline_model_parallel_size", getattr(args, "pipeline_model_parallel_size", 1))
    global_batch_size = _count("global_batch_size", global_batch_size)
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    rollouts = list(samples_of)
    num_steps = len(rollouts) // global_batch_size
    if not num_steps:
        raise PlanError(
            f"{len(rollouts)} rollouts: a step has global_batch_size={global_batch_size}; give more"
        )
    partitions: list[list[int]] = [[] for _ in range(dp)]
    microbatches: list[list[list[int]]] = [[] for _ in range(dp)]
    counts: list[int] = []
    for step in range(num_steps):
        chosen = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        samples = [sample for rollout in chosen for sample in samples_of[rollout]]
        fixed: dict[str, int] = {}
        if size is not None:
            fixed = {"at_least": len(samples) // (size * dp), "more": 0}
            if len(samples) % (size * dp * quantum):
                raise PlanError(
                    f"step {step}: {len(samples)} samples in microbatches of {size} do not divide among {dp} "
                    f"ranks, {quantum} at a time; change the sizes, or set use_dynamic_batch_size"
                )
        lengths = _lengths_of([total_lengths[sample] for sample in samples])
        packs = packs_of_ranks(lengths, packing, dp=dp, cp=cp, pp=pp, vpp=vpp, quantum=quantum, **fixed)
        counts.append(len(packs) // dp)
        for at, pack in enumerate(packs):
            own = partitions[at % dp]
            microbatches[at % dp].append(list(range(len(own), len(own) + len(pack))))
            own += [samples[row] for row in pack]
    return partitions, microbatches, counts, [global_batch_size] * num_steps


def get_packer(
    algorithm: object,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    cost: CostModel = _COST,
) -> Packer:
    """NeMo-RL: the packer of a batch's rows for all data-parallel ranks, for `shard_by_batch_size`.

    algorithm, collect_metrics: of NeMo-RL's own packers; without effect.
    bin_capacity: tokens of a microbatch, with the padding that the lengths include.
    min_bin_count: least number of microbatches on all ranks together.
    bin_count_multiple: the ranks; microbatch i goes to rank i modulo this. None for one rank.
    cost: what a row costs.
    """
    return Packer(
        bin_capacity=_count("bin_capacity", bin_capacity),
        num_ranks=_count("bin_count_multiple", bin_count_multiple or 1),
        min_bin_count=_count("min_bin_count", min_bin_count or 1),
        cost=cost,
    )


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs rows for NeMo-RL; see `get_packer`."""

    bin_capacity: int
    num_ranks: int
    min_bin_count: int
    cost: CostModel

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each microbatch; num_ranks consecutive ones run at the same time.

        sequence_lengths: tokens of each row. Raises PlanError for a row longer than bin_capacity, or fewer
        rows than microbatches.
        """
        lengths = _lengths_of(sequence_lengths)
        _check_fit(lengths, "bin_capacity", self.bin_capacity)
        packing = Packing(capacity=self.bin_capacity, cost=self.cost)
        at_least = -(-self.min_bin_count // self.num_ranks)
        return packs_of_ranks(lengths, packing, dp=self.num_ranks, at_least=at_least)


def packs_of_ranks(
    lengths: Longs,
    packing: Packing,
    *,
    dp: int = 1,
    cp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    at_least: int = 1,
    quantum: int = 1,
    more: int = MORE_COUNTS,
) -> list[list[int]]:
    """The rows of each pack, none empty: of all dp ranks in the first microbatch, then in the next.

    lengths: tokens of each row, at least 1; int64 [n]. at_least, quantum: least number of microbatches of a
    rank, and what the number is a multiple of. more: how many larger numbers are tried.
    Chooses between the planner's step and equal packs by the shorter step. With dp=1, other ranks plan for
    themselves, and are assumed to be as busy as the heaviest pack.
    """
    planned = partial(plan_step, lengths, dp=dp, cp=cp, pp=pp, vpp=vpp, quantum=quantum)
    if packing.policy == "in_order":
        return without_empty(_rows_of(planned(packing), dp, cp), lengths)
    chosen = at_least if at_least > 1 or not more else None
    found = [_rows_of(planned(replace(packing, microbatches=chosen)), dp, cp)]
    fewest = planned(replace(packing, microbatches=at_least)).num_microbatches
    for count in range(fewest, fewest + more * quantum + 1, quantum):
        # all packs in one microbatch, each on a rank of its own
        plan = plan_step(lengths, replace(packing, microbatches=1), dp=count * dp, cp=cp)
        if plan.num_microbatches == 1:
            packs = _rows_of(plan, count * dp, cp)
            found.append(sorted(packs, key=lambda pack: -float(packing.cost.work(lengths[pack]).sum())))

    def time(packs: list[list[int]]) -> float:
        loads = np.array([packing.cost.work(lengths[pack]).sum() for pack in packs]).reshape(-1, dp)
        return step_time(loads if dp > 1 else np.full_like(loads, loads.max()), packing, (pp - 1) / vpp)

    return without_empty(min(found, key=lambda packs: (len(packs) > lengths.size, time(packs))), lengths)


def _rows_of(plan: StepPlan, dp: int, cp: int) -> list[list[int]]:
    # the rows of rank 0 in the first microbatch, of rank 1, ..., of rank 0 in the next
    pack = plan.microbatch.astype(np.int64) * dp + plan.first_rank // cp
    order, counts = np.argsort(pack, kind="stable"), np.bincount(pack, minlength=plan.num_microbatches * dp)
    return [rows.tolist() for rows in np.split(order, np.cumsum(counts)[:-1])]


def without_empty(packs: list[list[int]], lengths: Longs) -> list[list[int]]:
    """The same packs, where each empty one gets the shortest row of those that are not alone.

    lengths: tokens of each row; int64 [n]. Raises PlanError for fewer rows than packs.
    """
    if lengths.size < len(packs):
        raise PlanError(
            f"{lengths.size} rows for {len(packs)} microbatches on all ranks, and none may be empty; give "
            f"more rows, or use fewer ranks or a smaller multiple of microbatches"
        )
    for empty in (pack for pack in packs if not pack):
        _, row, donor = min((int(lengths[row]), row, pack) for pack in packs if len(pack) > 1 for row in pack)
        donor.remove(row)
        empty.append(row)
    return packs


def _count(name: str, given: Any, least: int = 1) -> int:
    """A framework's argument. Raises PlanError naming it unless it is a whole number from `least`."""
    if not isinstance(given, int | float | np.integer) or not float(given).is_integer() or given < least:
        raise PlanError(f"{name}={given!r}: give a whole number from {least}")
    return int(given)


def _check_fit(lengths: Longs, name: str, most: int, size: int = 1) -> None:
    """Raises PlanError for a row, or a group of size rows, that is longer than a microbatch.

    name: the framework's, of `most`.
    """
    if (over := np.flatnonzero(lengths > most)).size:
        first, kind = int(over[0]), "rows" if size == 1 else "groups"
        told = f"row {first}" if size == 1 else f"rows {first * size} to {(first + 1) * size - 1}"
        raise PlanError(
            f"{told}: {lengths[first]} tokens, and {name}={most} ({over.size} such {kind}); raise it, or "
            f"truncate the rows"
        )


def _lengths_of(lengths: Sequence[int]) -> Longs:
    """Tokens of each row, at least 1; int64 [n]. Raises PlanError without rows, or for another value."""
    whole = np.array(lengths)
    if not whole.size:
        raise PlanError("there are no rows; give at least one for each microbatch")
    wrong = np.flatnonzero((whole < 0) | (whole != np.floor(whole)))
    if wrong.size:
        raise PlanError(f"row {wrong[0]}: {whole[wrong[0]]} tokens; a length is a whole number from 0")
    # the planner leaves empty rows out, but these frameworks need every row
    return np.maximum(whole.astype(np.int64), 1)
