"""An uncaught error under torchrun, in a few lines: every rank makes a mistake, and tracebacks hide it."""

from __future__ import annotations

import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from meshfeed.errors import MeshfeedError

_OURS, _PYTHONS = str(Path(__file__).parent), sysconfig.get_path("stdlib")
_OF_LIBRARIES = re.compile(r"-packages/(?!(torch|numpy)/)")  # site-packages or dist-packages


def shorten() -> None:
    """Print the message of an uncaught MeshfeedError without this package's frames.

    The first rank of each node prints the script's own lines, too. Everything is printed at level DEBUG of
    the logger "meshfeed", and where a user's code raised within this package, or before it.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MeshfeedError) and not _is_needed_whole(error, trace):
            error.__cause__, error.__suppress_context__ = None, True
            trace = _above(trace) if os.environ.get("LOCAL_RANK", "0") == "0" else None
            error.__traceback__ = trace
        before(kind, error, trace)

    sys.excepthook = hook


def _is_needed_whole(error: BaseException, trace: TracebackType | None) -> bool:
    if logging.getLogger("meshfeed").isEnabledFor(logging.DEBUG):
        return True
    inside = list(_frames(trace))[len(list(_frames(_above(trace)))) :]
    while (before := _before(error)) is not None:
        inside += _frames(before.__traceback__)
        error = before
    return any(map(_is_users, map(_file, inside)))


def _before(error: BaseException) -> BaseException | None:
    """The error that led to one, or that was being handled, as Python prints it too."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_users(file: str) -> bool:
    """Whether a source file is of a user, or of a library that reads for a user's dataset."""
    if file.startswith((_OURS, "<")):
        return False
    return _OF_LIBRARIES.search(file) is not None or not ("-packages/" in file or file.startswith(_PYTHONS))


def _above(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback above this package."""
    made = None
    for each in reversed(list(takewhile(lambda each: not _file(each).startswith(_OURS), _frames(trace)))):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
