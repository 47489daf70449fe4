"""meshfeed demo: train on eight processes, kill them, resume under a different layout, and compare."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import meshfeed
from meshfeed.cli.command import add_command, add_delivery, whole
from meshfeed.errors import MeshfeedError


def add_parser(subparsers: Any) -> None:
    """Add `demo` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "demo",
        run,
        help="train a small GPT on several processes, kill it, resume it under a different layout",
        description="Train a small GPT on the source of Python's standard library, on real processes. Kill "
        "them with SIGKILL, resume under a different layout, and compare losses and sample ledger with an "
        "uninterrupted single process.",
        examples="""
            meshfeed demo
            meshfeed demo --first tp2-dp2-pp2 --then cp2-dp2 --kill-at 12 --steps 30 --out demo-out
            meshfeed demo --first pp4 --then tp4 --delivery broadcast
        """,
        wrong="the runs differ",
    )
    parser.add_argument(
        "--first", default="tp2-dp2-pp2", metavar="LAYOUT", help="layout of the first job (tp2-dp2-pp2)"
    )
    parser.add_argument(
        "--then", default="cp2-dp2", metavar="LAYOUT", help="layout of the resumed job (cp2-dp2)"
    )
    parser.add_argument(
        "--kill-at",
        type=whole(1),
        default=12,
        metavar="N",
        help="kill all ranks after this step (12)",
    )
    parser.add_argument("--steps", type=whole(2), default=30, metavar="N", help="total number of steps (30)")
    add_delivery(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder for the corpus, logs and report (demo-out)",
    )


def run(args: argparse.Namespace) -> int:
    """Start the example; 0 where the runs agree, 1 where they do not. Raises MeshfeedError."""
    sys.path.insert(0, str(_examples()))
    return importlib.import_module("demo.story").run(args)


def _examples() -> Path:
    """The examples: beside the sources in a checkout, inside the package once installed."""
    package = Path(meshfeed.__file__).resolve().parent
    for folder in (package / "_examples", package.parents[1] / "examples"):
        if (folder / "demo").is_dir():
            return folder
    raise MeshfeedError(f"{package}: no examples/demo; run the demo from a checkout or a wheel of meshfeed")
