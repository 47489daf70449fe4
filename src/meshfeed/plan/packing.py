"""What a user chooses: what a sequence costs, which cp groups there are, how packs are made.

And what follows for a step: the room of its ranks, and the rows that sequences become.

A transformer layer spends `2 P s` FLOPs on its matrices and `4 h` on each (query, key) pair, with P the
matmul parameters that a token meets and h the attention width. A causal sequence has s(s+1)/2 pairs, so in
units of `2 h` the layer costs `alpha s + s^2` with `alpha = P / h`: the unit of every load in a plan.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Floats, Ints, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import numbered
from meshfeed.plan.types import Align, CpSplit, PackShape, check_split
from meshfeed.whole import is_number, is_whole, settle, whole

OVERHEAD_TOKENS = 200
"""Fixed cost of a microbatch, in the matmuls of this many tokens.

Least squares of 31 layer times of 8,192 tokens and more on one H200 (forward and backward, Llama-8B-like):
`ms = 2.2e-3 T + 8.8e-8 sum_sq + 0.43`, so alpha 25,100 and overhead 4.96e6, which is 198 alpha.
"""


def attended_pairs(lengths: npt.ArrayLike, window: int | None = None) -> Longs:
    """(query, key) pairs of causal attention, including a token with itself; int64, the shape of `lengths`.

    window: a token sees itself and the window - 1 tokens before it; None for all before it.
    s(s+1)/2 up to the window, `w s - w(w-1)/2` beyond. Exact for lengths below 2**31.
    """
    tokens = np.asarray(lengths, np.int64)
    full = tokens if window is None else np.minimum(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * full


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The parameters of a transformer that decide its FLOPs.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_heads, num_kv_heads: query heads; key and value heads (None: as many).
        head_dim: width of one head; None for hidden_size / num_heads.
        ffn_size: width of the feed-forward layer, or of one expert.
        ffn_matrices: 3 for a gated feed-forward, 2 for a plain one.
        active_experts: experts that process a token, including shared ones.
        vocab_size: width of the output layer; 0 leaves it out.
        window: sliding-window attention; None for full causal attention.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_matrices: int = 3
    active_experts: int = 1
    vocab_size: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        settle(self)
        for name in ("num_layers", "hidden_size", "num_heads", "ffn_size", "ffn_matrices", "active_experts"):
            if not is_whole(getattr(self, name)):
                raise PlanError(f"ModelShape({name}={getattr(self, name)!r}): a whole number, at least 1")
        for name in ("num_kv_heads", "head_dim", "window"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise PlanError(f"ModelShape({name}={value!r}): a whole number, at least 1, or None")
        if not is_whole(self.vocab_size, 0):
            raise PlanError(
                f"ModelShape(vocab_size={self.vocab_size!r}): a whole number, or 0 to leave it out"
            )

    @property
    def attention_width(self) -> int:
        """Query heads times head width: h."""
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @property
    def layer_matmul_params(self) -> int:
        """Matmul parameters of one layer that one token meets: P."""
        head_dim = self.attention_width // self.num_heads
        kv_width = (self.num_kv_heads or self.num_heads) * head_dim
        attention = 2 * self.hidden_size * (self.attention_width + kv_width)
        return attention + self.ffn_matrices * self.hidden_size * self.ffn_size * self.active_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Load of a sequence of s tokens on each rank of a cp group of g: `(alpha s + q(s)) / g`.

    `q(s) = s^2` for causal attention. With a sliding window w it continues as `2 w s - w^2` past s = w: twice
    the attended pairs less min(s, w), which joins s^2 at w with the same slope.

    Attributes:
        alpha: matmul work of a token over half the attention work of a pair, in tokens; > 0.
        window: sliding window in tokens, or None.
        overhead: fixed cost of a microbatch in the same unit, for reading weights, launching kernels and
            pipeline transfers; >= 0. None for the cost of the matmuls of 200 tokens, measured on one H200 for
            a Llama-8B-like layer. Both grow with the weights, so other shapes are similar.
        ring_tokens: tokens per rank below which passing keys and values around the group outlasts the
            attention that hides it: 2 F h_kv / (h_q B) for F FLOP/s and B bytes/s, some 670 within a node and
            6,000 between nodes on an H100. A split sequence then costs
            `(alpha s + max(q(s), ring_tokens g s)) / g`. 0: not counted.
        patch_tokens: tokens whose matmul work is that of a patch in the encoders of images, audio and video:
            their parameters over the language model's, here 0.7B over 7B. Measured on one H200, a patch of
            Qwen2.5-VL costs 0.33 tokens, since its narrow layers reach fewer FLOP/s.

    Raises PlanError for alpha <= 0, window < 1 or a negative overhead, ring_tokens or patch_tokens.
    """

    alpha: float
    window: int | None = None
    overhead: float | None = None
    ring_tokens: float = 0.0
    patch_tokens: float = 0.1

    def __post_init__(self) -> None:
        if not is_number(self.alpha) or self.alpha == 0:
            raise PlanError(f"alpha={self.alpha!r}: a token's matmul work, above 0; see CostModel.of_shape")
        settle(self)
        if self.window is not None and not is_whole(self.window):
            raise PlanError(f"window={self.window!r}: a token sees at least itself; None for full attention")
        for name in ("overhead", "ring_tokens", "patch_tokens"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise PlanError(f"{name}={value!r}: a cost is a number, 0 or more")

    @property
    def microbatch_overhead(self) -> float:
        """`overhead`, or its value for None."""
        return OVERHEAD_TOKENS * self.alpha if self.overhead is None else self.overhead

    @classmethod
    def of_shape(
        cls,
        shape: ModelShape,
        *,
        encoder: ModelShape | None = None,
        overhead: float | None = None,
        ring_tokens: float = 0.0,
    ) -> CostModel:
        """The model's own FLOPs: alpha = P / h. Llama-3-8B: 218,103,808 / 4,096 = 53,248.

        encoder: of images, audio or video; patch_tokens is of its FLOPs.
        """
        alpha = shape.layer_matmul_params / shape.attention_width
        made = cls(alpha=alpha, window=shape.window, overhead=overhead, ring_tokens=ring_tokens)
        if encoder is None:
            return made
        params = [each.num_layers * each.layer_matmul_params for each in (encoder, shape)]
        return replace(made, patch_tokens=params[0] / params[1])

    @classmethod
    def fit(cls, total_tokens: npt.ArrayLike, sum_sq: npt.ArrayLike, ms: npt.ArrayLike) -> CostModel:
        """Least squares of measured layer times, `ms = a T + b sum_sq + c`; alpha = a / b, overhead = c / b.

        total_tokens, sum_sq, ms: tokens, sum of squared lengths and time of each measurement, [k], k >= 3.
        Each row is weighted by its time, so that the fit minimises relative errors.
        Raises PlanError for fewer or degenerate measurements, or a fit with a or b <= 0.
        """
        columns = [np.asarray(column, np.float64).ravel() for column in (total_tokens, sum_sq, ms)]
        tokens, squares, times = columns
        if not tokens.size == squares.size == times.size or times.size < 3:
            raise PlanError(
                f"{[c.size for c in columns]} measurements: equal columns of at least 3 are needed"
            )
        if not all(np.isfinite(column).all() for column in columns) or (times <= 0).any():
            raise PlanError("every measurement is finite and every time above 0 ms")
        rows = np.stack((tokens, squares, np.ones_like(tokens)), axis=1) / times[:, None]
        scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)
        solution, _, rank, _ = np.linalg.lstsq(rows / scale, np.ones_like(times), rcond=None)
        a, b, c = solution / scale
        if rank < 3 or a <= 0 or b <= 0:
            raise PlanError(
                f"fit a={a:.3g}, b={b:.3g}: vary tokens and lengths more, so that both terms show"
            )
        return cls(alpha=float(a / b), overhead=max(float(c / b), 0.0))

    @classmethod
    def from_csv(cls, lines: Iterable[str]) -> CostModel:
        """`fit` on a table of a layer's times, with the columns total_tokens, sum_sq and ms_layer.

        lines: an open file, or its lines. Raises PlanError for another table.
        """
        try:
            rows = list(csv.DictReader(lines))
            columns = [[float(row[name]) for row in rows] for name in ("total_tokens", "sum_sq", "ms_layer")]
        except (KeyError, TypeError, ValueError, csv.Error) as bad:
            raise PlanError(
                f"not a table of layer times ({bad!r}); it has columns total_tokens, sum_sq, ms_layer"
            ) from bad
        return cls.fit(*columns)

    def work(self, lengths: npt.ArrayLike) -> Floats:
        """Load of each sequence on one rank that has it whole; float64, the shape of `lengths`."""
        tokens = np.asarray(lengths, np.float64)
        full = tokens if self.window is None else np.minimum(tokens, self.window)
        return self.alpha * tokens + full * (2 * tokens - full)

    def load(self, lengths: npt.ArrayLike, cp_size: npt.ArrayLike) -> Floats:
        """Load of each sequence on each rank of its cp group; float64, lengths and cp_size broadcast."""
        tokens, size = np.asarray(lengths, np.float64), np.asarray(cp_size, np.float64)
        whole = self.work(tokens)
        if self.ring_tokens:
            quadratic = whole - self.alpha * tokens
            whole = whole + np.where(size > 1, np.maximum(self.ring_tokens * size * tokens - quadratic, 0), 0)
        return whole / size

    def reach(self, work: npt.ArrayLike, cp_size: npt.ArrayLike) -> Floats:
        """The longest sequence, in tokens, whose load on a cp group times the group's size is at most `work`.

        The inverse of `load * cp_size`; work and cp_size broadcast; float64, 0 where work <= 0.
        """
        budget, size = np.maximum(np.asarray(work, np.float64), 0), np.asarray(cp_size, np.float64)
        # the root of s^2 + alpha s = work, in the form that loses no digits if work << alpha^2
        tokens = 2 * budget / (self.alpha + np.sqrt(self.alpha * self.alpha + 4 * budget))
        if self.window is not None:
            beyond = (budget + self.window**2) / (self.alpha + 2 * self.window)
            tokens = np.where(tokens > self.window, beyond, tokens)
        if self.ring_tokens:
            exposed = budget / (self.alpha + self.ring_tokens * size)
            tokens = np.where(size > 1, np.minimum(tokens, exposed), tokens)
        return tokens * (1 + 1e-12)


def cp_sizes(num_ranks: int, *, powers: bool = False) -> tuple[int, ...]:
    """The cp group sizes that a plan may use on `num_ranks` dp_cp ranks, ascending.

    12 -> (1, 2, 4, 12): multiply by the prime factors of num_ranks, smallest first. Each divides the next, so
    they nest: blocks laid side by side, widest first, are then aligned whatever their number.
    powers: 12 -> (1, 2, 4, 8, 12), powers of two and all ranks: narrower groups for long sequences. The
    number of ranks need not be a multiple of the largest power. Ranks past its last whole block are in no
    group of that size: rank 6 of 7 is in groups of 1 and 7 only, so ranks differ in the keys of
    `feed.cp_groups`. Make process groups with `use_local_synchronization=True`; a loop in which all ranks
    take part would hang.
    Raises PlanError for num_ranks < 1.
    """
    if num_ranks < 1:
        raise PlanError(f"num_ranks={num_ranks}: a step is planned for at least one rank")
    if powers:
        return (*(1 << i for i in range((num_ranks - 1).bit_length())), num_ranks)
    sizes, left, prime = [1], num_ranks, 2
    while left > 1:
        while left % prime == 0:
            sizes.append(sizes[-1] * prime)
            left //= prime
        # a rest beyond the square root is prime
        prime = prime + 1 if (prime + 1) ** 2 <= left else left
    return tuple(sizes)


def check_sizes(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The sizes in ascending order, once each.

    Each divides the next, and the first and the last divide num_ranks. If the last is num_ranks, only the
    first must divide it, since no other block is beside that one. Raises PlanError for other sizes.
    """
    ordered = tuple(sorted(set(map(whole, sizes))))
    if not ordered or not all(map(is_whole, ordered)):
        raise PlanError(f"cp_sizes={tuple(sizes)}: give at least one size, each a whole number from 1 on")
    beside = [pair for pair in pairwise(ordered) if pair[1] != num_ranks]
    for size, wider in (*beside, (ordered[0], num_ranks), (ordered[-1], num_ranks)):
        if wider % size:
            raise PlanError(
                f"cp_sizes={tuple(sizes)}: {size} does not divide {wider}; give sizes of which each divides "
                f"the next and the last divides {num_ranks}, or {num_ranks} itself after them"
            )
    return ordered


def cp_groups(num_ranks: int, sizes: Sequence[int] | None = None) -> dict[int, Longs]:
    """Every cp group of these sizes, so that all are made once, at the start.

    Returns size -> dp_cp ranks of its aligned blocks, int64 [num_ranks // size, size]; sizes ascending. If a
    size does not divide num_ranks, the last ranks are in none of its blocks.
    sizes: those allowed; None for `cp_sizes(num_ranks)`. Plans under `ring_tokens` use powers of two by
    default: `feed.cp_groups` has the groups that a Feed's plans can ask for.
    """
    allowed = cp_sizes(num_ranks) if sizes is None else check_sizes(sizes, num_ranks)
    return {size: np.arange(num_ranks // size * size).reshape(-1, size) for size in allowed}


Policy = Literal["in_order", "balanced", "dynamic_cp"]
"""in_order: packs filled in stream order at the layout's cp (Megatron's dp_balanced).
balanced: equal work on every rank at the layout's cp.
dynamic_cp: equal work on every rank, each sequence on a cp group as narrow as that allows."""

Oversize = Literal["error", "truncate", "split", "drop"]
"""What happens to a sequence that no cp group can hold."""

TOLERANCE = 0.01
"""How far above the ideal a step may be, relative, before wider groups or other numbers of microbatches are
tried."""

_KINDS: tuple[tuple[str, type, str], ...] = (
    ("cost", CostModel, "a CostModel, such as CostModel(alpha=25_100)"),
    ("align", Align, "an Align, such as Align(pack=128)"),
    ("fixed_shapes", bool, "True or False"),
)

_COUNTS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("capacity", (), "a whole number of tokens, at least 1"),
    ("max_sequences", (None,), "a whole number, at least 1, or None for any"),
    (
        "microbatches",
        (None, "fewest"),
        "a whole number, at least 1; or 'fewest', or None to let the plan choose",
    ),
    ("quantum", (None,), "a whole number, at least 1, or None for what the pipeline takes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a step's sequences become packs.

    Attributes:
        capacity: padded tokens that a rank can hold in one microbatch.
        policy: see `Policy`.
        cost: what a sequence costs. The default was measured on one H200 for a Llama-8B-like layer.
        align: multiples that padding must reach.
        max_sequences: sequences that a pack can hold; None for any number.
        fixed_shapes: give all packs on cp groups of one size the same shape, for CUDA graphs and compiled
            models: `capacity` tokens on each rank, rounded down to the alignment, max_sequences + 2 entries
            in cu_seqlens, one max_seqlen.
            A dummy sequence at the end fills the rest of the pack.
        oversize: see `Oversize`; too long is more than capacity times the widest cp group.
        microbatches: how many a step has. None: the number with the shortest predicted step. "fewest": as few
            as hold the batch. A number: that many, or more if the batch needs them. Unless given a number,
            fixed_shapes takes the fewest, since a pack of fixed shape always costs its capacity, and in_order
            as many as the packs need that it makes one after the other.
        quantum: the number of microbatches is a multiple of this; None for pp with virtual stages, else 1. An
            interleaved pipeline takes microbatches in groups of this size.
        cp_sizes: group sizes for dynamic_cp, each a divisor of the next and the last of dp * cp: (1, 2, 4, 8)
            keeps every group within a node of eight. If the last is dp * cp, only the first must divide it.
            None for `cp_sizes(dp * cp)`, powers of two and all ranks if the cost has ring_tokens.
    """

    capacity: int
    policy: Policy = "balanced"
    cost: CostModel = field(default_factory=lambda: CostModel(alpha=25_100))
    align: Align = field(default_factory=Align)
    max_sequences: int | None = None
    fixed_shapes: bool = False
    oversize: Oversize = "error"
    microbatches: int | Literal["fewest"] | None = None
    cp_sizes: tuple[int, ...] | None = None
    quantum: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("policy", Policy), ("oversize", Oversize)):
            if getattr(self, name) not in get_args(choices):
                raise PlanError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(get_args(choices))}"
                )
        settle(self)
        for name, kind, wanted in _KINDS:
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"{name}={getattr(self, name)!r}: give {wanted}")
        for name, others, wanted in _COUNTS:
            value = getattr(self, name)
            if value not in others and not is_whole(value):
                raise PlanError(f"{name}={value!r}: {wanted}")
        if self.fixed_shapes and self.max_sequences is None:
            raise PlanError(
                "fixed_shapes=True: cu_seqlens have as many entries as max_sequences; give that too"
            )
        if self.cp_sizes is not None and not (
            isinstance(self.cp_sizes, (tuple, list)) and all(map(is_whole, self.cp_sizes))
        ):
            raise PlanError(
                f"cp_sizes={self.cp_sizes!r}: give whole numbers, such as (1, 2, 4), or None for any"
            )
        if self.cp_sizes is not None and self.policy != "dynamic_cp":
            raise PlanError(
                f"cp_sizes={self.cp_sizes} with policy={self.policy!r}: only dynamic_cp chooses sizes"
            )


def asked_microbatches(packing: Packing) -> int:
    """The number that a packing asks for; 0 if it leaves that to the plan."""
    return 0 if packing.microbatches in (None, "fewest") else int(packing.microbatches)


def sizes_of(packing: Packing, num_ranks: int) -> tuple[int, ...]:
    """The cp group sizes that dynamic_cp may use; see `Packing.cp_sizes`.

    Raises PlanError for cp_sizes that do not nest.
    """
    if packing.cp_sizes is not None:
        return check_sizes(packing.cp_sizes, num_ranks)
    return cp_sizes(num_ranks, powers=packing.cost.ring_tokens > 0)


def shape_of(packing: Packing) -> PackShape | None:
    """The shape of every pack, if they all have one."""
    if not packing.fixed_shapes or packing.max_sequences is None:
        return None
    return PackShape(capacity=packing.capacity, max_sequences=int(packing.max_sequences))


def step_time(loads: Floats, packing: Packing, bubble_share: float) -> float:
    """How long a step takes, in units of load: ranks meet in every microbatch, so the largest loads count.

    loads: work of each rank in each microbatch; float64 [num_microbatches, num_ranks]. bubble_share: the
    pipeline idles for this many times the largest microbatch.
    """
    tops = loads.max(axis=1, initial=0.0)
    bubble, overhead = bubble_share * tops.max(initial=0.0), len(loads) * packing.cost.microbatch_overhead
    return float(tops.sum() + bubble + overhead)


# -- what follows for a step: the room of its ranks, and the rows that sequences become ---------------------


@dataclass(frozen=True)
class Room:
    """What the ranks of one microbatch can hold.

    Attributes:
        num_ranks: dp_cp ranks.
        sizes: cp group sizes, ascending; see `packing.check_sizes`.
        limits: padded tokens that a whole group of each size can hold, ascending: the capacity of its ranks,
            rounded down to the alignment, but no more than any wider group holds.
        align: padding multiples.
        max_sequences: sequences that a group of any size can hold.
    """

    num_ranks: int
    sizes: tuple[int, ...]
    limits: tuple[int, ...]
    align: Align
    max_sequences: int

    @cached_property
    def size_of(self) -> Longs:
        """The sizes, by index; int64 [num_sizes]."""
        return np.array(self.sizes)

    @cached_property
    def limit_of(self) -> Longs:
        """The limits, by index; int64 [num_sizes]."""
        return np.array(self.limits)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that some group can hold."""
        return max(self.limits)

    @property
    def most_tokens(self) -> int:
        """Padded tokens that a microbatch can hold, on the widest groups."""
        return self.limits[-1] * (self.num_ranks // self.sizes[-1])


def room_of(packing: Packing, *, dp: int, cp: int, split: CpSplit = "zigzag") -> Room:
    """The room of dp x cp ranks under a packing and a split.

    Raises PlanError for cp_sizes that do not nest, an unknown split, or a capacity below the alignment.
    """
    check_split(split)
    sizes: tuple[int, ...] = (cp,)
    if packing.policy == "dynamic_cp":
        sizes = sizes_of(packing, dp * cp)
    align = replace(packing.align, in_runs=True) if split == "pack_contiguous" else packing.align
    limits = _limits(align, packing.capacity, sizes)
    if min(limits) == 0:
        size = sizes[limits.index(0)]
        multiple = int(align.pack_multiple(size))
        raise PlanError(
            f"capacity={packing.capacity}: a pack on {size} ranks is a multiple of {multiple} tokens; "
            f"raise capacity to {math.ceil(multiple / size)} or lower the alignment {packing.align}"
        )
    # what a narrower group alone could hold has no place if loads ask for a wider one
    ascending = np.minimum.accumulate(limits[::-1])[::-1]
    return Room(
        num_ranks=dp * cp,
        sizes=sizes,
        limits=tuple(ascending.tolist()),
        align=align,
        max_sequences=int(packing.max_sequences or np.iinfo(np.int32).max),
    )


@lru_cache(maxsize=64)  # asked for in every step
def _limits(align: Align, capacity: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(align.limit(capacity, np.array(sizes, np.int32)).tolist())


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step: sequences, or pieces of them, in stream order.

    Attributes:
        lengths: tokens of each row; int64 [n].
        kept: rows that some pack must hold, which have a token and are not dropped; bool [n].
        sequence: the sequence of the batch that a row is of; int32 [n].
        start: the row's first token in that sequence; int64 [n].
        oversize: sequences that were too long; int32 [k].
    """

    lengths: Longs
    kept: Bools
    sequence: Ints
    start: Longs
    oversize: Ints


@dataclass(frozen=True, slots=True)
class Uncut:
    """Ranges of tokens that lie whole in one row, such as those of an image.

    Attributes:
        sequence: which of the batch; int64 [k], ascending.
        begin, end: tokens of that sequence; those of one sequence ascend and do not overlap; int64 [k] each.
    """

    sequence: Longs
    begin: Longs
    end: Longs

    def of(self, sequence: int) -> tuple[Longs, Longs]:
        """Begins and ends in one sequence."""
        first, stop = np.searchsorted(self.sequence, (sequence, sequence + 1))
        return self.begin[first:stop], self.end[first:stop]


def rows_of(lengths: Longs, *, longest: int, policy: Oversize, uncut: Uncut | None = None) -> Rows:
    """Deal with sequences of more than `longest` tokens.

    truncate keeps their first `longest` tokens, drop keeps none, split makes equal pieces, as few as fit:
    25 tokens with longest = 10 -> 9 + 8 + 8. A cut within an uncut range moves, which can take more pieces:
    truncate keeps what is before it, and split cuts before it, or behind it where nothing is before it.
    Raises PlanError for such a sequence under "error", for a negative length, and under "split" for an uncut
    range of more than `longest` tokens.
    """
    if lengths.size and lengths.min() < 0:
        raise PlanError(f"sequence {int(lengths.argmin())}: {lengths.min()} tokens; a length is 0 or more")
    too_long = np.flatnonzero(lengths > longest).astype(np.int32)
    if too_long.size and policy == "error":
        first = int(too_long[0])
        raise PlanError(
            f"sequence {first} of the batch: {lengths[first]} tokens > {longest}, the most that capacity x "
            f"the widest cp group holds ({too_long.size} such sequences); "
            f"raise capacity or cp, or set oversize='split', 'truncate' or 'drop' (--oversize)"
        )
    if not too_long.size:
        whole, start = np.arange(lengths.size, dtype=np.int32), np.zeros(lengths.size, np.int64)
        return Rows(lengths, lengths > 0, whole, start, too_long)
    if uncut is not None and policy in ("truncate", "split"):
        return _rows_around(lengths, longest, policy == "split", uncut, too_long)
    num_pieces = np.ones(lengths.size, np.int64)
    if policy == "split":
        num_pieces = np.maximum(-(-lengths // longest), 1)
    sequence, piece = numbered(num_pieces)
    share, longer = np.divmod(lengths, num_pieces)
    # 25 in 3: shares 8 8 8, the first one longer by a token
    start = piece * share[sequence] + np.minimum(piece, longer[sequence])
    rows = share[sequence] + (piece < longer[sequence])
    if policy == "truncate":
        rows = np.minimum(rows, longest)
    kept = (rows > 0) & (rows <= longest)
    return Rows(rows.astype(np.int64), kept, sequence.astype(np.int32), start.astype(np.int64), too_long)


def _rows_around(lengths: Longs, longest: int, splits: bool, uncut: Uncut, too_long: Ints) -> Rows:
    """The rows of sequences of which some must be cut, and not within an uncut range."""
    num_pieces = np.ones(lengths.size, np.int64)
    stops = {int(i): _cuts(i, int(lengths[i]), longest, splits, *uncut.of(i)) for i in too_long.tolist()}
    num_pieces[too_long] = [len(each) for each in stops.values()]
    sequence, _ = numbered(num_pieces)
    start, rows = np.zeros(sequence.size, np.int64), lengths[sequence]
    first = np.cumsum(num_pieces) - num_pieces
    for i, ends in stops.items():
        mine = slice(first[i], first[i] + len(ends))
        start[mine] = [0, *ends[:-1]]
        rows[mine] = ends - start[mine]
    return Rows(rows, rows > 0, sequence.astype(np.int32), start, too_long)


def _cuts(sequence: int, length: int, longest: int, splits: bool, begin: Longs, end: Longs) -> list[int]:
    """Where the rows of a sequence end."""

    def before(cut: int) -> int:
        at = int(np.searchsorted(begin, cut)) - 1
        return int(begin[at]) if at >= 0 and cut < end[at] else cut

    if not splits:
        return [before(longest)]
    ends = [0]
    while (left := length - ends[-1]) > 0:
        num_pieces = -(-left // longest)
        cut = before(ends[-1] + -(-left // num_pieces))
        if cut == ends[-1]:  # an uncut range begins here
            cut = int(end[np.searchsorted(begin, cut)])
        if cut - ends[-1] > longest:
            raise PlanError(
                f"sequence {sequence} of the batch: tokens {ends[-1]} to {cut} are of an image, say, which "
                f"is not split, and {cut - ends[-1]} > {longest}, the most that capacity x the widest cp "
                f"group holds; raise capacity or cp, make parts smaller, or set oversize='truncate' or "
                f"'drop' (--oversize)"
            )
        ends.append(cut)
    return ends[1:]
