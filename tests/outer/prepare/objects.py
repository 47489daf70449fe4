"""Two object stores to write to, what lies in them, and processes that `prepare` into them and may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfeed.prepare.job.writer import Writer
from services.azure import ACCOUNT, KEY, Azure
from services.faults import NOTHING, Faults
from services.needs import needs
from services.s3 import S3

WRITES = ("PUT", "POST", "DELETE")


@dataclass
class Bucket:
    """A bucket of a running server; faults: a proxy in front of it, which `environ` leads through."""

    root: str
    options: Mapping[str, str]
    environ: Mapping[str, str]
    faults: Faults

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Name below the prefix -> bytes."""
        client = Writer(self.root, self.options)
        found = [path for path, size in client.list(prefix)]
        stats = {path: client.stat(path) for path in found}
        read = {path: bytes(client.read(path, 0, each.size_bytes, each.tag)) for path, each in stats.items()}
        return {path.removeprefix(f"{prefix}/"): data for path, data in read.items()}


@contextmanager
def s3_bucket() -> Iterator[Bucket]:
    needs("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
    with S3() as server, Faults(server.url) as faults:
        server.make_bucket("made")
        given = server.options()
        environ = {
            "AWS_ACCESS_KEY_ID": given["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": given["secret_access_key"],
            "AWS_ENDPOINT_URL": faults.url,
            "AWS_REGION": "us-east-1",
        }
        yield Bucket("s3://made", given, environ, faults)


@contextmanager
def azure_container() -> Iterator[Bucket]:
    needs("azurite-blob")
    with Azure() as server, Faults(server.url.removesuffix(f"/{ACCOUNT}")) as faults:
        server.make_container("made")
        environ = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{faults.url}/{ACCOUNT}",
        }
        yield Bucket("az://made", server.options(), environ, faults)


def nothing_wrong(number: int, method: str, path: str) -> Any:
    return NOTHING


def killed(bucket: Bucket, after: int, *words: Any, **options: Any) -> bool:
    """Whether a run of `prepare` was killed: after so many writes, while one more is on its way, which arrives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshfeed.prepare"])
    process = context.Process(target=_prepare, args=(bucket.environ, words, options))
    writes = 0

    def plan(number: int, method: str, path: str) -> Any:
        nonlocal writes
        writes += method in WRITES
        if method in WRITES and writes == after + 1 and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        return NOTHING

    bucket.faults.plan = plan
    process.start()
    process.join()
    bucket.faults.plan = nothing_wrong
    if process.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the run ended with {process.exitcode}")
    return process.exitcode != 0


def _prepare(environ: Mapping[str, str], words: Any, options: Any) -> None:
    from texts import Here

    from meshfeed.prepare import prepare

    os.environ.update(environ)
    prepare(*words, engine=Here(), **options)


def leftovers(work: Path) -> list[str]:
    return sorted(each.name for each in work.iterdir()) if work.exists() else []
