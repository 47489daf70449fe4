"""meshfeed completion: a script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from meshfeed.cli.command import OK, add_command
from meshfeed.errors import MeshfeedError

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("FILE", "PATH", "RECIPE", "DIR")


def add_parser(subparsers: Any) -> None:
    """Add `completion` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "completion",
        run,
        help="a script for bash, zsh or tcsh that completes commands and options",
        description="Print a script that teaches a shell to complete meshfeed's commands, options and files.",
        examples="""
            eval "$(meshfeed completion bash)"                              # this shell; or in ~/.bashrc
            meshfeed completion zsh > "${fpath[1]}/_meshfeed"               # zsh, from the next shell on
            meshfeed completion tcsh > ~/.meshfeed.csh                      # and source it in ~/.tcshrc
        """,
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or tcsh")


def run(args: argparse.Namespace) -> int:
    """Print the script; 0. Raises MeshfeedError without shtab."""
    try:
        import shtab
    except ImportError as missing:
        raise MeshfeedError("completion needs the package shtab: pip install shtab") from missing
    for action in _actions(args.whole):
        for short in getattr(action, "_choices_actions", ()):  # of commands: descriptions would be cut
            commands: Any = action.choices
            commands[short.dest].description = short.help
        if action.metavar in _FILES:
            of_action: Any = action
            of_action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    print(shtab.complete(args.whole, shell=args.shell))
    return OK


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of the commands below it."""
    for action in parser._actions:  # argparse has no public way to list them; shtab goes the same way
        yield action
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _actions(below)
