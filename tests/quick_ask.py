"""What runs behind quick.python(): has the server run a program, and ends as that ends.

It starts for every command and rank of a test run, so it imports only what the interpreter holds already.
"""

import _signal
import _socket
import array
import marshal
import os
import sys

_SPACES = ("mnt", "net", "uts")
_OPTIONS = {"-u", "-B"}
"""Those that a fork can still obey."""
_ENVIRONMENT = {"PYTHONOPTIMIZE", "PYTHONUTF8", "PYTHONDEVMODE", "PYTHONNOUSERSITE"}
"""What only a Python that starts anew obeys."""


def _obeys(words: list[str]) -> bool:
    """Whether a fork does what these words ask of Python itself."""
    for word in words:
        if word[:1] != "-" or word in ("-m", "-c"):
            break
        if word not in _OPTIONS:
            return False
    return _ENVIRONMENT.isdisjoint(os.environ)


def _ask(folder: str, usual: str, words: list[str]) -> None:
    """Have a server run `words` with this process's files, folder and environment; end as that ended."""
    address = f"{folder}/{os.environ.get('PYTHONHASHSEED') or usual}"
    if not (_obeys(words) and os.path.exists(address)):
        os.execv(sys.executable, [sys.executable, *words])
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    given = [fd for fd in listed if os.path.exists(f"/proc/self/fd/{fd}")]  # not the one that listed them
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    server.connect(address)
    asked = marshal.dumps([words, dict(os.environ), os.getcwd(), given])
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _SPACES]
    files = array.array("i", spaces + given)
    server.sendmsg([asked], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    status = int(server.recv(64))
    if status < 0:
        if -status not in (_signal.SIGKILL, _signal.SIGSTOP):  # whose default nobody can change
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


_ask(sys.argv[1], sys.argv[2], sys.argv[3:])
