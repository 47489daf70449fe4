"""Exchanging sequences inside a filled microbatch until its heaviest block is at the mean."""

from __future__ import annotations

import numpy as np

from meshfeed.plan.fill import Filled, Ranked
from meshfeed.plan.types import LongArray

NEAR = 2e-5
"""How far above the mean load, relative, the heaviest block may stay."""

MAX_PARTNERS = 4
"""Lightest blocks that the heaviest one tries to exchange with before it gives up."""

MAX_HEAVY, WORTH = 48, 0.0025
"""More heavy blocks than this are left alone where they are within WORTH of the mean: each takes an exchange
of its own."""

MAX_CANDIDATES = 64
"""Sequences of a block that are looked at, spread evenly over its lengths."""


def polish(ranked: Ranked, filled: Filled) -> Filled:
    """Lower the largest load of a microbatch by exchanging single sequences.

    The heaviest block gives the lightest one a sequence for a shorter one, or for none: the pair that brings
    it nearest to the mean without lifting the other above, within the token limits. So each exchange settles
    one block, and it ends where the heaviest block finds no exchange that helps.
    """
    room = ranked.room
    num_blocks = filled.block_sizes.size
    loads = filled.loads.copy()
    mean = float((loads * filled.block_sizes).sum()) / room.num_ranks
    heavy = int((loads > mean * (1 + NEAR)).sum())
    settled = heavy == 0 or (heavy > MAX_HEAVY and loads.max() <= mean * (1 + WORTH))
    if num_blocks < 2 or settled or filled.left.size:
        return filled
    # members by their place here, and one more without work and tokens, which stands for "no sequence"
    nothing = filled.members.size
    index = np.searchsorted(room.sizes, filled.block_sizes)
    load = np.pad(ranked.load[:, filled.members], ((0, 0), (0, 1)))
    padded = np.pad(ranked.padded[:, filled.members], ((0, 0), (0, 1)))
    by_block = np.argsort(filled.block, kind="stable")
    held = np.split(by_block, np.searchsorted(filled.block[by_block], np.arange(1, num_blocks)))
    used = np.bincount(
        filled.block, weights=padded[index[filled.block], np.arange(nothing)], minlength=num_blocks
    )
    free = np.array(room.limits)[index] - used.astype(np.int64)
    for _ in range(6 * num_blocks + 16):
        top = int(loads.argmax())
        if loads[top] <= mean * (1 + NEAR):
            break
        for low in np.argsort(loads, kind="stable")[:MAX_PARTNERS].tolist():
            mine, theirs = (np.append(_spread(held[b]), nothing) for b in (top, low))
            out, back = index[top], index[low]
            new_top = loads[top] - load[out, mine][:, None] + load[out, theirs]
            new_low = loads[low] + load[back, mine][:, None] - load[back, theirs]
            fits = (padded[back, mine][:, None] - padded[back, theirs] <= free[low]) & (
                padded[out, theirs] - padded[out, mine][:, None] <= free[top]
            )
            off = np.where(fits, np.abs(new_top - mean) + np.maximum(new_low - mean, 0), np.inf)
            i, j = divmod(int(off.argmin()), theirs.size)
            if fits[i, j] and max(new_top[i, j], new_low[i, j]) < loads[top] - mean * NEAR / 8:
                break
        else:
            break
        give, take = mine[i], theirs[j]
        for block, gone, come in ((top, give, take), (low, take, give)):
            rest = held[block][held[block] != gone]
            held[block] = rest if come == nothing else np.append(rest, come)
        loads[top], loads[low] = new_top[i, j], new_low[i, j]
        free[top] += padded[out, give] - padded[out, take]
        free[low] += padded[back, take] - padded[back, give]
    held_by = np.repeat(np.arange(num_blocks, dtype=np.int32), [places.size for places in held])
    return Filled(filled.members[np.concatenate(held)], held_by, filled.block_sizes, loads)


def _spread(places: LongArray) -> LongArray:
    """At most MAX_CANDIDATES of the places, evenly spaced."""
    step = -(-places.size // MAX_CANDIDATES) or 1
    return places[::step]
