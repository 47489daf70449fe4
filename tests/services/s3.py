"""Ceph's object gateway: a real S3 server, in memory, of this test run alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Self

from services.needs import program_path
from services.processes import free_port, server

_ATTEMPTS, _UP_S = 4, 45
_STARTS = 20  # a store that speaks to its monitor before it knows the cluster's id ends: "wrong fsid"
KEY, SECRET = "meshfeedtests", "a-secret-of-the-tests"

_CONF = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon}]
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
mon warn on pool no redundancy = false
mon tick interval = 1
paxos propose interval = 0.1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 3221225472
ms bind msgr2 = false
public network = 127.0.0.1/32
cluster network = 127.0.0.1/32
run dir = {home}/run
admin socket = {home}/run/$name.$pid.asok
log file = {home}/log/$name.log
mon cluster log file = {home}/log/cluster.log
pid file = {home}/run/$name.pid
crash dir = {home}/crash
mon data = {home}/mon
osd data = {home}/osd
keyring = {home}/keyring
[client.rgw.a]
rgw data = {home}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw dns name = 127.0.0.1
rgw max listing results = 7
"""


class S3:
    """An S3 server while entered, with one user. options: for whoever reads it as that user."""

    def __enter__(self) -> Self:
        for attempt in range(_ATTEMPTS):
            try:
                return self._start()
            except (RuntimeError, subprocess.TimeoutExpired):
                if attempt + 1 == _ATTEMPTS:
                    raise
        return self

    def _start(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s3-")))
            for name in ("run", "log", "crash", "mon", "osd", "rgw"):
                (self._home / name).mkdir()
            self._port, mon, fsid = free_port(), free_port(), str(uuid.uuid4())
            self._conf = self._home / "ceph.conf"
            self._conf.write_text(_CONF.format(fsid=fsid, mon=mon, port=self._port, home=self._home))
            monmap = str(self._home / "monmap")
            self._do(
                "monmaptool",
                "--create",
                "--fsid",
                fsid,
                "--addv",
                "a",
                f"[v1:127.0.0.1:{mon}]",
                monmap,
                conf=False,
            )
            self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
            log = self._home / "output.log"
            stack.enter_context(server(self._command("ceph-mon", "-i", "a", "-f"), mon, log))
            osd = str(uuid.uuid4())
            self._do("ceph", "osd", "new", osd)
            self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
            self._start_store(stack, log)
            self._do(
                "radosgw-admin",
                "-n",
                "client.rgw.a",
                "user",
                "create",
                "--uid=tests",
                "--display-name=tests",
                f"--access-key={KEY}",
                f"--secret-key={SECRET}",
            )
            gateway = self._command("radosgw", "-n", "client.rgw.a", "-f")
            stack.enter_context(server(gateway, self._port, log))
            self._stack = stack.pop_all()
        return self

    def _start_store(self, stack: contextlib.ExitStack, log: Path) -> None:
        """Run a store until the stack closes; return once the monitor knows it."""
        command, events = self._command("ceph-osd", "-i", "0", "-f"), self._home / "log" / "cluster.log"
        for left in reversed(range(_STARTS)):
            try:
                stack.enter_context(server(command, lambda: " boot" in events.read_text(), log))
                return
            except RuntimeError:
                if not left:
                    raise

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._port}"

    def options(self, secret: str = SECRET) -> dict[str, str]:
        """What a client of this server has to be told."""
        return {
            "endpoint": self.url,
            "region": "us-east-1",
            "access_key_id": KEY,
            "secret_access_key": secret,
            "virtual_hosted_style_request": "false",
        }

    def make_bucket(self, name: str) -> None:
        """An empty bucket, by a signed request."""
        self._signed("PUT", f"/{name}")

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """An object."""
        from obstore import put
        from obstore.store import S3Store

        store = S3Store(bucket, config=self.options(), client_options={"allow_http": True})  # type: ignore[arg-type]
        put(store, key, data)

    def _signed(self, method: str, path: str) -> None:
        """AWS signature version 4 of a request without a body (obstore makes no buckets)."""
        import datetime
        import hashlib
        import hmac
        import http.client

        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        host, empty = f"127.0.0.1:{self._port}", hashlib.sha256(b"").hexdigest()
        headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": now}
        names = ";".join(headers)
        canonical = "\n".join([method, path, "", *(f"{k}:{v}" for k, v in headers.items()), "", names, empty])
        scope = f"{now[:8]}/us-east-1/s3/aws4_request"
        to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
        key = f"AWS4{SECRET}".encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {text!r}")

    def _command(self, program: str, *arguments: str, conf: bool = True) -> list[str]:
        options = ["-c", str(self._conf)] if conf else []
        return [program_path(program) or program, *options, *arguments]

    def _do(self, program: str, *arguments: str, conf: bool = True) -> None:
        done = subprocess.run(
            self._command(program, *arguments, conf=conf),
            capture_output=True,
            text=True,
            timeout=_UP_S,
            env={**os.environ, "CEPH_CONF": str(self._conf)},
        )
        if done.returncode:
            raise RuntimeError(f"{program} {arguments}: {done.stdout[-1000:]} {done.stderr[-2000:]}")
