"""Short texts that identify a recipe: digests, abbreviations, comparison."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OWN = __name__.partition(".")[0]
_MARKS = {
    tokenize.COMMENT: "",
    tokenize.NL: "",
    tokenize.NEWLINE: ";",
    tokenize.INDENT: ">",
    tokenize.DEDENT: "<",
}


def digest_of(summary: Mapping[str, Any]) -> str:
    """A hex digest of a recipe's summary, or other plain JSON; the same on every machine and Python."""
    text = json.dumps(dict(summary), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def brief(text: str) -> str:
    """A text of at most about 800 bytes of JSON; an abbreviated text carries its digest."""
    if len(json.dumps(text)) <= 802:
        return text
    # a character is up to 12 bytes of JSON
    start = next(text[:end] for end in range(720, 0, -10) if len(json.dumps(text[:end])) <= 722)
    return f"{start}... (in full: {_in_full(text)})"


def code_of(made: Any) -> str:
    """What identifies the code of a user's class, or of a function that makes one; "" for meshfeed's own.

    Its module and name, and its `version` if it has one, else a digest of its source and of that of its bases
    in the same package, without comments and blank lines. Where there is no source, name and module alone.
    What it calls is not in it. Of a partial, its function; of another callable, its class.
    """
    while isinstance(made, functools.partial):
        made = made.func
    return _code_of(made if hasattr(made, "__qualname__") else type(made))


@functools.lru_cache(maxsize=64)
def _code_of(made: Any) -> str:
    if _package_of(made) == _OWN:
        return ""
    module = "__main__" if made.__module__ == "__mp_main__" else made.__module__  # of a spawned process
    version: Any = getattr(made, "version", None)
    if isinstance(version, (str, int)):
        code = f"version {version}"
    else:
        bases = [each for each in getattr(made, "__mro__", (made,)) if _package_of(each) == _package_of(made)]
        code = hashlib.sha256("\n".join(map(_source_of, bases)).encode()).hexdigest()[:16]
    return f"{module}.{made.__qualname__} {code}"


def _package_of(made: Any) -> str:
    return str(made.__module__).partition(".")[0]


def _source_of(made: Any) -> str:
    """The source of a class without comments and blank lines; "" where there is none."""
    try:
        return "".join(_tokens_of(textwrap.dedent(inspect.getsource(made)).splitlines(keepends=True)))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""


def _tokens_of(lines: Sequence[str]) -> Iterator[str]:
    """The tokens of source; an f-string is one as it is written, which Python 3.12 cuts into several."""
    depth, begin = 0, (0, 0)
    for each in tokenize.generate_tokens(iter(lines).__next__):
        kind = tokenize.tok_name[each.type]
        if kind.endswith("STRING_START"):
            begin = begin if depth else each.start
            depth += 1
        elif kind.endswith("STRING_END"):
            depth -= 1
            if not depth:
                yield _between(lines, begin, each.end)
        elif not depth:
            yield _MARKS.get(each.type, each.string)


def _between(lines: Sequence[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Source from one (row, column) to another; rows count from 1."""
    rows = list(lines[begin[0] - 1 : end[0]])
    rows[-1] = rows[-1][: end[1]]  # first: it may be the only one
    return rows[0][begin[1] :] + "".join(rows[1:])


def same_text(one: str, other: str) -> bool:
    """Whether two texts are the same in full, abbreviated or not."""
    return _in_full(one) == _in_full(other)


def _in_full(text: str) -> str:
    """The digest of the full text, 32 hex digits; an abbreviated text carries it."""
    abbreviated = re.fullmatch(r".*\.\.\. \(in full: ([0-9a-f]{32})\)", text, re.DOTALL)
    return abbreviated[1] if abbreviated else hashlib.sha256(text.encode()).hexdigest()[:32]
