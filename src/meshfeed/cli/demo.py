"""meshfeed demo: train on eight processes, kill them, resume under a different layout, and compare."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import meshfeed
from meshfeed.cli.options import Command, option
from meshfeed.cli.roles import DeliveryChoice
from meshfeed.errors import MeshfeedError


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train a small GPT on the source of Python's standard library, on real processes. Kill them with
    SIGKILL, resume under a different layout, and compare losses and sample ledger with an uninterrupted
    single process.
    """

    examples = """
        meshfeed demo
        meshfeed demo --first tp2-dp2-pp2 --then cp2-dp2 --kill-at 12 --steps 30 --out demo-out
        meshfeed demo --first pp4 --then tp4 --delivery broadcast
    """
    wrong = "the runs differ"

    first: str = option("layout of the first job", default="tp2-dp2-pp2", metavar="LAYOUT")
    then: str = option("layout of the resumed job", default="cp2-dp2", metavar="LAYOUT")
    kill_at: int = option("kill all ranks after this step", default=12)
    steps: int = option("total number of steps", default=30, least=2)
    delivery: DeliveryChoice = option("how bytes reach the ranks", default="auto")
    out: Path = option("folder for the corpus, logs and report", default=Path("demo-out"), metavar="DIR")

    def run(self) -> int:
        sys.path.insert(0, str(_examples()))
        return importlib.import_module("demo.story").run(self)


def _examples() -> Path:
    """The examples: beside the sources in a checkout, inside the package once installed."""
    package = Path(meshfeed.__file__).resolve().parent
    for folder in (package / "_examples", package.parents[1] / "examples"):
        if (folder / "demo").is_dir():
            return folder
    raise MeshfeedError(f"{package}: no examples/demo; run the demo from a checkout or a wheel of meshfeed")
