"""meshfeed watch: a live run from its log: which ranks wait, for what, how fast, and which are silent."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from meshfeed.cli.command import OK, WRONG, Console, Table, add_command, positive, print_json, whole
from meshfeed.cli.frame import Frame, Standing, Straggler, frame_of
from meshfeed.metrics import RunReader
from meshfeed.report.words import counted, duration

_KEEP_STEPS = 1000
_MOST_ROWS = 40  # without a terminal
_OTHER_LINES = 10  # of a screen, besides the ranks
_TOLD_S = 2.0
_SHOWN_S = 0.0005  # a stage needs this wait for a column

_KEYS = {
    "num_starts, start": "how often the job has started; the last: time, step, layout, world_size, ...",
    "step, step_s, tokens_per_s": "the foremost rank's last step; of the median rank, see below",
    "straggler": "rank, stage, does (waits or works), seconds a step, usual_s, num_others; or null",
    "ranks": "one object per rank of the last start, worst first, with the keys below",
    "rank, coord, host, step, behind": "who; its last step; steps behind the foremost",
    "wait_s, work_s": "stage -> seconds per step, averaged over the last --steps",
    "step_s, tokens_per_s": "seconds a step; tokens of the whole job at this rank's pace, not to be summed",
    "bytes_per_s, queue_depth": "bytes that it reads itself; steps that are ready",
    "padding, quiet_s, silent_s": "null if not packed; seconds since its last entry; null if not silent",
    "stages": "stages in which some rank waits",
    "missing, silent": "ranks that have not logged this start; ranks that have stopped logging",
    "mixture": "name, realised, asked of each source",
}


def add_parser(subparsers: Any) -> None:
    """Add `watch` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "watch",
        run,
        help="a live run in the terminal: which ranks wait, for which stage, how fast, which are silent",
        description="Follow a live run by the log that mf.metrics.RunLog(DIR) writes: every rank, worst "
        "first, and which one slows the others. Ctrl-C stops. Without a terminal it prints once.",
        examples="""
            meshfeed watch runs/7
            meshfeed watch runs/7 --steps 100 --every 5
            meshfeed watch runs/7 --once --json | jq .straggler
        """,
        wrong="with --once: the run has not begun, or a rank is silent or missing",
        keys=_KEYS,
    )
    parser.add_argument("path", metavar="DIR", type=Path, help="the folder of the run log")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument(
        "--steps", type=whole(1), default=20, metavar="N", help="average over the last N steps (20)"
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=1.0,
        metavar="SECONDS",
        help="time between updates (1); --json prints a line for each",
    )
    parser.add_argument(
        "--silent",
        type=positive,
        metavar="SECONDS",
        help="a rank without an entry for so long is silent (30, or five of its steps)",
    )
    parser.add_argument(
        "--rows", type=whole(1), metavar="N", help=f"ranks to show (what fits; {_MOST_ROWS} into a file)"
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until interrupted, or once."""
    console = Console()
    reader = RunReader(args.path, keep=max(_KEEP_STEPS, args.steps + 1))

    def look() -> Frame:
        history = reader.poll() if _has_begun(args.path) else None
        return frame_of(history, time.time(), steps=args.steps, silent_s=args.silent)

    def picture(frame: Frame) -> Group:
        fitting = max(console.height - _OTHER_LINES, 3) if console.is_terminal else _MOST_ROWS
        return picture_of(frame, args.path, args.rows or fitting)

    if args.once or not (console.is_terminal or args.json):
        frame = look()
        if args.json:
            print_json(told(frame))
        else:
            console.print(picture(frame))
        return OK if frame.start is not None and not frame.silent and not frame.missing else WRONG
    try:
        if args.json:
            while True:
                print_json(told(look()), indent=None)
                time.sleep(args.every)
        frame = look()
        try:
            with Live(picture(frame), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(args.every)
                    frame = look()
                    live.update(picture(frame), refresh=True)
        finally:  # the old screen is back; print the last state on it
            console.print(picture(frame))
    except KeyboardInterrupt:  # the way to stop
        return OK


def _has_begun(path: Path) -> bool:
    """Whether there is a log to read; a file raises when it is read."""
    return path.is_file() or (path.is_dir() and any(path.glob("rank-*.jsonl")))


def told(frame: Frame) -> dict[str, Any]:
    """A frame as JSON."""
    return asdict(frame) | {"silent": frame.silent}


# -- pictures -----------------------------------------------------------------------------------------


def picture_of(frame: Frame, path: Path, num_rows: int) -> Group:
    """A frame for a terminal, with at most so many ranks."""
    title = Text(f"meshfeed watch {path}", style="bold")
    start = frame.start
    if start is None:
        nobody = "no rank has written a log yet" if path.exists() else "the folder does not exist yet"
        return Group(title, Text(f"has not begun: {nobody}", style="yellow"))
    lines = [title, Text(f"{start.layout or 'a layout of its own'}, {start.delivery}, {headline(frame)}")]
    if frame.num_starts > 1:
        lines.append(Text(f"start {frame.num_starts}, from step {start.step:,}; earlier ones are not shown"))
    lines += [Text(line, style="bold red") for line in alarms(frame)]
    return Group(*lines, Text(""), _table(frame, num_rows), *_mixture(frame))


def headline(frame: Frame) -> str:
    """One line: the step, the speed, and the share of time that the median rank waits for data."""
    parts = [counted(len(frame.ranks), "rank")]
    parts.append("no step yet" if frame.step is None else f"step {frame.step:,}")
    if frame.step_s is not None and frame.tokens_per_s is not None:
        part = statistics.median(sum(each.wait_s.values()) for each in frame.ranks) / frame.step_s
        parts.append(f"{duration(frame.step_s)} a step, {part:.0%} of it waiting")
        parts.append(f"{_amount(frame.tokens_per_s)} tokens/s")
    parts.append(f"last entry {duration(min(each.quiet_s for each in frame.ranks))} ago")
    return "; ".join(parts)


def alarms(frame: Frame) -> list[str]:
    """Problems to look at, a line each."""
    lines: list[str] = []
    if frame.straggler is not None:
        lines.append(straggler_words(frame.straggler))
    silent = [each for each in frame.ranks if each.silent_s is not None]
    if silent and len(silent) == len(frame.ranks):
        least = min(each.silent_s or 0.0 for each in silent)
        lines.append(f"all ranks are silent for {duration(least)}: the run has ended or hangs")
    elif silent:
        most = max(each.silent_s or 0.0 for each in silent)
        lines.append(f"{_ranks(frame.silent)} silent for {duration(most)}")
    if frame.missing:
        lines.append(f"{_ranks(frame.missing)} not started yet, or logging elsewhere")
    return lines


def straggler_words(straggler: Straggler) -> str:
    """The straggler in words."""
    words = (
        f"rank {straggler.rank} {straggler.does} {duration(straggler.seconds)} a step in {straggler.stage}"
        f" (others {duration(straggler.usual_s)})"
    )
    if straggler.does == "works":
        words += ", hidden by prefetching so far"
    return words + (f"; {counted(straggler.num_others, 'rank')} more like it" if straggler.num_others else "")


def _table(frame: Frame, num_rows: int) -> Table:
    stages = [name for name in frame.stages if any(each.wait_s[name] >= _SHOWN_S for each in frame.ranks)]
    table = Table(title_justify="left", title="exposed wait, ms a step, by stage")
    packed = ["padding"] if any(each.padding is not None for each in frame.ranks) else []
    for name in ("rank", "place", "step", *stages, "all", "tokens/s", "queue", "bytes/s", *packed, ""):
        table.add_column(name, justify="left" if name in ("place", "") else "right")
    shown = frame.ranks if len(frame.ranks) <= num_rows else frame.ranks[: max(num_rows - 1, 1)]
    worst = frame.straggler
    dims = [name for name in frame.ranks[0].coord if any(each.coord.get(name) for each in frame.ranks)]
    for each in shown:
        marked = worst.stage if worst is not None and worst.rank == each.rank else None
        cells = _row(each, dims, stages, marked, padding=bool(packed))
        table.add_row(*cells, style="dim" if each.silent_s is not None else None)
    rest = frame.ranks[len(shown) :]
    if rest:
        table.add_row(*_rest(rest, stages, padding=bool(packed)), style="dim")
    return table


def _row(
    each: Standing, dims: Sequence[str], stages: Sequence[str], marked: str | None, *, padding: bool
) -> list[Text]:
    note = f"silent for {duration(each.silent_s)}" if each.silent_s is not None else ""
    # logs are written once a second, so ranks this close may be at the same step
    if not note and each.behind > 1 and each.behind * (each.step_s or _TOLD_S) >= _TOLD_S:
        note = f"{counted(each.behind, 'step')} behind"
    cells = [
        str(each.rank),
        " ".join(f"{name}{each.coord[name]}" for name in dims) or "-",
        "-" if each.step is None else f"{each.step:,}",
        *(_milliseconds(each.wait_s[name]) for name in stages),
        _milliseconds(sum(each.wait_s.values())),
        _amount(each.tokens_per_s),
        str(each.queue_depth),
        _amount(each.bytes_per_s),
        *(["-" if each.padding is None else f"{each.padding:.1%}"] if padding else []),
        note,
    ]
    texts = [Text(cell) for cell in cells]
    if marked in stages:
        for at in (0, 3 + stages.index(str(marked))):
            texts[at].stylize("bold red")
    return texts


def _rest(ranks: Sequence[Standing], stages: Sequence[str], *, padding: bool) -> list[Text]:
    """One row for all ranks that did not fit, with the worst of each value."""
    steps = [each.step for each in ranks if each.step is not None]
    paddings = [each.padding for each in ranks if each.padding is not None]
    cells = [
        "others",
        f"{counted(len(ranks), 'rank')}, at worst",
        f"{min(steps):,}" if steps else "-",
        *(_milliseconds(max(each.wait_s[name] for each in ranks)) for name in stages),
        _milliseconds(max(sum(each.wait_s.values()) for each in ranks)),
        _amount(_least(each.tokens_per_s for each in ranks)),
        str(min(each.queue_depth for each in ranks)),
        _amount(_least(each.bytes_per_s for each in ranks)),
        *([f"{max(paddings, default=0.0):.1%}"] if padding else []),
        "",
    ]
    return [Text(cell) for cell in cells]


def _mixture(frame: Frame) -> list[Text]:
    if not frame.mixture:
        return []
    parts = (f"{each.name} {each.realised:.1%} of {each.asked:.1%} asked" for each in frame.mixture)
    return [Text(""), Text("mixture: " + ", ".join(parts))]


def _least(found: Iterable[float | None]) -> float | None:
    return min((each for each in found if each is not None), default=None)


def _ranks(ranks: Sequence[int]) -> str:
    """The first few ranks by name, with the verb."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8:,} more" if len(ranks) > 8 else "")
    return f"ranks {named} are"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= _SHOWN_S else "."


def _amount(number: float | None) -> str:
    if number is None:
        return "-"
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {sign}"
    return f"{number:,.0f}"
