"""Writes docs/cli.md, the command line reference, from the parsers themselves: python docs/make/cli.py

The page is made of the parsers' parts, not of their --help, whose layout differs between versions of Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshfeed.cli.main import COMMANDS, parser_of

PAGE = Path(__file__).parents[1] / "cli.md"

_HEAD = """# Command line

Made by `python docs/make/cli.py` from the parsers; `meshfeed COMMAND --help` says the same.
Answers go to stdout, progress and errors to stderr. `meshfeed --version` tells the version.
"""


def page() -> str:
    """The whole page, the same on every machine and Python."""
    return "\n".join([_HEAD, *_commands(parser_of(COMMANDS), depth=2)])


def _commands(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _command(command, depth)


def _command(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {parser.prog}\n"
    yield f"{' '.join((parser.description or '').split())}\n"
    for group in parser._action_groups:
        rows = [_row(parser, action) for action in group._group_actions if _is_told(action)]
        if rows:
            yield f"{group.title}:\n\n| | |\n|---|---|\n" + "\n".join(rows) + "\n"
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```\n"
    yield from _commands(parser, depth + 1)


def _is_told(action: argparse.Action) -> bool:
    hidden = action.help == argparse.SUPPRESS
    return not hidden and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = _value(action) if action.option_strings and action.nargs != 0 else ""
    needed = "; required" if action.option_strings and action.required else ""
    help: Any = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| {_code(f'{names} {value}'.strip())} | {_escaped(f'{help}{needed}')} |"


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _code(text: str) -> str:
    return f"`{_escaped(text)}`"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
