"""A Python that starts at once: each start is a fork of one process that has imported torch and meshfeed.

    subprocess.run([quick.python(), "-m", "meshfeed", "roles", "tp2"])

For tests of what a command does, not of how it starts. It takes `-m MODULE`, `-c CODE` or a script, inherits every
descriptor that it is given, and is in the network of whoever asks. Who asks for what a fork cannot have, another option
of Python or another hash seed, gets a Python that starts anew. Where several processes run the tests, all share one
server (see conftest.py), and so do the processes that tests spawn.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import forks

_IMPORTED = (
    "numpy.ma",  # by np.unique
    "torch._dynamo",  # by optimizers
    "torch.distributed.launcher.api",  # by torchrun
    "meshfeed.exchange",
    "meshfeed.simulation",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
    "meshfeed.integrations.transformers",
    "torchtitan.components.dataloader",
    "hypothesis",
    "litdata",
    "playwright.sync_api",
    "pyarrow.parquet",
    "torchmetrics.functional",
)
"""By commands, by ranks, or by files of tests: in a new environment they need not compile it again."""
_ASK = Path(__file__).with_name("quick_ask.py")
_SPACES = ("mnt", "net", "uts")
_PR_SET_PDEATHSIG = 1
SHARED = "MESHFEED_TESTS_PYTHON"
_kept: list[Any] = []
"""What a script leaves behind. It is never freed: torch's gloo, freed at once, at times waits for itself for ever."""
HASH_SEED = str((2 * int(os.environ.get("MESHFEED_SEED", "0")) + 1) % 2**32)
"""PYTHONHASHSEED of the server."""


def share() -> None:
    """Have all that this process starts share one server, from when it is ready."""
    os.environ.setdefault(SHARED, python())
    subprocess.run([python(), "-c", ""], check=True)


def at_hand() -> str:
    """The shared one; an ordinary Python where one process runs the tests, for which a server would take longer to start."""
    return os.environ.get(SHARED, sys.executable)


def workers(patch: Any) -> None:
    """Have workers of `prepare` be such Pythons, until a MonkeyPatch ends: of their own, they take a second of a core to start."""
    local = importlib.import_module("meshfeed.prepare.engines.local")
    command = local.command
    patch.setattr(local, "command", lambda *words: [at_hand(), *command(*words)[1:]])


@functools.cache
def python() -> str:
    """The path of an executable; the server behind it ends with this process. Who asks at once waits for it."""
    if shared := os.environ.get(SHARED):
        return shared
    folder = Path(tempfile.mkdtemp(prefix="quick"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / HASH_SEED))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": HASH_SEED},
        )
    atexit.register(server.kill)
    executable = folder / "python"
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -ISs "{_ASK}" "{folder}" {HASH_SEED} "$@"\n')
    executable.chmod(0o755)
    return str(executable)


def _serve(descriptor: int) -> None:
    import torch

    gc.disable()  # what is imported stays
    with warnings.catch_warnings(action="ignore"):
        for name in _IMPORTED:
            with contextlib.suppress(ImportError):  # a framework may be missing
                importlib.import_module(name)
        with contextlib.suppress(ImportError):  # as are the commands, beside the core alone
            commands = importlib.import_module("meshfeed.cli.main")
            commands.parser_of(commands.COMMANDS)  # which imports them
    inspect.stack()  # looks up the file of each module, which torchrun would do again and again
    gc.enable()
    forks.settle()
    client = _forked_for_a_client(descriptor)
    if client is None:
        return
    message, files, *_ = socket.recv_fds(client, 1 << 20, 253)
    client.close()
    words, environment, folder, numbers = marshal.loads(message)
    for name in _SPACES:
        _enter(name, files.pop(0))
    away = max(numbers) + 1  # each file gets the number that it has there
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, away) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    try:
        _run(words)
        status = 0
    except SystemExit as end:
        _kept.append(end)
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        status = 1
        traceback.print_exc()
    # The rest of an exit, without the seconds that it takes to free what torch has imported.
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(ValueError):  # it is closed already
        sys.stdout.flush()
    os._exit(status)


def _enter(name: str, space: int) -> None:
    """Go into a namespace, given as a file, from a process of one thread."""
    if not os.path.samestat(os.fstat(space), os.stat(f"/proc/self/ns/{name}")):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(space)


def _forked_for_a_client(descriptor: int) -> socket.socket | None:
    """In a new process for each client: that client. None in the server, once whoever started it has ended.

    The server tells a client how its process ends, and kills the process where the client dies.
    """
    running: dict[int, tuple[int, socket.socket]] = {}  # by its pidfd: a process, and who asked for it
    events = select.poll()
    with socket.socket(fileno=descriptor) as listener:
        events.register(listener, select.POLLIN)
        events.register(sys.stdin, select.POLLIN)
        while True:
            ready = {number for number, _ in events.poll()}
            if sys.stdin.fileno() in ready:
                return None
            for end, (process, client) in [*running.items()]:
                if end in ready:
                    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                    events.unregister(client)
                    events.unregister(end)
                    with contextlib.suppress(OSError), client:
                        client.send(str(status).encode())
                    del running[end]
                    os.close(end)
                elif client.fileno() in ready:
                    os.kill(process, signal.SIGKILL)
            if listener.fileno() in ready:
                client, _ = listener.accept()
                process = os.fork()
                if process == 0:
                    break
                running[end := os.pidfd_open(process)] = process, client
                events.register(end, select.POLLIN)
                events.register(client, 0)  # which tells when it has ended
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for end, (_, other) in running.items():
            os.close(end)
            other.close()
        return client


def _run(words: list[str]) -> None:
    import runpy

    while words[0].startswith("-") and words[0] not in ("-m", "-c"):
        if words[0] == "-u":
            sys.stdout.reconfigure(line_buffering=True)
        sys.dont_write_bytecode |= words[0] == "-B"
        words = words[1:]
    known: Any = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in known if path and path not in sys.path]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        _kept.append(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        sys.argv = words
        _kept.append(runpy.run_path(words[0], run_name="__main__"))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
