"""A picture for the docs of a real run: four processes, one slow to read, resumed under another layout.

    python docs/make/run_pictures.py [FOLDER]

writes report.png, as a browser shows the page of `meshfeed report`; that needs Playwright
and a Chromium. FOLDER is docs/pictures unless told otherwise.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import meshfeed as mf
from meshfeed.store import IndexedWriter

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
SHARES = {"code": 1, "web": 3}
SLOW_RANK, DELAY_S, COMPUTE_S = 2, 0.12, 0.06
LEGS = (("tp2-dp2", 40), ("dp4", 60))  # layout, the step to stop at


def main() -> None:
    """Make the run and its picture."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in enumerate(SHARES):
            write_corpus(Path(scratch) / name, seed)
        log, first = Path(scratch) / "runs" / "7", 0
        for layout, last in LEGS:
            job(layout, first, last, Path(scratch), log)
            first = last
        picture_report(log, folder / "report.png")


def write_corpus(path: Path, seed: int) -> None:
    """A store of some thousand random documents."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(path, np.uint16) as writer:
        for size in rng.lognormal(5.5, 1.0, 2000).astype(int).clip(8, 2048):
            writer.add_document(rng.integers(1, 60_000, size).astype(np.uint16))


def job(layout: str, first: int, last: int, folder: Path, log: Path) -> None:
    """One start of the job, in processes of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=train, args=(rank, port, layout, first, last, str(folder), str(log)))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank has failed; it says why above")


def train(rank: int, port: int, layout: str, first: int, last: int, folder: str, log: str) -> None:
    """A rank: reads, computes nothing for a while, meets the others."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=4)
    recipe = mf.Recipe(
        data=mf.Mixture({name: (mf.open(f"{folder}/{name}"), share) for name, share in SHARES.items()}),
        sequence=mf.Documents(),
        batch=mf.Batch(sequences=64),
        seed=1,
    )
    if rank == SLOW_RANK:
        load = recipe.sequence.load

        def slow(*args: object) -> object:
            time.sleep(DELAY_S)
            return load(*args)  # type: ignore[arg-type]

        object.__setattr__(recipe.sequence, "load", slow)
    packing, metrics = mf.Packing(capacity=2048), mf.metrics.RunLog(log)
    with mf.Feed(
        recipe,
        mf.Layout.parse(layout),
        packing=packing,
        transport=mf.Transport(delivery="direct"),
        metrics=metrics,
    ) as feed:
        if first:
            feed.load_state_dict(mf.State(recipe=recipe.summary(), step=first).to_json())
        for step in itertools.islice(feed, last - first):
            for _ in step.microbatches:
                pass
            time.sleep(COMPUTE_S)
            dist.barrier()
    dist.destroy_process_group()


def picture_report(log: Path, path: Path) -> None:
    """The page of `meshfeed report` in a browser."""
    from playwright.sync_api import sync_playwright

    from meshfeed.cli.main import main as meshfeed

    page_path = log.parent / "report.html"
    if meshfeed(["report", str(log), "--out", str(page_path)]):
        raise SystemExit("meshfeed report has failed; it says why above")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.goto(page_path.as_uri())
        page.screenshot(path=path)  # what one sees first
        browser.close()
    told(path)


def told(path: Path) -> None:
    """Say what was written."""
    print(f"wrote {path}, {path.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    main()
