"""The storage client against real servers, and against everything that goes wrong between."""

from __future__ import annotations

import http.server
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfeed.errors import AccessError, ChangedError, MissingError, StoreError, UnavailableError
from meshfeed.files import Cache, url
from meshfeed.remote import retries
from meshfeed.remote.cached import CachedFile
from meshfeed.remote.client import Client
from meshfeed.remote.retries import Patience
from services.faults import EXPIRED, FORBIDDEN, NOTHING, OTHER_REGION, SKEWED, Fault, Faults
from services.needs import needs
from services.nginx import Nginx

SIZE = 300_000
DATA = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8).tobytes()
SHORT = Patience(attempts=3, give_up_s=60, timeout_s=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    needs("nginx")
    folder = tmp_path_factory.mktemp("served")
    (folder / "data.bin").write_bytes(DATA)
    (folder / "other.bin").write_bytes(DATA)
    with Nginx(folder) as nginx:
        yield nginx


@pytest.fixture
def faults(server: Nginx) -> Iterator[Faults]:
    with Faults(server.url) as proxy:
        yield proxy


def read_all(client: Client, step: int = 10_000) -> bytes:
    tag = client.stat("data.bin").tag
    with ThreadPoolExecutor(8) as pool:
        ranges = [(begin, min(begin + step, SIZE)) for begin in range(0, SIZE, step)]
        return b"".join(pool.map(lambda span: bytes(client.read("data.bin", *span, tag)), ranges))


def seeded(share: float, fault: Fault, seed: int = 1) -> Callable[[int, str, str], Fault]:
    rng = random.Random(seed)
    return lambda number, method, path: fault if method == "GET" and rng.random() < share else NOTHING


def test_ranges_come_exactly(server: Nginx) -> None:
    client = Client(server.url, {}, Patience(hedge=False))
    stat = client.stat("data.bin")
    assert stat.size_bytes == SIZE
    for begin, end in [(0, 1), (5, 5), (0, SIZE), (SIZE - 1, SIZE), (17, 70_001)]:
        assert bytes(client.read("data.bin", begin, end, stat.tag)) == DATA[begin:end]
    before = server.fetched_bytes()
    assert read_all(client) == DATA
    assert server.fetched_bytes() - before == SIZE, "not a byte more than was asked for"


@pytest.mark.parametrize("num_bytes", [1, 100, SIZE, SIZE + 5])
def test_a_glance_tells_size_version_and_first_bytes_in_one_request(server: Nginx, num_bytes: int) -> None:
    client = Client(server.url, {}, SHORT)

    def asked() -> int:
        return sum(each.uri == "/data.bin" for each in server.requests())

    before = asked()
    stat, first = client.glance("data.bin", num_bytes)
    assert asked() == before + 1
    assert (stat, bytes(first)) == (client.stat("data.bin"), DATA[:num_bytes])


def test_a_glance_at_nothing(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "empty.bin").touch()
    with Nginx(tmp_path) as own:
        client = Client(own.url, {}, SHORT)
        stat, first = client.glance("empty.bin", 10)
        assert (stat, stat.size_bytes, bytes(first)) == (client.stat("empty.bin"), 0, b"")
        with pytest.raises(MissingError, match=r"nothing\.bin: no such object"):
            client.glance("nothing.bin", 10)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(answer=(503, b"slow down")),
        Fault(answer=(500, b"oops")),
        Fault(answer=(429, b"too many")),
        Fault(reset=1000),
        Fault(cut=1000),
        Fault(cut=0),
    ],
    ids=["503", "500", "429", "reset", "cut", "nothing at all"],
)
def test_what_fails_in_passing_is_tried_again(faults: Faults, fault: Fault) -> None:
    client = Client(faults.url, {}, Patience(attempts=20))
    faults.plan = seeded(0.3, fault)
    assert read_all(client) == DATA
    assert all(bytes(client.glance("data.bin", 2_000)[1]) == DATA[:2_000] for _ in range(10))
    assert sum(faults.done.values()) >= 3
    assert client.counts.retries >= sum(faults.done.values()) - client.counts.hedges


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault(answer=(404, b"")), MissingError, "no such object"),
        (Fault(answer=FORBIDDEN), AccessError, "no permission"),
        (Fault(answer=EXPIRED), AccessError, "credentials have expired"),
        (Fault(answer=SKEWED), AccessError, "clock of this machine is wrong"),
        (Fault(answer=OTHER_REGION), AccessError, "another region; give its region, which is eu-central-1"),
        (Fault(answer=(412, b"")), ChangedError, "replaced"),
        (Fault(answer=(503, b"")), UnavailableError, "failed 3 times.*503"),
        (Fault(reset=10), UnavailableError, "failed 3 times"),
        (Fault(cut=10), UnavailableError, "failed 3 times"),
    ],
    ids=["missing", "forbidden", "expired", "skewed", "region", "changed", "503", "reset", "cut"],
)
def test_what_fails_for_good_is_an_error_of_its_own(
    faults: Faults, fault: Fault, kind: type[StoreError], says: str
) -> None:
    client = Client(faults.url, {}, SHORT)
    tag = client.stat("data.bin").tag
    faults.plan = lambda *_: fault
    with pytest.raises(kind, match=rf"(?s){faults.url}/data.bin: bytes 100..5000: .*{says}") as caught:
        client.read("data.bin", 100, 5000, tag)
    assert type(caught.value) is kind


def test_an_object_that_is_replaced(server: Nginx, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(DATA)
    with Nginx(tmp_path) as own:
        client = Client(own.url, {}, SHORT)
        tag = client.stat("data.bin").tag
        (tmp_path / "data.bin").write_bytes(DATA[::-1][:-1])
        with pytest.raises(ChangedError, match="replaced"):
            client.read("data.bin", 0, 100, tag)
        (tmp_path / "data.bin").unlink()
        with pytest.raises(MissingError):
            client.stat("data.bin")


NAMES = [(method, name) for method in ("HEAD", "GET") for name in ("ETag", "Last-Modified")]


@pytest.mark.parametrize("hidden", [NAMES, NAMES[:2], NAMES[2:], NAMES[1:], NAMES[::2]], ids=str)
def test_what_a_server_does_not_name_is_not_taken_for_replaced(
    faults: Faults, caplog: pytest.LogCaptureFixture, hidden: list[tuple[str, str]]
) -> None:
    faults.hidden = frozenset(hidden)
    client = Client(faults.url, {}, SHORT)
    assert read_all(client) == DATA and client.stat("data.bin").size_bytes == len(DATA)
    assert client.glance("data.bin", 9)[0] == client.stat("data.bin")
    told = [record.getMessage() for record in caplog.records]
    if hidden == NAMES:
        (line,) = told
        assert "/data.bin: the server sends neither ETag nor Last-Modified" in line
        with pytest.raises(ChangedError, match="was replaced"):
            client.read("data.bin", 0, 10, "size 5")
    else:
        assert not told


def test_nobody_there() -> None:
    with pytest.raises(UnavailableError, match=r"http://127.0.0.1:1/data.bin: failed 2 times"):
        Client("http://127.0.0.1:1", {}, Patience(attempts=2)).stat("data.bin")


def test_a_server_that_stalls_is_given_up(faults: Faults) -> None:
    client = Client(faults.url, {}, Patience(attempts=2, timeout_s=0.5))
    tag = Client(faults.url, {}, SHORT).stat("data.bin").tag
    faults.plan = lambda *_: Fault(stall=True)
    with pytest.raises(UnavailableError, match="failed 2 times"):
        client.read("data.bin", 0, 100, tag)


def test_an_option_says_how_long_to_try() -> None:
    with pytest.raises(UnavailableError, match=r"http://127.0.0.1:1/data.bin: failed"):
        Client("http://127.0.0.1:1", {"give_up_s": "0.1"}).stat("data.bin")
    for wrong in ("0", "nan", "soon"):
        with pytest.raises(StoreError, match=f"option give_up_s='{wrong}': give seconds above 0"):
            Client("http://127.0.0.1:1", {"give_up_s": wrong})


def test_a_slow_request_is_asked_again_and_not_waited_for(faults: Faults) -> None:
    client = Client(faults.url, {}, Patience(timeout_s=100))
    assert read_all(client) == DATA  # so that it knows what is usual
    tag = client.stat("data.bin").tag
    hit = iter([True])
    faults.plan = lambda *_: Fault(stall=True) if next(hit, False) else NOTHING
    assert bytes(client.read("data.bin", 0, 10_000, tag)) == DATA[:10_000]
    assert faults.done["stall"] == 1
    assert client.counts.hedges_won >= 1


def test_hedges_are_few(faults: Faults) -> None:
    client = Client(faults.url, {})
    read_all(client)
    faults.plan = seeded(0.5, Fault(delay_s=0.4))
    read_all(client, 5_000)
    assert client.counts.hedges <= 2 + 0.06 * client.counts.requests


def test_http_cannot_be_listed(server: Nginx) -> None:
    with pytest.raises(StoreError, match="HTTP has no listing"):
        Client(server.url, {}).list("")


@pytest.mark.parametrize("status", [404, 500, 403])
def test_secrets_are_not_told(faults: Faults, status: int) -> None:
    faults.plan = lambda number, method, path: Fault(answer=(status, b"no"))
    client = Client(faults.url.replace("//", "//me:hush@"), {}, Patience(attempts=2))
    with pytest.raises(StoreError) as caught:
        client.read("nothing.bin", 0, 10, "x")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["expired-domains/x.bin", "NoSuchKeys/Region.bin", "a b/ü.bin", "c#/C#.bin"])
def test_names_are_not_taken_for_the_services_words(server: Nginx, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(DATA)
    with Nginx(tmp_path) as nginx, Faults(nginx.url) as faults:
        faults.plan = lambda number, method, path: Fault(answer=(503, b"")) if number % 2 == 0 else NOTHING
        client = Client(faults.url, {}, SHORT)
        stat = client.stat(name)
        assert bytes(client.read(name, 5, 90, stat.tag)) == DATA[5:90]


def test_servers_that_take_no_head(faults: Faults) -> None:
    faults.plan = lambda number, method, path: Fault(answer=(405, b"")) if method == "HEAD" else NOTHING
    client = Client(faults.url, {}, SHORT)
    stat = client.stat("data.bin")
    assert stat.size_bytes == SIZE and stat.tag == Client(faults.upstream, {}).stat("data.bin").tag


def test_weak_tags_are_compared_by_us(faults: Faults) -> None:
    """If-Match never holds of them; the answer tells the version."""
    faults.weak_tags = True
    client = Client(faults.url, {}, SHORT)
    stat = client.stat("data.bin")
    assert stat.tag.startswith("W/")
    assert bytes(client.read("data.bin", 5, 90, stat.tag)) == DATA[5:90]
    with pytest.raises(ChangedError):
        client.read("data.bin", 5, 90, 'W/"other"')


def test_web_addresses_are_unescaped_and_queries_refused() -> None:
    assert url.split("http://h/a%20b/%C3%BC") == ("http://h", "a b/ü")
    assert url.split("s3://bucket/a%20b") == ("s3://bucket", "a%20b")
    assert url.split("s3://bucket/corpus#2") == ("s3://bucket", "corpus#2")  # another one than corpus
    for root in ("s3://bucket/c#", "hf://datasets/o/n@main"):
        assert url.parent(url.join(root, "C#.parquet")) == (root, "C#.parquet")
    assert (
        url.split(url.join("http://h", "C#.png"))
        == url.split("http://h/C%23.png#top")
        == ("http://h", "C#.png")
    )
    with pytest.raises(StoreError, match="with a query") as caught:
        url.split("https://h/a?X-Amz-Signature=hush")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://no-such-host.invalid", "lookup address"),
    ],
)
def test_what_the_network_says_is_told(where: str, says: str) -> None:
    with pytest.raises(UnavailableError, match=says):
        Client(where, {}, Patience(attempts=1)).stat("x")


def test_a_host_that_nobody_knows_is_given_up_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(
        UnavailableError, match=r"no-such-host\.invalid/x: failed 3 times .*check the URL, the network"
    ):
        Client("http://no-such-host.invalid", {}).stat("x")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("options", [{"allow_http": "true"}, {"aws_allow_http": "true"}, {"timeout": "30s"}])
def test_options_of_the_connection(options: dict[str, Any]) -> None:
    """Given among the others they make the client library panic."""
    given = {"endpoint": "http://127.0.0.1:1", "region": "x", "skip_signature": "true"} | options
    with pytest.raises(UnavailableError):
        Client("s3://bucket", given, Patience(attempts=1)).stat("x")


@pytest.mark.parametrize("options", [{"nonsense": "1"}, {"skip_signature": "perhaps"}])
def test_options_that_storage_does_not_know(options: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="s3://bucket"):
        Client("s3://bucket", options, SHORT).stat("x")


class Short(http.server.BaseHTTPRequestHandler):
    """Some answers have fewer bytes than were asked for, and a Content-Length that agrees with the body."""

    protocol_version = "HTTP/1.1"
    num_short = 0
    head_bytes = len(DATA)

    def do_HEAD(self) -> None:
        self.answer(200, b"", self.head_bytes)

    def do_GET(self) -> None:
        begin, end = (int(each) for each in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[begin : end + 1]
        if type(self).num_short:
            type(self).num_short -= 1
            body = body[: len(body) // 2]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end}/{len(DATA)}")
        self.finish_headers(len(body))
        self.wfile.write(body)

    def answer(self, status: int, body: bytes, size: int) -> None:
        self.send_response(status)
        self.finish_headers(size)
        self.wfile.write(body)

    def finish_headers(self, size: int) -> None:
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Sun, 01 Nov 2026 10:00:00 GMT")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_body_shorter_than_what_was_asked_for_is_asked_again() -> None:
    """To the HTTP client such an answer is whole."""
    Short.num_short = 2
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Short) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}", {}, SHORT)
        tag = client.stat("x").tag
        assert bytes(client.read("x", 100, 5_000, tag)) == DATA[100:5_000]
        assert Short.num_short == 0 and client.counts.retries == 2
        Short.num_short = 1_000
        once = Client(f"http://127.0.0.1:{server.server_port}", {}, Patience(attempts=2, hedge=False))
        with pytest.raises(UnavailableError, match="received 2450 of 4900 bytes"):
            once.read("x", 100, 5_000, tag)
        server.shutdown()


@pytest.mark.parametrize("told", [SIZE // 2, SIZE - 1])
def test_a_size_that_the_bytes_contradict_is_not_believed(tmp_path: Path, told: int) -> None:
    """Such as that of the compressed body, which some servers tell where no bytes are asked for."""

    class Other(Short):
        head_bytes = told

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        file = CachedFile(f"http://127.0.0.1:{server.server_port}/x", Cache(tmp_path))
        out = np.empty(100, np.uint8)
        with file, pytest.raises(ChangedError, match=f"of an object of {SIZE} bytes, which had {told} when"):
            file.read_into(out, np.array([50]), np.array([100]))
        server.shutdown()


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("answered", "down_s", "ends_s"),
    [
        (False, 600, (15, 26)),  # no network
        (False, 10, None),  # a name service that starts late
        (True, 600, (160, 180)),  # storage that was there: it may come back
    ],
)
def test_a_name_service_that_does_not_answer(
    answered: bool, down_s: float, ends_s: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, storage = Clock(), retries.Retries("s3://bucket", retries.Patience())
    monkeypatch.setattr(retries, "time", clock)
    if answered:
        assert storage._retry(lambda: "here", "x", "x") == "here"

    def ask() -> str:
        if clock.now_s >= down_s:
            return "here"
        raise OSError("dns error: failed to lookup address information: Temporary failure in name resolution")

    if ends_s is None:
        assert storage._retry(ask, "x", "x") == "here"
    else:
        with pytest.raises(UnavailableError, match=r"Temporary failure .*; check the URL, the network"):
            storage._retry(ask, "x", "x")
        assert ends_s[0] <= clock.now_s <= ends_s[1]
    storage.close()
