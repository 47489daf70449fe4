"""The demo from start to end: train on eight processes, kill them, resume under a different layout."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from demo.compare import Comparison, Run, compare
from demo.corpus import make_corpus
from demo.page import balance_of, page
from demo.remote import train_from_remote_storage
from demo.remote_page import Remote
from demo.runs import Trainer, begin_server, latest_checkpoint
from meshfeed.errors import LayoutError, MeshfeedError
from meshfeed.layout import Layout

TOLERANCE = 1e-6
PACKED = ("in_order", "balanced")
PACKED_SIZES = {"capacity": 1024, "window": 1024, "sequences": 16, "steps": 3}
_MOST_RANKS = 16


def run(args: argparse.Namespace) -> int:
    """Tell the story; 0 where the runs agree, 1 where they do not. Raises MeshfeedError."""
    first, then = _layout(args.first), _layout(args.then)
    if not 0 < args.kill_at < args.steps:
        raise MeshfeedError(f"--kill-at {args.kill_at} must lie between 0 and --steps {args.steps}")
    console, out = Console(), args.out
    _prepare(out)
    begin_server()
    corpus = make_corpus(out / "corpus", console)
    console.print(
        f"corpus: {corpus.num_files:,} files of the standard library, {corpus.num_tokens:,} tokens, "
        f"vocabulary {corpus.vocab:,}"
    )
    trainer = Trainer(out, corpus, args.steps, args.delivery, console)

    trainer.train("reference", "tp1", "uninterrupted, one process")
    trainer.train("first", str(first), f"{first.world_size} processes, {first}", kill_at=args.kill_at)
    checkpoint, resumed_at = latest_checkpoint(out)
    console.print(
        f"[red]SIGKILL[/red] to all {first.world_size} ranks; the last checkpoint is step {resumed_at}"
    )
    trainer.train("then", str(then), f"{then.world_size} processes, {then}", resume=checkpoint)

    _train_packed(trainer)
    packed = {policy: Run.read(out, policy) for policy in PACKED}
    runs = {name: Run.read(out, name) for name in ("reference", "first", "then")}
    found = compare(runs["reference"], runs["first"], runs["then"], resumed_at, TOLERANCE)
    _write(out, args, corpus.facts(), runs, packed, None, found, resumed_at)
    try:
        remote = train_from_remote_storage(trainer, corpus, out, console)
    except MeshfeedError as error:
        _tell(console, found, out)
        raise MeshfeedError(f"the runs from remote storage failed, all others have ended: {error}") from error
    _write(out, args, corpus.facts(), runs, packed, remote, found, resumed_at)
    for policy, run_ in packed.items():
        console.print(f"packed {policy}: {balance_of(run_).efficiency:.1%} of the ranks' time is work")
    for name, told in (("remote", "meshfeed"), ("apart", "every rank for itself")):
        fetched = remote.fetched_bytes[name] / remote.consumed_bytes[name]
        waited_ms = remote.exposed_s(name) / remote.num_steps(name) * 1e3
        console.print(
            f"remote storage, {told}: {fetched:.2f} bytes fetched for each used, training waited "
            f"{waited_ms:,.0f} ms a step; {remote.late[name]} of {remote.requests[name]} requests took "
            f"{remote.late_by:.0f} times as long as usual",
            soft_wrap=True,
        )
    _tell(console, found, out)
    return 0 if found.agree else 1


def _train_packed(trainer: Trainer) -> None:
    """The same text as whole documents: in stream order, and balanced; a process for each of two cores."""
    for policy in PACKED:
        options = {**PACKED_SIZES, "packing": policy, "checkpoint-every": 1000}
        trainer.train(policy, "dp2", f"2 processes, packed {policy}", options=options)


def _layout(text: str) -> Layout:
    layout = Layout.parse(text)
    if layout.world_size > _MOST_RANKS:
        raise LayoutError(f"layout {text} has {layout.world_size} ranks; the demo runs up to {_MOST_RANKS}")
    if 4 % layout.tp or layout.pp > 4:
        raise LayoutError(
            f"layout {text}: the demo's model has 4 heads and 4 layers; tp must divide 4, pp ≤ 4"
        )
    return layout


def _prepare(out: Path) -> None:
    """An empty directory; a demo's earlier one is cleared, anything else is left alone."""
    try:
        if out.exists() and any(out.iterdir()) and not (out / "demo.json").exists():
            raise MeshfeedError(f"--out {out}: is not empty and no earlier demo's; name another directory")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "demo.json").write_text(json.dumps({"arguments": sys.argv[1:]}))
    except OSError as error:
        raise MeshfeedError(f"--out {out}: {error.strerror or error}; name another directory") from error


def _write(
    out: Path,
    args: argparse.Namespace,
    corpus: dict[str, Any],
    runs: dict[str, Run],
    packed: dict[str, Run],
    remote: Remote | None,
    found: Comparison,
    resumed_at: int,
) -> None:
    losses = {name: run.losses for name, run in runs.items()}
    facts = {
        "first": args.first,
        "then": args.then,
        "kill_at": args.kill_at,
        "resumed_at": resumed_at,
        "steps": args.steps,
        "tolerance": TOLERANCE,
        "agree": found.agree,
        "max_difference": found.max_difference,
        "losses": losses,
    }
    (out / "losses.json").write_text(json.dumps(facts, indent=1))
    (out / "report.html").write_text(page(facts, corpus, runs, packed, remote, found))


def _tell(console: Console, found: Comparison, out: Path) -> None:
    console.print(
        f"ledger: {found.num_sequences:,} sequences, {len(found.lost)} lost, {len(found.repeated)} repeated "
        f"or moved, {found.num_redone} read again after the kill",
        soft_wrap=True,
    )
    console.print(f"losses: largest difference from the uninterrupted run {found.max_difference:.2e}")
    for problem in found.problems:
        console.print(f"[red]{problem}[/red]")
    verdict = (
        "[bold green]they agree[/bold green]" if found.agree else "[bold red]they do NOT agree[/bold red]"
    )
    console.print(f"{verdict}; see {out / 'report.html'}")
