"""A process's side of a rendezvous store: whatever the store is, and whenever garbage is collected."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

from meshfeed.deliver import ErrorRecord, Failures, Meeting
from meshfeed.deliver.rendezvous import rendezvous_of

PUBLIC = (
    "set",
    "get",
    "add",
    "check",
    "compare_set",
    "append",
    "delete_key",
    "wait",
    "multi_set",
    "multi_get",
)


class PythonStore(dist.Store):
    """A store written in Python, which cannot be cloned, such as torchelastic's EtcdStore."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()


for name in PUBLIC:
    setattr(PythonStore, name, lambda self, *given, of=name: getattr(self.inner, of)(*given))


def test_notices_are_heard_through_a_store_written_in_python() -> None:
    store, heard = PythonStore(), threading.Event()
    with pytest.raises(RuntimeError):
        store.clone()
    meeting = Meeting(store, 0, 60)
    with Failures(meeting, 0, heard.set):
        error = ErrorRecord("StoreError", "gone").encode(4096).decode()
        store.set("meshfeed/notice/0", json.dumps([meeting.prefix, 0, error]))
        assert heard.wait(120)


def test_the_first_text_counts_and_the_last_speaker_deletes_it() -> None:
    store = dist.HashStore()
    one = rendezvous_of(store)
    assert [one.say("kept", text, 60) for text in "abc"] == ["a"] * 3
    assert [one.say("key", text, 60, num_speakers=3) for text in "ab"] == ["a"] * 2
    assert store.check(["key"])
    assert one.say("key", "c", 60, num_speakers=3) == "a"
    assert store.num_keys() == 1 and store.get("kept") == b"a"


COLLECTING = """
import gc, os
import torch.distributed as dist
from meshfeed.deliver import Failures, Meeting, rendezvous
old, new = dist.HashStore(), dist.HashStore()
def run():
    with Failures(Meeting(old, 0, 5), 0, lambda: None):
        yield
class Kept: pass
gc.disable()
kept = Kept()
kept.itself, kept.run = kept, run()  # as an error's traceback keeps the loop that it ended
next(kept.run)
del kept
started = rendezvous.Rendezvous.start
def collecting(one):  # as at any allocation
    gc.collect()
    started(one)
rendezvous.Rendezvous.start = collecting
rendezvous.rendezvous_of(new)
print("done", flush=True)
os._exit(0)
"""


def test_garbage_may_be_collected_while_one_is_made() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "done\n", done.stderr
