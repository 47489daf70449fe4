"""Switches that users set as environment variables."""

from __future__ import annotations

import os

from meshfeed.errors import OptionError

_YES, _NO = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def switch(name: str, *, unset: bool) -> bool:
    """Whether an environment variable says yes, in any case; `unset` where it is missing or empty.

    Raises OptionError for a word that is neither yes nor no.
    """
    asked = os.environ.get(name, "")
    if asked and asked.lower() not in (*_YES, *_NO):
        raise OptionError(
            f"{name}={asked!r}: set it to one of {', '.join(_NO if unset else _YES)}, or unset it"
        )
    return asked.lower() in _YES if asked else unset
