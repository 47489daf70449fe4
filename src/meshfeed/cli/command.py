"""How commands answer: exit statuses, tables, JSON, progress. Answers go to stdout, the rest to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table as RichTable

from meshfeed.errors import MeshfeedError
from meshfeed.files.local.durable import durable_file
from meshfeed.text import visible

OK, WRONG, FAILED, INTERRUPTED = 0, 1, 2, 130

_PIPE_WIDTH = 240  # wide enough that nothing is cut


def say(text: str, file: IO[str] | None = None) -> None:
    """Print a line to stdout or `file`; see `visible`."""
    print(visible(text), file=file or sys.stdout)


class Console(RichConsole):
    """A console that passes broken pipes to `main`, cuts nothing in a file, and makes all text `visible`."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _PIPE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else visible(segment.text)
            yield segment if shown == segment.text else Segment(shown, segment.style)

    def on_broken_pipe(self) -> None:
        """Raise, for `main`; rich would end the process with status 1."""
        raise BrokenPipeError


class Table(RichTable):
    """A table without lines that wraps long cells: a cut number would be wrong."""

    def __init__(self, *headers: str, **how: Any) -> None:
        super().__init__(*headers, box=None, pad_edge=False, **how)

    def add_column(self, *header: Any, **how: Any) -> None:
        texts = [visible(each) if isinstance(each, str) else each for each in header]
        super().add_column(*texts, **{"overflow": "fold"} | how)

    def add_row(self, *cells: Any, **how: Any) -> None:
        """See rich; escapes count in the widths."""
        super().add_row(*(visible(each) if isinstance(each, str) else each for each in cells), **how)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON value; NaN and infinities become null."""
    print(json.dumps(plain(value), indent=indent, allow_nan=False))


def plain(value: Any) -> Any:
    """A value in JSON's types: NumPy's numbers as Python's, infinities and NaN as None."""
    match value:
        case dict():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case np.generic() | np.ndarray():
            return plain(value.tolist())
        case float():
            return value if np.isfinite(value) else None
        case Path():
            return str(value)
        case _:
            return value


def shown(value: Any) -> str:
    """A value as text for tables."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case dict():
            return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
        case _:
            return str(value)


def show_progress(what: str, parts: Iterator[float], *, quiet: bool = False) -> None:
    """Exhaust `parts`, which yields the share done, and show a bar on stderr."""
    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        for done in parts:
            progress.update(task, completed=done)


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named, whole or not at all. Raises MeshfeedError."""
    encoded = text.encode(errors="backslashreplace")  # names need not be UTF-8
    try:
        if path.exists() and not path.is_file():  # a pipe, /dev/stdout
            path.write_bytes(encoded)
        else:
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o666  # it may show private texts
            with durable_file(path.resolve(), mode) as stream:
                stream.write(encoded)
    except OSError as error:
        reason = error.__cause__ or error
        raise MeshfeedError(
            f"{path}: {getattr(reason, 'strerror', None) or reason}; choose another file to write"
        ) from error
    say(f"wrote {path}", sys.stderr)
