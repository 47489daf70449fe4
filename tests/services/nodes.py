"""Several nodes on this machine: network namespaces joined by a bridge, each with its own address and host name.

The bridge too has a namespace of its own, so nothing is visible outside, addresses clash with nobody's, and
any number of test runs may have theirs at once. Abstract unix sockets end at a namespace as at a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.needs import missing_thing

DEVICE = "eth0"


@dataclass
class Node:
    """A machine, as far as its processes can tell.

    Attributes:
        name: its host name.
        address: on the network of the nodes, at `DEVICE`.
    """

    name: str
    address: str
    namespace: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Run a command here; its output is piped."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        process = subprocess.Popen(
            [*inside, 'hostname "$0" && exec "$@"', self.name, *command],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def received_bytes(self) -> int:
        """Bytes that have come in from other nodes."""
        told = _ip("-n", self.namespace, "-s", "-j", "link", "show", DEVICE)
        return int(json.loads(told)[0]["stats64"]["rx"]["bytes"])


@contextlib.contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    """So many nodes, which are gone afterwards with all that runs in them.

    Skips the test where this machine does not let us make them; fails it under MESHFEED_SERVICES=required.
    """
    token = uuid.uuid4().hex[:8]
    bridge = f"mf{token}-net"
    made = [Node(f"node{n}", f"10.0.0.{n + 1}", f"mf{token}-{n}") for n in range(count)]
    try:
        _make(bridge, made)
        yield made
    finally:
        for process in (process for node in made for process in node.processes):
            process.kill()
            process.communicate()
        for namespace in (bridge, *(node.namespace for node in made)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", namespace)


def _make(bridge: str, made: Sequence[Node]) -> None:
    try:
        if missing := [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]:
            raise OSError(f"no {', '.join(missing)} on this machine")
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for at, node in enumerate(made):
            port = f"port{at}"
            _ip("netns", "add", node.namespace)
            _ip("-n", bridge, "link", "add", port, "type", "veth", "peer", DEVICE, "netns", node.namespace)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", node.namespace, "link", "set", "lo", "up")
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", DEVICE)
            _ip("-n", node.namespace, "link", "set", DEVICE, "up")
    except (OSError, subprocess.CalledProcessError) as refused:
        missing_thing(
            f"no network namespaces here: {getattr(refused, 'stderr', None) or refused}"
            " (they need root, and the programs that sudo .ci/services installs)"
        )


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=600).stdout
