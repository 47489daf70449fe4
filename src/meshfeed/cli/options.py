"""Commands as dataclasses: the fields are the options, and argparse's parsers are made of them.

A field's name, type, default and help are those of the option: `bool` is a flag, `Literal` a choice, a list
may be repeated, numbers are checked. Options that several commands have are a base class with a `title`.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from meshfeed.cli.command import FAILED, visible
from meshfeed.errors import MeshfeedError


def option(help: str, default: Any = None, **how: Any) -> Any:
    """An option, as a field's default. how: `metavar`; `names`, if not the field's; `least` of numbers."""
    return field(default=default, metadata={"help": help, **how})


def required(help: str, **how: Any) -> Any:
    """An option that must be given; see `option`."""
    return field(metadata={"help": help, "required": True, **how})


def argument(metavar: str, help: str, **how: Any) -> Any:
    """An argument without a name. how: `nargs`, of argparse."""
    return field(default=None, metadata={"help": help, "metavar": metavar, "names": (), **how})


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command. The docstring's first line is its help, the rest its description.

    Class attributes:
        examples: one command per line.
        wrong: meaning of exit status 1; None if it does not occur.
        keys: of the JSON object -> meaning; None for a command without --json.
    """

    examples: ClassVar[str]
    wrong: ClassVar[str | None] = None
    keys: ClassVar[Mapping[str, str] | None] = None

    json: bool = option("print JSON instead of tables; keys are below", default=False)

    def run(self) -> int:
        """Do it, with the answer on stdout. Returns the exit status. Raises MeshfeedError."""
        raise NotImplementedError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and a hint instead of the usage of all options."""

    def error(self, message: str) -> NoReturn:
        """Print the error to stderr and exit with status 2."""
        self.exit(FAILED, visible(f"{self.prog}: {message}; see {self.prog} --help\n"))


def add_command(subparsers: Any, name: str, command: type[Command]) -> None:
    """Add a command's parser, with examples, exit statuses and JSON keys in its epilog."""
    help, _, description = (inspect.getdoc(command) or "").partition("\n\n")
    parser: Parser = subparsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(" ".join(description.split()), 100),
        epilog=_epilog(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    hints, groups = get_type_hints(command), dict[str, Any]()
    for each in fields(command):
        if each.name == "json" and command.keys is None:
            continue
        title = _title(command, each.name)
        if title and title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title] if title else parser, each, hints[each.name])


def _epilog(command: type[Command]) -> str:
    lines = [f"  {line.strip()}" for line in command.examples.strip().splitlines()]
    parts = ["examples:", *lines, "", "exit status:", "  0  done"]
    parts += [f"  1  {command.wrong}"] if command.wrong else []
    parts += ["  2  usage error or failure; stderr says why and stdout has no answer", "  130  interrupted"]
    if command.keys is not None:
        width = max(map(len, command.keys)) + 2
        parts += ["", "keys of --json:", *(f"  {key:{width}}{what}" for key, what in command.keys.items())]
    return "\n".join(parts)


def _title(command: type[Command], name: str) -> str | None:
    """The title of the group of options that a field belongs to."""
    for base in command.__mro__:
        if "title" in vars(base) and name in base.__dataclass_fields__:
            return vars(base)["title"]
    return None


def _add(group: Any, each: Field[Any], hint: Any) -> None:
    how: dict[str, Any] = dict(each.metadata)
    default = each.default
    names, least = how.pop("names", (f"--{each.name.replace('_', '-')}",)), how.pop("least", 1)
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    if hint is bool:
        how["action"] = "store_true"
    elif get_origin(hint) is Literal:
        how["choices"] = get_args(hint)
    elif get_origin(hint) is list:
        how |= {} if "nargs" in how else {"action": "append"}
    elif hint in _KINDS:
        metavar, read = _KINDS[hint]
        how = {**{"metavar": metavar, "type": read(least)}, **how}
    if default is not MISSING:
        how["default"] = default
    if default is not MISSING and default not in (None, ()) and default is not False:
        how["help"] += f" ({','.join(map(str, default)) if isinstance(default, tuple) else default})"
    if names:
        how["dest"] = each.name
    group.add_argument(*names or [each.name], **how)


# -- what is given ------------------------------------------------------------------------------------


def given(options: Any, names: Iterable[str]) -> list[str]:
    """Those of the options that are given, as they are written."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]


def refuse_given(options: Any, names: Iterable[str], why: str) -> None:
    """Raise MeshfeedError for the first of these options that is given, since it has no effect."""
    for each in given(options, names):
        raise MeshfeedError(f"{each} {why}")


# -- how values are read ------------------------------------------------------------------------------


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


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers joined by commas, each at least `least`."""

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(whole(least)(part) for part in text.split(","))
        except argparse.ArgumentTypeError as bad:
            raise argparse.ArgumentTypeError(f"{text!r}: {bad}; join several by commas, such as 4,6") from bad

    return read


def _positive(text: str) -> float:
    """Reads a finite number above 0."""
    try:
        number = float(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from bad
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return number


def _span(text: str) -> range:
    """Reads first:stop, or one number alone."""
    first, colon, stop = text.partition(":")
    if not first.isdecimal() or (colon and not stop.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: write first:stop, such as 0:4, or one number")
    found = range(int(first), int(stop) if colon else int(first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is empty; write first:stop, such as 0:4")
    return found


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date; write one such as 2025-06-01") from bad


_KINDS: Mapping[Any, tuple[str, Callable[[int], Callable[[str], Any]]]] = {
    int: ("N", whole),
    tuple[int, ...]: ("N,...", _numbers),
    float: ("X", lambda least: _positive),
    range: ("A:B", lambda least: _span),
    datetime.date: ("DATE", lambda least: _date),
    Path: ("FILE", lambda least: Path),
}
"""Type -> how its value is called in help, and how it is read. Other values stay text."""
