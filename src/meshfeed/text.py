"""Text from outside, made safe to show: what a store, a file name, a peer or a user's code says."""

from __future__ import annotations

import contextlib
import logging

_COMMANDS = [code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]
_TURNS = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]  # and other line ends
_HIDDEN = {code: f"\\x{code:02x}" for code in _COMMANDS} | {code: f"\\u{code:04x}" for code in _TURNS}


def visible(text: str) -> str:
    """Text with control characters, changes of writing direction and odd line ends shown as escapes.

    Tabs and line ends stay. Every `MeshfeedError` and every line of the logger "meshfeed" passes through it,
    and so does what the command line prints and the pages show.
    """
    return text.translate(_HIDDEN)


def _make_visible(record: logging.LogRecord) -> bool:
    with contextlib.suppress(Exception):  # logging itself reports arguments that do not fit
        record.msg, record.args = visible(record.getMessage()), ()
    if record.exc_info:
        record.exc_text = visible(logging.Formatter().formatException(record.exc_info))
    return True


logging.getLogger("meshfeed").addFilter(_make_visible)
