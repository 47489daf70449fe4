"""meshfeed: the command."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from meshfeed.cli.calibrate import Calibrate
from meshfeed.cli.command import FAILED, INTERRUPTED, OK, say
from meshfeed.cli.convert import Convert
from meshfeed.cli.demo import Demo
from meshfeed.cli.doctor import Doctor
from meshfeed.cli.inspect import Inspect
from meshfeed.cli.options import Command, Parser, add_command
from meshfeed.cli.plan import Plan
from meshfeed.cli.prepare import Prepare
from meshfeed.cli.report import Report
from meshfeed.cli.roles import ShowRoles
from meshfeed.cli.trace import Trace
from meshfeed.cli.watch import Watch
from meshfeed.errors import MeshfeedError
from meshfeed.extras import version_of

COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "prepare": Prepare,
    "convert": Convert,
    "inspect": Inspect,
    "roles": ShowRoles,
    "plan": Plan,
    "trace": Trace,
    "calibrate": Calibrate,
    "doctor": Doctor,
    "watch": Watch,
    "report": Report,
}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_EPILOG = """meshfeed COMMAND --help shows options, examples, exit statuses and the keys of --json"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 done, 1 the checked object has a fault, 2 usage error or
    failure, 130 interrupted."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _mend_streams()
        parser = parser_of_all()
        _suggest(parser, words)
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
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            _tell(f"cannot write the output: {error.strerror}; free some space, or write it elsewhere", error)
            _drop_output()
            return FAILED
        traceback.print_exc()
        print("meshfeed: this is a bug in meshfeed; please report it", file=sys.stderr)
        return FAILED


def parser_of_all() -> Parser:
    """The parser of all commands."""
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
    for name, command in COMMANDS.items():
        add_command(subparsers, name, command)
    return parser


def _suggest(parser: Parser, words: Sequence[str]) -> None:
    """Refuse an unknown command and suggest a similar one."""
    word = next((word for word in words if not word.startswith("-")), None)
    if word is not None and word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, 1)
        meant = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(COMMANDS)}"
        parser.error(f"there is no command {word!r}; {meant}")


def _tell(what: str, error: BaseException) -> None:
    """Print an error and its notes to stderr, a line each."""
    for line in (what, *getattr(error, "__notes__", ())):
        say(f"meshfeed: {line}", sys.stderr)


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
