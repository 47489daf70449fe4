"""The elements of a JSON list, as LLaVA's files are, without the whole list in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from meshfeed.errors import ChecksumError, StoreError

_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')
_BOM = b"\xef\xbb\xbf"
_OF_RECORDS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")


def is_list_of_records(head: bytes) -> bool:
    """Whether a file that begins so is a JSON list of objects."""
    return _OF_RECORDS.match(head) is not None


def elements(
    pieces: Iterable[bytes], most_bytes: int, where: str, *, at: int = 0, within: bool = False
) -> Iterator[tuple[int, int, bytes | None]]:
    """(begin, end, text) of each element: its bytes in the file, with the white space around it.

    In place of a text longer than `most_bytes` comes None, and it is not kept in memory. Only brackets,
    commas and quotes are read here: what an element says is for a parser.

    at: the byte of the file at which the first piece begins.
    within: whether the pieces are some elements and the commas between them, and not a whole list.

    Raises StoreError for what is not a list, and ChecksumError for one that ends too early.
    """
    scanner, begin, here = _Scanner(depth=int(within)), at, at
    text, too_long, after_comma = b"", False, False
    for piece in pieces:
        first = 0
        for place, mark in scanner.cuts(piece):
            text += piece[first:place]
            if mark in b"[{":
                if mark == b"{" or scanner.lists > 1 or text.removeprefix(_BOM).strip():
                    raise _not_a_list(where)
            elif scanner.depth < (mark == b"," or within):
                raise _not_a_list(where)
            elif mark == b"," or after_comma or too_long or text.strip():
                yield begin, here + place, None if too_long or len(text) > most_bytes else text
            text, too_long, begin, first = b"", False, here + place + 1, place + 1
            after_comma = mark == b","
        text += piece[first:]
        here += len(piece)
        if len(text) > most_bytes:
            text, too_long = b"", True
    if within:
        if text.strip() or too_long or after_comma:
            yield begin, here, None if too_long else text
    elif scanner.depth > 0:
        raise ChecksumError(f"{where}: byte {here}: the list does not end; copy the file again")
    elif not scanner.lists or text.strip() or too_long:
        raise _not_a_list(where)


class _Scanner:
    """Reads JSON as far as its brackets go.

    Attributes:
        depth: how many brackets are open.
        lists: how many have been opened that lie in no other.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.lists = depth, 0
        self._in_text = self._is_escaped = False

    def cuts(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Where, in the next piece, the outermost list begins and ends, and its commas."""
        at, self._is_escaped = int(self._is_escaped), False
        while (found := (_INSIDE if self._in_text else _OUTSIDE).search(piece, at)) is not None:
            at, mark = found.end(), found[0]
            if mark == b"\\":
                self._is_escaped = at == len(piece)
                at += 1
            elif mark == b'"':
                self._in_text = not self._in_text
            elif mark in b"[{":
                self.depth += 1
                if self.depth == 1:
                    self.lists += 1
                    yield found.start(), mark
            elif mark in b"]}":
                self.depth -= 1
                if self.depth < 1:
                    yield found.start(), mark
            elif self.depth < 2:
                yield found.start(), mark


def _not_a_list(where: str) -> StoreError:
    return StoreError(f"{where}: not one JSON list; give JSON lines as --format jsonl, or text as text")
