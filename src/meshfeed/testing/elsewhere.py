"""Work done in another process, for laws about what a process must not decide."""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


def elsewhere(method: str, timeout_s: float, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` gives in a process that is started by "spawn" or "fork".

    Raises AssertionError where the process cannot be started, fails, dies, or takes longer.
    """
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, args))
    try:
        process.start()
    except Exception as bad:  # pickling fails with whatever an object raises
        raise AssertionError(
            f"the dataset does not go to another process: {bad}; let it open files when it is first asked"
        ) from bad
    theirs.close()
    failure, made = "it ended without an answer", None
    try:
        if not ours.poll(timeout_s):
            failure = f"no answer in {timeout_s:g} s"
        else:
            failure, made = torch.load(io.BytesIO(ours.recv_bytes()), weights_only=False)
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        ours.close()
    if failure:
        raise AssertionError(f"in another process it fails: {failure}")
    return made


def _answer(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = ("", work(*args))
    except Exception:
        answer = (traceback.format_exc(), None)
    file = io.BytesIO()
    torch.save(answer, file)  # by value: a pipe of torch's own would send tensors by file descriptor
    pipe.send_bytes(file.getvalue())
