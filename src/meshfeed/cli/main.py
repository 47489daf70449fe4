"""meshfeed: the command."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshfeed.cli.command import FAILED, INTERRUPTED, OK, say
from meshfeed.cli.options import Command, Parser, add_command
from meshfeed.errors import MeshfeedError
from meshfeed.extras import version_of

COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("Demo", "train a small GPT on several processes, kill it, resume it under a different layout"),
    "prepare": ("Prepare", "make a token store of text"),
    "inspect": ("Inspect", "what a token store holds, and whether it is whole"),
    "roles": ("ShowRoles", "who opens storage, who receives what from whom, bytes per step"),
    "plan": ("Plan", "balance, padding, microbatches of packed steps, as a table and a picture"),
    "trace": ("Trace", "which documents a step and rank saw, or where a document went"),
    "exposure": ("Exposure", "what a job drew of each source, or which steps saw some documents"),
    "doctor": ("Doctor", "what this machine offers: deliveries, limits, packages, storage"),
    "report": ("Report", "one page of a run: who waited for what and when, mixture, traffic, resumes"),
}
"""Name of a command and of its module -> its class, and what it is, in a line.

Most of the modules import torch: only that of the command that runs is imported."""

_OF_PYTHON = re.compile(r"""\w+=(?:\[[^\]]*\]|"[^"]*"|[\w.]*(?:\(\w*\))?) \((--[^()]+)\)""")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_EPILOG = """meshfeed COMMAND --help shows options, examples, exit statuses and the keys of --json"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 done, 1 the checked object has a fault, 2 usage error or
    failure, 130 interrupted."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _mend_streams()
        name = _name_in(words)
        parser = parser_of([name] if name in COMMANDS else [])
        if name and name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, 1)
            meant = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(COMMANDS)}"
            parser.error(f"there is no command {name!r}; {meant}")
        args = vars(parser.parse_args(words))
        status = args.pop("command")(**args).run()
        sys.stdout.flush()
        return status
    except MeshfeedError as error:
        _tell(str(error), error)
        return FAILED
    except SystemExit as ended:  # argparse: help, version or a usage error
        return ended.code if isinstance(ended.code, int) else OK
    except KeyboardInterrupt as error:
        _tell("interrupted", error)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _drop_output()
        return OK
    except MemoryError as error:
        what = f"not enough memory: {error}".removesuffix(": ")  # Python's own has no text
        _tell(f"{what}; ask for less, such as fewer sequences, steps or ranks", error)
        return FAILED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            _tell(f"cannot write the output: {error.strerror}; free some space, or write it elsewhere", error)
            _drop_output()
            return FAILED
        traceback.print_exc()
        print("meshfeed: this is a bug in meshfeed; please report it", file=sys.stderr)
        return FAILED


def import_command(words: Sequence[str]) -> None:
    """Import the command that these words run, which takes seconds."""
    if (name := _name_in(words)) in COMMANDS:
        _command(name)


def parser_of(names: Collection[str]) -> Parser:
    """A parser that lists all commands and reads the options of these."""
    parser = Parser(
        prog="meshfeed",
        description="One virtual dataloader for every rank of an N-D-parallel training job.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"meshfeed {version_of('meshfeed') or '(not installed)'}"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, help) in COMMANDS.items():
        if name in names:
            add_command(subparsers, name, help, _command(name))
        else:
            subparsers.add_parser(name, help=help)
    return parser


def _command(name: str) -> type[Command]:
    return getattr(importlib.import_module(f"meshfeed.cli.{name}"), COMMANDS[name][0])


def _name_in(words: Sequence[str]) -> str:
    """The command that is meant, the first word that is no option; "" without one."""
    return next((word for word in words if not word.startswith("-")), "")


def _tell(what: str, error: BaseException) -> None:
    """Print an error and its notes to stderr, a line each; of `name=value (--option)`, the option alone."""
    for line in (what, *getattr(error, "__notes__", ())):
        say("meshfeed: " + _OF_PYTHON.sub(r"\1", line), sys.stderr)


def _mend_streams() -> None:
    """Make both streams usable with any text: file names may not fit the locale's encoding."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")


def _drop_output() -> None:
    """Discard pending output, so that the interpreter's flush at exit succeeds."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
