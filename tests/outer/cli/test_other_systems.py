"""Commands that need no job run where Linux's own calls are missing, and --version loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.metrics import RunLog

# What macOS does not have, and `resource`, which not every system has.
_ELSEWHERE = """
import os, sys
for name in ("sched_getaffinity", "memfd_create", "posix_fadvise", "posix_fallocate", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
sys.modules["resource"] = None
import socket
bind = socket.socket.bind
def refuse(self, address):
    if isinstance(address, (str, bytes)) and address[:1] in ("\\0", b"\\0"):
        raise OSError(22, "no abstract sockets")
    return bind(self, address)
socket.socket.bind = refuse
from meshfeed.cli.main import main
statuses = [main(words) for words in __import__("json").loads(sys.argv[1])]
print("STATUSES", statuses)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with mf.IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_documents(np.zeros(400, np.uint16), np.full(40, 10))
    return tmp_path / "c"


def test_commands_run_where_linux_calls_are_missing(tmp_path: Path, store: Path) -> None:
    log = tmp_path / "log"
    recipe = mf.Recipe(data=mf.open(store), sequence=mf.Windows(8), batch=mf.Batch(sequences=2), epochs=1)
    with mf.Feed(recipe, metrics=RunLog(log)) as feed:
        for _ in feed:
            pass
    commands = [
        ["inspect", str(store), "--verify"],
        ["roles", "tp2-dp2"],
        ["plan", str(store), "--layout", "cp2-dp2", "--sequences", "8", "--capacity", "64"],
        ["report", str(log), "--out", str(tmp_path / "r.html")],
        ["--version"],
        ["prepare", "--help"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, json.dumps(commands)], capture_output=True, text=True
    )
    assert f"STATUSES {[0] * len(commands)}" in done.stdout, done.stdout + done.stderr


def test_the_version_is_told_without_torch() -> None:
    code = "import sys, meshfeed_command as c; sys.argv = ['meshfeed', '--version']; s = c.main()\n"
    code += "print(s, sorted({'torch', 'numpy', 'meshfeed'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, modules = done.stdout.splitlines()
    assert told.startswith("meshfeed ") and modules == "0 []"
