"""Counts wordings that read as a translation, in the pages, the docstrings and the messages.

    python tests/phrases.py            where each occurs, and how often

`test_phrases.py` holds the sum at `MOST`: lower it when the sum falls, and never raise it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 22

BETTER = {
    r"not to be had": "this machine lacks …",
    r"to be told": "an active verb",
    r"from its begin|at the begin": "from the beginning",
    r"see to": "check",
    r"(go|goes|going|gone|went) on (under|with|where|by|from|at)": "resume, continue",
    r"asked wrongly": "usage error",
    r"(?<!there )(is|are|was|were) no (?!longer|more|different|need)\w+": "is not a …",
    r"no UTF-8": "not valid UTF-8",
    r"let pass": "allowed",
    r"mend": "fix",
    r"in passing": "transient",
    r"for good": "permanently",
    r"far away|far-away|from afar": "remote",
    r"asks? slow requests again|asked a second time": "hedges",
    r"that encode at once": "parallel workers",
    r"says nothing without": "has no effect without",
    r"in the loops? of|loops of others": "Lightning, transformers, torchtitan",
    r"short of its aim": "missed target",
    r"weaker than the rest": "known weakness",
    r"bare ground": "empty space",
    r"went on from were undone": "discarded on resume",
    r"everything that is wrong": "user errors",
    r"anew": "again, new",
    r"told|untold|hear|hears|heard": "received, reported, notified",
    r"look at the": "check",
    r"of your own": "your, custom",
    r"in earnest": "real",
    r"no say|nothing any more": "does not matter",
    r"so many (tokens|bytes|sequences)": "N tokens",
    r"the centre of the house": "the central idea",
    r"coming from another": "migrating",
    r"\d+ such|such\)": "say of what",
}
"""Wording -> what to write instead."""

_WORDINGS = {wording: re.compile(rf"(?<!\w)(?:{wording})(?!\w)", re.I) for wording in BETTER}


def texts() -> Iterator[tuple[str, str]]:
    """(where, text) of pages, docstrings and messages; not of messages that a page quotes from the source."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        if page.name != "cli.md":  # made of the parsers' help
            yield page.name, re.sub(r"```text\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def found() -> list[tuple[str, str, str]]:
    """(wording, where, the words around it) of every occurrence."""
    hits: list[tuple[str, str, str]] = []
    for where, text in texts():
        line = " ".join(text.split())
        for wording, pattern in _WORDINGS.items():
            for hit in pattern.finditer(line):
                hits.append((wording, where, line[max(0, hit.start() - 30) : hit.end() + 30]))
    return hits


if __name__ == "__main__":
    hits = found()
    for _, where, around in hits:
        print(f"{where}: …{around}…")
    for wording, count in Counter(wording for wording, _, _ in hits).most_common():
        print(f"{count:5} {wording}: better {BETTER[wording]!r}")
    print(f"{len(hits):5} in all, at most {MOST}")
