"""What the shell's `meshfeed` starts: outside the package, whose import alone takes seconds."""

import os
import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130


def main() -> int:
    """Import and run the command; Ctrl-C while it is imported ends it at once and without a traceback."""
    # A parent that has Ctrl-C ignored wants just that.
    minds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if minds:
        signal.signal(signal.SIGINT, _end)
    from meshfeed.cli.main import main

    if minds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _end(*_: object) -> NoReturn:
    # An exception would do less: what imports a compiled module may turn it into another, or swallow it.
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
