"""Common parts of all commands: declaration, arguments and output.

A command is a module with `add_parser(subparsers)`; its `run(args)` returns the exit status. Answers go to
stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn, get_args

import numpy as np
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table as RichTable

from meshfeed.errors import MeshfeedError
from meshfeed.roles import DeliveryName

OK, WRONG, FAILED, INTERRUPTED = 0, 1, 2, 130

_PIPE_WIDTH = 240  # wide enough that nothing is cut


_COMMANDS = [code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]
_TURNS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_HIDDEN = {code: f"\\x{code:02x}" for code in _COMMANDS} | {code: f"\\u{code:04x}" for code in _TURNS}


def visible(text: str) -> str:
    """Text with control characters and changes of writing direction shown as escapes.

    Documents, file names and a store's messages are foreign text. Tabs and line ends stay.
    """
    return text.translate(_HIDDEN)


def say(text: str, file: IO[str] | None = None) -> None:
    """Print a line to stdout or `file`; see `visible`."""
    print(visible(text), file=file or sys.stdout)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and a hint instead of the usage of all options.

    Attributes:
        hints: argument -> text added if it is missing.
    """

    hints: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Print the error to stderr and exit with status 2."""
        if " required: " in message:
            missing = message.rpartition(": ")[2].split(", ")
            message = "; ".join([message, *(self.hints[name] for name in missing if name in self.hints)])
        self.exit(FAILED, visible(f"{self.prog}: {message}; see {self.prog} --help\n"))


class Console(RichConsole):
    """A console that passes broken pipes to `main`, cuts nothing in a file, and makes all text `visible`."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _PIPE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
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
        """See rich."""
        texts = [visible(each) if isinstance(each, str) else each for each in header]
        super().add_column(*texts, **{"overflow": "fold"} | how)

    def add_row(self, *cells: Any, **how: Any) -> None:
        """See rich; escapes count in the widths."""
        super().add_row(*(visible(each) if isinstance(each, str) else each for each in cells), **how)


def add_command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: str,
    wrong: str | None = None,
    keys: Mapping[str, str] | None = None,
) -> Parser:
    """A command's parser, with examples, exit statuses and JSON keys in its epilog.

    examples: one command per line. wrong: meaning of exit status 1; None if it does not occur. keys: of the
    JSON object -> meaning; None for a command without --json.
    """
    lines = [f"  {line.strip()}" for line in examples.strip().splitlines()]
    parts = ["examples:", *lines, "", "exit status:", "  0  done"]
    parts += [f"  1  {wrong}"] if wrong else []
    parts += ["  2  usage error or failure; stderr says why and stdout has no answer", "  130  interrupted"]
    if keys is not None:
        width = max(map(len, keys)) + 2
        parts += ["", "keys of --json:", *(f"  {key:{width}}{what}" for key, what in keys.items())]
    parser: Parser = subparsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, 100),
        epilog="\n".join(parts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if keys is not None:
        parser.add_argument(
            "--json", action="store_true", help="print JSON instead of tables; keys are below"
        )
    parser.set_defaults(run=run)
    return parser


# -- arguments ----------------------------------------------------------------------------------------


def add_delivery(parser: argparse.ArgumentParser) -> None:
    """Declare --delivery."""
    parser.add_argument(
        "--delivery",
        choices=("auto", *get_args(DeliveryName)),
        default="auto",
        help="how bytes reach the ranks (auto)",
    )


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number that is at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError as bad:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number; write one from {least}"
            ) from bad
        if number < least:
            raise argparse.ArgumentTypeError(f"{number}: write a whole number from {least}")
        return number

    return read


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    try:
        number = float(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from bad
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return number


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers joined by commas, each at least `least`."""

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(whole(least)(part) for part in text.split(","))
        except argparse.ArgumentTypeError as bad:
            raise argparse.ArgumentTypeError(f"{text!r}: {bad}; join several by commas, such as 4,6") from bad

    return read


def span(text: str) -> range:
    """Reads first:stop, or one number alone."""
    first, colon, stop = text.partition(":")
    if not first.isdecimal() or (colon and not stop.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: write first:stop, such as 0:4, or one number")
    found = range(int(first), int(stop) if colon else int(first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is empty; write first:stop, such as 0:4")
    return found


def refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise MeshfeedError for the first of these options that is given, since it has no effect."""
    for name in names:
        if getattr(args, name) is not None:
            raise MeshfeedError(f"--{name.replace('_', '-')} {why}")


# -- answers ------------------------------------------------------------------------------------------


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


def print_facts(facts: Mapping[str, Any], console: RichConsole) -> None:
    """Print a table of names and values."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column()
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), shown(value), style=None)
    console.print(table, markup=False)


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
    """Write a file that the user named. Raises MeshfeedError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeshfeedError(f"{path}: {error.strerror or error}; choose another file to write") from error
    say(f"wrote {path}", sys.stderr)
