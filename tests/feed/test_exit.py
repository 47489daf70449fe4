"""An interpreter that ends while a feed is open ends cleanly: nobody has to close it after `break`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from corpus import write_corpus
from soak import cases

# Forks, since an import of torch costs seconds: each child ends as a script does, through the interpreter's end.
SCRIPT = """
import contextlib, datetime, os, resource, sys, time
import torch
import torch.distributed as dist
import meshfeed as mf

class SlowStore(dist.FileStore):  # a thread that sets a key stays inside torch for a while
    def set(self, key, value):
        with contextlib.suppress(dist.DistStoreError):
            super().wait(["never set"], datetime.timedelta(seconds=0.2))
        super().set(key, value)

class LongEnd:  # a thread still inside torch returns while the interpreter ends
    def __del__(self, sleep=time.sleep):
        sleep(0.6)

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
path, folder, *deliveries = sys.argv[1:]
codes, rank, _ = [], None, mf.Feed  # what it imports, all children have
for attempt, delivery in enumerate(deliveries):
    size = 1 if delivery == "direct" else 2
    children = []
    for each in range(size):
        child = os.fork()
        if not child:
            rank = each
            break
        children.append(child)
    if rank is not None:
        break
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
if rank is None:
    print(*codes)
    sys.exit()
torch.set_num_threads(1)
store, end = None if size == 1 else SlowStore(f"{folder}/{attempt}", size), LongEnd()
recipe = mf.Recipe(data=mf.open(path), sequence=mf.Windows(4096), batch=mf.Batch(sequences=16), seed=attempt)
transport = mf.Transport(delivery=delivery, rendezvous=store, prefetch=4, timeout_s=600)
feed = mf.Feed(recipe, mf.Layout(tp=size), rank, transport=transport)
for step in feed:
    list(step.microbatches)
    if step.index == (attempt + attempt // 3) % 3:
        break
"""


def test_a_dropped_feed_ends_cleanly(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", num_tokens=500_000)
    deliveries = ["direct", "share", "broadcast"] * cases(1)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "c"), str(tmp_path), *deliveries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["0"] * (len(deliveries) // 3 * 5)
