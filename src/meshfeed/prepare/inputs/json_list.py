"""The elements of a JSON list, as LLaVA's files are, without the whole list in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from meshfeed.errors import ChecksumError, StoreError

_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')
_BOM = b"\xef\xbb\xbf"
_MOST_DEPTH = 1 << 20  # of brackets; far beyond the limit of any parser
_OF_RECORDS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")


def is_list_of_records(head: bytes) -> bool:
    """Whether a file that begins so is a JSON list of objects."""
    return _OF_RECORDS.match(head) is not None


def elements(
    pieces: Iterable[bytes], most_bytes: int, where: str, *, at: int = 0, within: bool = False
) -> Iterator[tuple[int, int, bytes | None]]:
    """(begin, end, text) of each element: its bytes in the file, with the white space around it.

    For a text longer than `most_bytes`, None is yielded, and the text is not kept in memory. Only brackets,
    commas and quotes are read here; a parser reads the elements.

    at: the byte of the file at which the first piece begins.
    within: whether the pieces are some elements and the commas between them, and not a whole list.

    Raises StoreError unless it is a list, and ChecksumError for a list that ends too early, whose brackets do
    not match, or that has not one value between two commas.
    """
    scanner, begin, here = _Scanner(within=within), at, at
    text, too_long, after_comma = b"", False, False
    for piece in pieces:
        first = 0
        for place, mark in scanner.cuts(piece):
            text += piece[first:place]
            if mark in b"[{" and not scanner.is_damaged:
                if mark == b"{" or scanner.lists > 1 or text.removeprefix(_BOM).strip():
                    raise _not_a_list(where)
            elif scanner.depth < (mark == b"," or within):
                raise _not_a_list(where)
            elif scanner.is_damaged:
                raise _damaged(where, here + place)
            elif mark == b"," or after_comma or too_long or text.strip():
                if scanner.values > 1 or not (too_long or _is_one(text, scanner.values)):
                    raise _damaged(where, begin)
                yield begin, here + place, None if too_long or len(text) > most_bytes else text
            text, too_long, begin, first = b"", False, here + place + 1, place + 1
            scanner.values = 0
            after_comma = mark == b","
        text += piece[first:]
        here += len(piece)
        if not within and scanner.depth < 1:  # before or behind the list
            text = text.strip()
            if text and (scanner.lists or not _BOM.startswith(text)):
                raise _not_a_list(where)
        elif len(text) > most_bytes:
            text, too_long = b"", True
    if within:
        if text.strip() or too_long or after_comma:
            if scanner.depth > 1 or scanner.values > 1 or not (too_long or _is_one(text, scanner.values)):
                raise _damaged(where, begin)
            yield begin, here, None if too_long else text
    elif scanner.depth > 0:
        raise ChecksumError(f"{where}: byte {here}: the list does not end; copy the file again")
    elif not scanner.lists or text.strip() or too_long:
        raise _not_a_list(where)


class _Scanner:
    """Reads JSON as far as its brackets go.

    Attributes:
        lists: number of outermost lists opened so far.
        values: texts, lists and objects begun directly in the outermost list; the reader of an element
            resets it for the next.
        is_damaged: whether a bracket was closed by one of another kind.
    """

    def __init__(self, *, within: bool) -> None:
        self.lists = self.values = 0
        self.is_damaged = False
        self._open = bytearray(b"]" * within)  # what closes each open bracket
        self._beyond = 0  # brackets closed while none was open
        self._in_text = self._is_escaped = False

    @property
    def depth(self) -> int:
        return len(self._open) - self._beyond

    def cuts(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Positions in the next piece at which the outermost list begins and ends, and of its commas."""
        at, self._is_escaped = int(self._is_escaped), False
        while (found := (_INSIDE if self._in_text else _OUTSIDE).search(piece, at)) is not None:
            at, mark = found.end(), found[0]
            if mark == b"\\":
                self._is_escaped = at == len(piece)
                at += 1
            elif mark == b'"':
                self._in_text = not self._in_text
                self.values += self._in_text and self.depth == 1
            elif mark in b"[{":
                self.values += self.depth == 1
                self._open += b"]" if mark == b"[" else b"}"
                self.is_damaged |= self.depth > _MOST_DEPTH
                if self.depth == 1:
                    self.lists += 1
                if self.depth == 1 or self.is_damaged:
                    yield found.start(), mark
            elif mark in b"]}":
                if self._open:
                    self.is_damaged |= self._open.pop() != mark[0]
                else:
                    self._beyond += 1
                if self.depth < 1 or self.is_damaged:
                    yield found.start(), mark
            elif self.depth < 2:
                yield found.start(), mark


def _is_one(text: bytes, values: int) -> bool:
    """Whether an element's text may be one value. values: how many texts, lists and objects are in it."""
    text = text.strip()
    if values == 0:
        return len(text.split(None, 1)) == 1
    return values == 1 and text[:1] in (b'"', b"[", b"{") and text[-1:] in (b'"', b"]", b"}")


def _damaged(where: str, byte: int) -> ChecksumError:
    return ChecksumError(
        f"{where}: byte {byte}: the list is damaged: its brackets or commas do not match; copy or write the "
        f"file again"
    )


def _not_a_list(where: str) -> StoreError:
    return StoreError(f"{where}: not one JSON list; give JSON lines as --format jsonl, or text as text")
