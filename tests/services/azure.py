"""Azurite, Microsoft's own emulator of Azure's blob storage, in memory, of this test run alone."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import tempfile
from pathlib import Path
from typing import Any, Self

from services.needs import program_path
from services.processes import free_port, server

_ATTEMPTS = 4
ACCOUNT = "devstoreaccount1"
KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to all
)
_VERSION = "2021-08-06"


class Azure:
    """Blob storage while entered, with the one account that every such emulator has."""

    def __enter__(self) -> Self:
        program = program_path("azurite-blob") or "azurite-blob"
        for attempt in range(_ATTEMPTS):
            with contextlib.ExitStack() as stack:
                home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="azure-")))
                self._port = free_port()
                options = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--skipApiVersionCheck"]
                options += ["--inMemoryPersistence", "--disableTelemetry", "--silent"]
                try:
                    stack.enter_context(server([program, *options], self._port, home / "log", cwd=home))
                except RuntimeError:
                    if attempt + 1 == _ATTEMPTS:
                        raise
                    continue
                self._stack = stack.pop_all()
                break
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._port}/{ACCOUNT}"

    def options(self, key: str = KEY) -> dict[str, str]:
        """What a client of this server has to be told."""
        return {"account_name": ACCOUNT, "account_key": key, "endpoint": self.url}

    def make_container(self, name: str) -> None:
        """An empty container, by a request signed with the shared key."""
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": _VERSION}
        lines = ["PUT", *[""] * 11, *(f"{header}:{value}" for header, value in headers.items())]
        to_sign = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
        digest = hmac.new(base64.b64decode(KEY), to_sign.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 201:
            raise RuntimeError(f"PUT {name}: {answer.status} {text!r}")

    def put(self, container: str, path: str, data: bytes) -> None:
        """A blob."""
        from obstore import put
        from obstore.store import AzureStore

        config: Any = self.options()
        put(AzureStore(container, config=config, client_options={"allow_http": True}), path, data)
