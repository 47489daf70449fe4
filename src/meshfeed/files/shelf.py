"""Eviction: which blocks the cache holds, who needs them, which to drop. Bookkeeping only, no files."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from itertools import chain

Block = tuple[str, int]
"""(object, number of the block)"""


class Shelf:
    """Blocks with their sizes, least recently used first, and the pins of their holders.

    A pin is *firm* if a reader is about to read the block. Otherwise it is a wish, which may be evicted.

    Attributes:
        limit_bytes: the limit; firm blocks may exceed it.
        held_bytes: bytes of the blocks held.
        firm_bytes: bytes of the blocks that readers are about to read, held or not.
        busy: blocks being fetched, which must stay.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = self.firm_bytes = 0
        self.busy: set[Block] = set()
        self._sizes: OrderedDict[Block, int] = OrderedDict()
        self._pins: defaultdict[tuple[Hashable, bool], Counter[Block]] = defaultdict(Counter)
        self._num_pins: dict[bool, Counter[Block]] = {True: Counter(), False: Counter()}
        self._firm_sizes: dict[Block, int] = {}

    def __contains__(self, block: Block) -> bool:
        return block in self._sizes

    @property
    def num_wished(self) -> int:
        """Number of blocks with a wish."""
        return len(self._num_pins[False])

    def add(self, block: Block, num_bytes: int) -> None:
        """Add a block that is held or about to be."""
        self.held_bytes += num_bytes - self._sizes.pop(block, 0)
        self._sizes[block] = num_bytes

    def remove(self, block: Block) -> None:
        """Remove a block."""
        self.held_bytes -= self._sizes.pop(block, 0)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Mark blocks as most recently used."""
        for block in blocks:
            if block in self._sizes:
                self._sizes.move_to_end(block)

    def firm_bytes_with(self, sizes: Mapping[Block, int]) -> int:
        """The value of `firm_bytes` with additional firm pins on these blocks."""
        return self.firm_bytes + sum(size for block, size in sizes.items() if block not in self._firm_sizes)

    def pin(self, holder: Hashable, sizes: Mapping[Block, int], *, firm: bool) -> None:
        """Pin blocks, held or not, for a holder. Firm pins are counted; a repeated wish counts once."""
        pins = self._pins[holder, firm]
        for block, size in sizes.items():
            if not firm and pins[block]:
                continue
            pins[block] += 1
            self._num_pins[firm][block] += 1
            if firm and block not in self._firm_sizes:
                self._firm_sizes[block] = size
                self.firm_bytes += size

    def release(self, holder: Hashable, blocks: Iterable[Block], *, firm: bool) -> None:
        """Release a holder's pins on blocks; blocks it has not pinned are ignored."""
        pins = self._pins[holder, firm]
        for block in blocks:
            if pins[block] > 0:
                pins[block] -= 1
                self._unpin(block, 1, firm)
            if pins[block] == 0:
                del pins[block]

    def release_all(self, holder: Hashable, *, firm: bool, of: str | None = None) -> None:
        """Release all pins of a holder, or those on one object."""
        pins = self._pins.pop((holder, firm), Counter[Block]())
        kept = Counter({block: count for block, count in pins.items() if of is not None and block[0] != of})
        for block, count in pins.items():
            if block not in kept:
                self._unpin(block, count, firm)
        if kept:
            self._pins[holder, firm] = kept

    def is_wanted(self, block: Block) -> bool:
        """Whether a block has any pin."""
        return any(block in pins for pins in self._num_pins.values())

    def make_room(self, num_bytes: int, *, over_wishes: bool) -> list[Block] | None:
        """The blocks to evict for `num_bytes` more, least recently used first; None if that is impossible.

        over_wishes: evict blocks with wishes too, the earliest wishes last. The caller removes the blocks.
        """
        excess = self.held_bytes + num_bytes - max(self.limit_bytes, self.firm_bytes)
        going = self.to_free(excess, over_wishes=over_wishes)
        return going if sum(self._sizes[block] for block in going) >= excess else None

    def to_free(self, num_bytes: int, *, over_wishes: bool) -> list[Block]:
        """The blocks to evict to free `num_bytes`, or as many as possible."""
        going = list[Block]()
        free = (block for block in self._sizes if not self.is_wanted(block))
        wished = (block for block in reversed(self._sizes) if self.is_wanted(block))
        blocks = chain(free, wished) if over_wishes else free
        while num_bytes > 0 and (block := next(blocks, None)) is not None:
            if block not in self.busy and block not in self._firm_sizes:
                going.append(block)
                num_bytes -= self._sizes[block]
        return going

    def _unpin(self, block: Block, count: int, firm: bool) -> None:
        self._num_pins[firm][block] -= count
        if self._num_pins[firm][block] <= 0:
            del self._num_pins[firm][block]
            if firm:
                self.firm_bytes -= self._firm_sizes.pop(block, 0)
