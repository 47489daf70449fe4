"""meshfeed: the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from meshfeed.cli import bench, convert, demo, doctor, inspect, plan, roles, trace
from meshfeed.errors import MeshfeedError

_COMMANDS = (demo, convert, inspect, roles, plan, trace, bench, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 something is wrong, 2 cannot be asked so."""
    parser = argparse.ArgumentParser(
        prog="meshfeed", description="One virtual dataloader for every rank of an N-D-parallel training job."
    )
    parser.add_argument("--version", action="version", version=f"meshfeed {version('meshfeed')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except MeshfeedError as error:
        print(f"meshfeed: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has had enough, as `head` does
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
