"""What it means that a pair is not that of its .sums: the .sums is of other files, or the pair is damaged."""

from __future__ import annotations

from collections.abc import Callable

from meshfeed.errors import ChecksumError, StoreError
from meshfeed.files.sums import ANEW, BIN, IDX, SUFFIX
from meshfeed.store.index import ends_of_idx, sampled_of_bin

WrongAt = Callable[[int, int, int], ChecksumError | None]
"""(which file, range) -> the error of a block that the range touches; None if all of them are right."""
_FEW = 3


def wrong_block(url: str, low: int, high: int, more: str = "") -> ChecksumError:
    """The error for bytes of a file that differ from its .sums."""
    return ChecksumError(
        f"{url}: bytes {low}..{high} do not match its .sums{more}; the file is damaged: copy it again",
        path=url,
        range=(low, high),
    )


def others_sums(prefix: str, what: str) -> StoreError:
    """The error for a .sums that was made for other files than lie beside it."""
    return StoreError(
        f"{prefix}{SUFFIX}: made for {what}; copy the files again, or, if they are newer than it, {ANEW}",
        path=prefix + SUFFIX,
    )


def damage(sizes: tuple[int, int], wrong_at: WrongAt) -> ChecksumError | bool:
    """Why a pair has another fingerprint than its .sums, by the blocks that the fingerprint is made of.

    sizes: of .bin and .idx. The error of a block, if others of the .bin are right. Otherwise whether the .bin
    is right: False means that it is another one.
    """
    first, *others, last = sampled_of_bin(sizes[BIN])
    wrong, is_right = None, False
    for tried, (begin, end) in enumerate([first, last, *others], 1):
        error = wrong_at(BIN, begin, end)
        wrong, is_right = wrong or error, is_right or error is None
        if wrong is not None and is_right:
            return wrong
        if tried == _FEW and not is_right:
            return False
    if not is_right:
        return False
    found = (wrong_at(IDX, begin, end) for begin, end in ends_of_idx(sizes[IDX]))
    return next((error for error in found if error is not None), True)
