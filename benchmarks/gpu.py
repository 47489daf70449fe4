"""What only a GPU can show: one page of figures for the machine at hand.

    make gpu                                        everything, on the first CUDA device
    python benchmarks/gpu.py --only staging,graphs  some pieces
    python benchmarks/gpu.py --short --out DIR      seconds, and no claim about speed
    python benchmarks/gpu.py --megatron DIR         and Megatron-LM's pretrain, from that checkout

PyTorch and NumPy are enough. Where Transformer Engine and Megatron-core are installed, their cp splits are
compared with ours. The page is docs/gpu/DEVICE.md; it lists what was left out, and why. Without a GPU
everything runs on the CPU, and times are left out. A piece that fails does not stop the others; the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from gpu_bench import Bench, LeftOut, Shown, first_line
from gpu_fields import rules, staging, widening
from gpu_models import calibration, cp_split, graphs, pretrain
from gpu_ranks import encoding, exchanging, sharing
from measure import Row

from meshfeed.extras import version_of

PAGES = Path(__file__).parents[1] / "docs" / "gpu"

PIECES: dict[str, Callable[[Bench], Shown]] = {
    "widening": widening,
    "rules": rules,
    "staging": staging,
    "sharing": sharing,
    "exchanging": exchanging,
    "encoding": encoding,
    "cp_split": cp_split,
    "graphs": graphs,
    "calibration": calibration,
    "pretrain": pretrain,
}


@dataclass
class Section:
    """What one piece showed."""

    title: str
    text: str
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    error: str = ""


def show(name: str, device: torch.device, *, short: bool, megatron: Path | None = None) -> Section:
    """Run one piece; an error of it is part of what it showed."""
    piece = PIECES[name]
    section = Section(name.replace("_", " ").capitalize(), " ".join((piece.__doc__ or "").split()))
    print(f"{section.title}: {section.text}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for shown in piece(Bench(device, short, Path(folder), megatron)):
                (section.rows if isinstance(shown, Row) else section.left_out).append(shown)  # type: ignore
                print(f"  {shown}", flush=True)
    except (Exception, SystemExit) as error:  # the latter of processes that it started
        traceback.print_exc()
        section.error = f"{type(error).__name__}: {first_line(error)}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return section


def page_of(sections: Iterable[Section], device: torch.device) -> str:
    """The page: figures first, then what was left out."""
    sections = list(sections)
    is_gpu = device.type == "cuda"
    lines = [
        f"# {'GPU' if is_gpu else 'Without a GPU'}: {name_of(device) if is_gpu else 'what runs on the CPU'}",
        "",
    ]
    if not is_gpu:
        lines += ["This page was made on a machine without a GPU. It shows no times.", ""]
    lines += [f"Made by `make gpu`. {versions(device)}. Missed targets are in bold.", ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        if section.rows:
            lines += ["| figure | value | target |", "|---|---|---|", *map(line_of, section.rows), ""]
        elif not section.error:
            lines += ["Left out here; see below.", ""]
        if section.error:
            lines += [f"**Failed**: {section.error}", ""]
    lines += ["## Left out", "", "| what | why |", "|---|---|"]
    lines += [f"| {each.what} | {each.why} |" for section in sections for each in section.left_out]
    return "\n".join(lines) + "\n"


def line_of(row: Row) -> str:
    """A line of a table."""
    name = f"{row.name} : {row.against}" if row.against else row.name
    return f"| {name} | {row.figure if row.holds else f'**{row.figure}**'} | {row.target} |"


def versions(device: torch.device) -> str:
    """Of everything that has a part in the figures."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"NumPy {np.__version__}"]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        parts = [f"{name_of(device)} (sm_{major}{minor})", f"CUDA {torch.version.cuda}", *parts]
    packages = ("transformer-engine", "megatron-core")
    return ", ".join(parts + [f"{name} {version_of(name) or 'not installed'}" for name in packages])


def name_of(device: torch.device) -> str:
    """The device as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main() -> None:
    """Run the pieces, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,...", help=f"some of {', '.join(PIECES)}")
    parser.add_argument("--short", action="store_true", help="seconds, and no claim about speed")
    parser.add_argument("--out", type=Path, default=PAGES, metavar="DIR", help="where the page is written")
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="a checkout of Megatron-LM")
    args = parser.parse_args()
    only = args.only.split(",") if args.only else list(PIECES)
    if unknown := set(only) - set(PIECES):
        parser.error(f"no piece is called {', '.join(sorted(unknown))}")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    page = args.out / f"{re.sub(r'[^a-z0-9]+', '-', name_of(device).lower()).strip('-')}.md"
    sections: list[Section] = []
    for name in only:
        sections.append(show(name, device, short=args.short, megatron=args.megatron))
        page.write_text(page_of(sections, device))
    print(f"wrote {page}")
    sys.exit(any(section.error for section in sections))


if __name__ == "__main__":
    main()
