"""nginx over a folder: range requests, ETags, and an access log that counts every byte."""

from __future__ import annotations

import contextlib
import http.client
import os
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.needs import program_path
from services.processes import free_port, server

_CONF = """
worker_processes 1;
daemon off;
error_log {home}/error.log warn;
pid {home}/nginx.pid;
{user}
events {{ worker_connections 512; }}
http {{
  log_format counted '$status $body_bytes_sent "$http_range" $request_method $request_uri';
  access_log {home}/access.log counted;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  default_type application/octet-stream;
  sendfile on;
  keepalive_requests 1000000;
  server {{
    listen 127.0.0.1:{port};
    root {folder};
    {further}
  }}
}}
"""


@dataclass(frozen=True)
class Request:
    """A line of the log. num_bytes: of the answer's body."""

    status: int
    num_bytes: int
    range: str
    method: str
    uri: str


class Nginx:
    """Serves a folder while entered. further: lines for its server block."""

    def __init__(self, folder: Path, further: str = "") -> None:
        self._folder, self._further = folder.resolve(), further

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
            for attempt in range(5):
                self._port = free_port()
                conf = self._home / "nginx.conf"
                text = _CONF.format(
                    home=self._home,
                    port=self._port,
                    folder=self._folder,
                    further=self._further,
                    user="user root;" if os.geteuid() == 0 else "",
                )
                conf.write_text(text)
                command = [program_path("nginx") or "nginx", "-p", str(self._home), "-c", str(conf)]
                try:
                    stack.enter_context(server(command, self._port, self._home / "output.log"))
                    break
                except RuntimeError:
                    if attempt == 4:
                        raise
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """Where the folder is served."""
        return f"http://127.0.0.1:{self._port}"

    def requests(self) -> list[Request]:
        """All that was asked and answered so far.

        nginx logs a request after its last byte is sent, and its one process does so before it takes up another.
        """
        mark = uuid.uuid4().hex
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("HEAD", f"/{mark}")
        connection.getresponse().close()
        connection.close()
        while mark not in (told := (self._home / "access.log").read_text()):
            time.sleep(0.01)
        found: list[Request] = []
        for line in told.splitlines():
            if line.endswith(f"/{mark}"):
                break
            front, asked, back = line.split('"')
            status, num_bytes = front.split()
            method, uri = back.split(maxsplit=1)
            found.append(Request(int(status), int(num_bytes), asked, method, uri))
        return found

    def fetched_bytes(self) -> int:
        """Bytes of all bodies."""
        return sum(request.num_bytes for request in self.requests())
