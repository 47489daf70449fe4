"""Started by path, as a process of its own: `python work.py FOLDER` encodes the parts that it is told.

It reads numbers of parts, a line each, and answers each with a line of JSON. When its input ends it ends at
once, wherever it is, so that nothing outlives a run that is killed. The package's own `__init__` would bring
torch, which encoding has no use for; empty ones stand in for it.
"""

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

_STAND_INS = ("meshfeed", "meshfeed.store", "meshfeed.prepare")


def main(folder: Path) -> None:
    """Encode what standard input says, until it ends."""
    from meshfeed.errors import MeshfeedError
    from meshfeed.files.message import told
    from meshfeed.prepare.encode import encode_part

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that gets it ends us
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what a tokenizer prints is no answer
        asked: queue.Queue[int] = queue.Queue()
        threading.Thread(target=_listen, args=(asked,), daemon=True).start()
        while True:
            answer: dict[str, object] = {"part": asked.get()}
            try:
                encode_part(folder, int(str(answer["part"])))
            except MeshfeedError as error:
                answer["error"] = told(error)
            answers.write(json.dumps(answer) + "\n")


def _listen(asked: "queue.Queue[int]") -> None:
    for line in sys.stdin:
        asked.put(int(line))
    os._exit(0)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    for name in _STAND_INS:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    main(Path(sys.argv[1]))
