"""meshfeed watch: a live run from its log: which ranks wait, for what, how fast, and which are silent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from meshfeed.cli.command import OK, WRONG, Console, Table, print_json
from meshfeed.cli.frame import Frame, Standing, Straggler, frame_of
from meshfeed.cli.options import Command, argument, option
from meshfeed.report import RunReader
from meshfeed.report.history.decoding import STAGE, advice, limit_words
from meshfeed.report.words import counted, duration

_KEEP_STEPS = 1000
_MOST_ROWS = 40  # without a terminal
_OTHER_LINES = 10  # of a screen, besides the ranks
_TOLD_S = 2.0
_SHOWN_S = 0.0005  # a stage needs this wait for a column


@dataclass(frozen=True, kw_only=True)
class Watch(Command):
    """a live run in the terminal: which ranks wait, for which stage, how fast, which are silent

    Follow a live run by the log that mf.metrics.RunLog(DIR) writes: every rank, worst first, and which
    one slows the others. Ctrl-C stops. Without a terminal it prints once.
    """

    examples = """
        meshfeed watch runs/7
        meshfeed watch runs/7 --steps 100 --every 5
        meshfeed watch runs/7 --once --json | jq .straggler
    """
    wrong = "with --once: the run has not begun, or a rank is silent or missing"
    keys = {
        "num_starts, start": "how often the job has started; the last: time, step, layout, world_size, ...",
        "step, step_s, tokens_per_s": "the foremost rank's last step; of the median rank, see below",
        "straggler": "rank, stage, does (waits or works), seconds a step, usual_s, num_others; or null",
        "ranks": "one object per rank of the last start, worst first, with the keys below",
        "rank, coord, host, step, behind": "who; its last step; steps behind the foremost",
        "wait_s, work_s": "stage -> seconds per step, averaged over the last --steps",
        "step_s, tokens_per_s": "seconds a step; tokens of the whole job at this rank's pace",
        "bytes_per_s, queue_depth": "bytes that it reads itself; steps that are ready",
        "decoded, decode_limit": "with images and so on: workers, parts_per_s, busy, ...; rank that limits",
        "padding, quiet_s, silent_s": "null if not packed; seconds since its last entry; null if not silent",
        "stages": "stages in which some rank waits",
        "missing, silent": "ranks that have not logged this start; ranks that have stopped logging",
        "mixture": "name, realised, asked of each source, as shares of the sequences",
    }

    path: Path = argument("DIR", "the folder of the run log")
    once: bool = option("print the current state and exit", default=False)
    steps: int = option("average over the last N steps", default=20)
    every: float = option(
        "time between updates; --json prints a line for each", default=1.0, metavar="SECONDS"
    )
    silent: float | None = option(
        "a rank without an entry for so long is silent (30, or five of its steps)", metavar="SECONDS"
    )
    rows: int | None = option(f"ranks to show (what fits; {_MOST_ROWS} into a file)")

    def run(self) -> int:
        console = Console()
        reader = RunReader(self.path, keep=max(_KEEP_STEPS, self.steps + 1))

        def look() -> Frame:
            history = reader.poll() if _has_begun(self.path) else None
            return frame_of(history, time.time(), steps=self.steps, silent_s=self.silent)

        def picture(frame: Frame) -> Group:
            fitting = max(console.height - _OTHER_LINES, 3) if console.is_terminal else _MOST_ROWS
            return picture_of(frame, self.path, self.rows or fitting)

        if self.once or not (console.is_terminal or self.json):
            frame = look()
            if self.json:
                print_json(told(frame))
            else:
                console.print(picture(frame))
            return OK if frame.start is not None and not frame.silent and not frame.missing else WRONG
        try:
            if self.json:
                while True:
                    print_json(told(look()), indent=None)
                    time.sleep(self.every)
            frame = look()
            try:
                with Live(picture(frame), console=console, screen=True, auto_refresh=False) as live:
                    while True:
                        time.sleep(self.every)
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
    made: dict[str, Any] = asdict(frame) | {"silent": frame.silent}
    if frame.start is None or frame.start.decode_workers is None:  # text has nothing of it
        del made["decode_limit"]
        for each in made["ranks"]:
            del each["decoded"]
        if made["start"]:
            del made["start"]["decode_workers"]
    return made


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
    limited = next((each for each in frame.ranks if each.rank == frame.decode_limit), None)
    if limited is not None and limited.step_s is not None:
        waited = limited.wait_s[STAGE]
        words = limit_words(limited.rank, waited, min(waited / limited.step_s, 1.0))
        lines.append(words if limited.decoded is None else f"{words} {advice(limited.decoded)}")
    elif frame.straggler is not None:
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
    packed = any(each.padding is not None for each in frame.ranks)
    decodes = any(each.decoded is not None for each in frame.ranks)
    table = Table(title_justify="left", title="exposed wait, ms a step, by stage")
    more = ["parts/s", "decoders"] * decodes + ["padding"] * packed
    for name in ("rank", "place", "step", *stages, "all", "tokens/s", "queue", "bytes/s", *more, ""):
        table.add_column(name, justify="left" if name in ("place", "") else "right")
    shown = frame.ranks if len(frame.ranks) <= num_rows else frame.ranks[: max(num_rows - 1, 1)]
    dims = [name for name in frame.ranks[0].coord if any(each.coord.get(name) for each in frame.ranks)]
    for each in shown:
        place = " ".join(f"{name}{each.coord[name]}" for name in dims) or "-"
        row = [
            Text(cell)
            for cell in (str(each.rank), place, *_cells([each], stages, decodes, packed), _note(each))
        ]
        worst = frame.straggler
        if worst is not None and worst.rank == each.rank and worst.stage in stages:
            for at in (0, 3 + stages.index(worst.stage)):
                row[at].stylize("bold red")
        table.add_row(*row, style="dim" if each.silent_s is not None else None)
    if rest := frame.ranks[len(shown) :]:
        many = f"{counted(len(rest), 'rank')}, at worst"
        table.add_row("others", many, *_cells(rest, stages, decodes, packed), "", style="dim")
    return table


def _note(each: Standing) -> str:
    """What stands at the end of a rank's row."""
    if each.silent_s is not None:
        return f"silent for {duration(each.silent_s)}"
    # logs are written once a second, so ranks this close may be at the same step
    if each.behind > 1 and each.behind * (each.step_s or _TOLD_S) >= _TOLD_S:
        return f"{counted(each.behind, 'step')} behind"
    return ""


def _cells(ranks: Sequence[Standing], stages: Sequence[str], decodes: bool, packed: bool) -> list[str]:
    """The values of a rank, or the worst of each value of several."""
    steps = [each.step for each in ranks if each.step is not None]
    paddings = [each.padding for each in ranks if each.padding is not None]
    return [
        f"{min(steps):,}" if steps else "-",
        *(_milliseconds(max(each.wait_s[name] for each in ranks)) for name in stages),
        _milliseconds(max(sum(each.wait_s.values()) for each in ranks)),
        _least(each.tokens_per_s for each in ranks),
        str(min(each.queue_depth for each in ranks)),
        _least(each.bytes_per_s for each in ranks),
        *(_decoded(ranks) if decodes else []),
        *([f"{max(paddings):.1%}" if paddings else "-"] if packed else []),
    ]


def _decoded(ranks: Sequence[Standing]) -> list[str]:
    """Parts a second, and how busy those are that decode them."""
    done = [each.decoded for each in ranks if each.decoded is not None]
    if not done:
        return ["-", "-"]
    return [_amount(min(each.parts_per_s for each in done)), f"{max(each.busy for each in done):.0%} busy"]


def _mixture(frame: Frame) -> list[Text]:
    if not frame.mixture:
        return []
    parts = (f"{each.name} {each.realised:.1%} of {each.asked:.1%} asked" for each in frame.mixture)
    return [Text(""), Text("mixture, in sequences: " + ", ".join(parts))]


def _least(found: Iterable[float | None]) -> str:
    known = [each for each in found if each is not None]
    return _amount(min(known)) if known else "-"


def _ranks(ranks: Sequence[int]) -> str:
    """The first few ranks by name, with the verb."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8:,} more" if len(ranks) > 8 else "")
    return f"ranks {named} are"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= _SHOWN_S else "."


def _amount(number: float) -> str:
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {sign}"
    return f"{number:,.0f}"
