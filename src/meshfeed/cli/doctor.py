"""meshfeed doctor: what this machine offers, and what meshfeed will do with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.text import Text

import meshfeed as mf
from meshfeed.cli import machine, storage
from meshfeed.cli.command import OK, WRONG, Console, Table, print_json
from meshfeed.cli.machine import Finding
from meshfeed.cli.options import Command, argument, option, refuse_given
from meshfeed.cli.recipes import StorageOptions

_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}
_WIDTH = 140


@dataclass(frozen=True, kw_only=True)
class Doctor(Command, StorageOptions):
    """Look at this machine as a training rank would: versions, optional packages, deliveries, limits, locked
    memory, the cache folder, and whether stores, local or remote, can be opened.
    """

    examples = """
        meshfeed doctor
        meshfeed doctor --layout tp8-cp2-dp4-pp2 --ranks-per-node 8
        meshfeed doctor s3://bucket/corpus --storage region=eu-west-1 --cache /local/cache
        meshfeed doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    wrong = "something will fail: a finding is bad"
    keys = {
        "findings": "one object per check, with the keys below",
        "topic": "what was checked",
        "verdict": "ok; note (works, but differently); bad (will fail)",
        "says": "what was found, and what follows",
        "figures": "measurements, name with unit -> number; null where there are none",
    }

    paths: list[str] = argument("PATH", "stores, local or remote: check that they can be opened", nargs="*")
    layout: str | None = option("also show the delivery that this layout would use", metavar="LAYOUT")
    ranks_per_node: int = option("ranks that share a machine, for --layout", default=8)

    def run(self) -> int:
        if not self.layout:
            refuse_given(self, ("ranks_per_node",), "has no effect without --layout")
        layout = mf.Layout.parse(self.layout, ranks_per_node=self.ranks_per_node) if self.layout else None
        options, cache = self.storage_options, mf.Cache(self.cache)
        findings = [*machine.findings(layout), storage.cache_folder(cache)]
        for path in self.paths:
            findings += storage.place(path, options, cache)
        if self.json:
            print_json({"findings": [asdict(finding) for finding in findings]})
        else:
            _print(findings)
        return WRONG if any(finding.verdict == "bad" for finding in findings) else OK


def _print(findings: list[Finding]) -> None:
    console = Console()
    table = Table("", "what", "finding", title="meshfeed doctor", title_justify="left")
    for finding in findings:
        mark = Text(finding.verdict, style=_COLOURS[finding.verdict])
        table.add_row(mark, Text(finding.topic), Text(finding.says))
    console.print(table, width=min(console.width, _WIDTH))
