"""What the shell's `meshfeed` starts: outside the package, whose import alone takes seconds."""

import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

_INTERRUPTED = 130


def main() -> int:
    """Import and run the command; Ctrl-C while it is imported ends it at once and without a traceback."""
    if sys.argv[1:] == ["--version"]:  # needs nothing that the package's import brings
        print(f"meshfeed {_version()}")
        return 0
    # A parent that has Ctrl-C ignored wants just that.
    minds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if minds:
        signal.signal(signal.SIGINT, _end)
    from meshfeed.cli.main import import_command, main

    import_command(sys.argv[1:])
    if minds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _version() -> str:
    try:
        return version("meshfeed")
    except PackageNotFoundError:
        return "(not installed)"


def _end(*_: object) -> NoReturn:
    # An exception would do less: what imports a compiled module may turn it into another, or swallow it.
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
