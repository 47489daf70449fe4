"""Descriptors that children must not keep, and connections that say who is gone. Real forks and sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshfeed.deliver.links import Links
from meshfeed.forks import Private
from services.needs import missing_thing


def in_a_fork(function: Callable[[], Any]) -> Any:
    """What a forked child makes of it."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.write(theirs, json.dumps(function()).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as told:
        result = json.loads(told.read())
    os.waitpid(child, 0)
    return result


def names(*descriptors: int) -> list[str]:
    return [os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).partition(":")[0] for fd in descriptors]


def test_a_fork_lets_go_of_what_is_private_and_keeps_its_numbers() -> None:
    private = Private()
    ours, theirs = socket.socketpair()
    other, another = socket.socketpair()
    private.add(theirs.fileno())
    seen = in_a_fork(lambda: names(ours.fileno(), theirs.fileno(), other.fileno()))
    assert seen == ["socket", "null", "socket"]
    assert names(theirs.fileno()) == ["socket"]
    for each in (ours, theirs, other, another):
        each.close()


def test_a_number_that_is_another_file_by_now_is_left_alone() -> None:
    private = Private()
    first, second = socket.socketpair()
    number = first.fileno()
    private.add(number)
    first.close()
    os.dup2(second.fileno(), number)
    assert in_a_fork(lambda: names(number)) == ["socket"]
    os.close(number)
    second.close()


def test_what_nobody_holds_private_any_more_is_inherited_again() -> None:
    first, second = socket.socketpair()
    private = Private()
    private.add(first.fileno())
    del private
    assert in_a_fork(lambda: names(first.fileno())) == ["socket"]
    first.close()
    second.close()


def test_programs_do_not_get_what_is_private() -> None:
    first, second = socket.socketpair()
    private = Private()
    for each in (first, second):
        each.set_inheritable(True)
    private.add(first.fileno())
    look = f"import os; print([os.path.exists(f'/proc/self/fd/{{n}}') for n in {[first.fileno(), second.fileno()]}])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", look], close_fds=False, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[False, True]"
    first.close()
    second.close()


def connected(family: int, address: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server((address, 0), family=family)
    ours = socket.create_connection(listener.getsockname()[:2])
    theirs, _ = listener.accept()
    for each in (listener, ours, theirs):
        each.set_inheritable(True)  # as gloo leaves them
    return listener, ours, theirs


@pytest.mark.parametrize("family, address", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_closed_connection_names_the_member_at_its_other_end(family: int, address: str) -> None:
    """Three members in one process; each finds the ends that lie here, as three processes would find theirs."""
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError as without:
        missing_thing(f"no {address} here: {without} (enable IPv6 on the loopback)")
    kept = socket.create_server(("127.0.0.1", 0))
    kept.set_inheritable(True)  # there before: nobody's business
    links = Links()
    listener, ours, theirs = connected(family, address)
    python_s = socket.create_connection(kept.getsockname())  # not inheritable: none of the library's
    elsewhere = socket.socketpair()
    for each in elsewhere:
        each.set_inheritable(True)  # no TCP
    row = links.found(3)
    assert row.shape == (3,) and row.dtype == np.int64
    here = set(row.tolist()) - {0}
    assert len(here) == 2
    table = np.zeros((3, 3), np.int64)
    table[1, 0], table[2, 2] = here  # each as another member's own end of a connection to this one
    links.identify(table)
    assert links.lost() == []
    theirs.send(b"unread")
    assert links.lost() == []
    theirs.close()
    assert links.lost() in ([1], [2]), (
        "the end that was closed here; bytes that are unread come first at the other"
    )
    assert ours.recv(6) and not ours.recv(1)  # waits until the other end's goodbye is here
    assert links.lost() == [1, 2]
    os.dup2(elsewhere[0].fileno(), ours.detach())  # gloo closed it, and the number is another file's
    assert links.lost() == [1, 2]
    assert in_a_fork(lambda: names(listener.fileno(), kept.fileno(), python_s.fileno())) == [
        "null",
        "socket",
        "socket",
    ]
    for each in (listener, kept, python_s, *elsewhere):
        each.close()


WITHOUT_DESCRIPTORS = """
import os, resource, socket
from meshfeed.forks import Private, at_fork
class Other:
    told = False
    def forget_parent(self): self.told = True
others = [Other() for _ in range(8)]
private, (ours, theirs) = Private(), socket.socketpair()
private.add(ours.fileno())
for other in others: at_fork(other)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    while True: os.dup(0)
except OSError:
    pass
if (child := os.fork()) == 0:
    hidden = os.path.samestat(os.fstat(ours.fileno()), os.stat("/dev/null"))
    os._exit(0 if hidden and all(other.told for other in others) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_without_a_free_descriptor_forgets_all() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
