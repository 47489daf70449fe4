"""What records may name: no host of this machine or its networks, no credentials, nothing outside a folder."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from media import picture
from texts import Here

import quick
from meshfeed.cli.main import main
from meshfeed.errors import StoreError
from meshfeed.prepare import Multimodal, Text, prepare
from meshfeed.prepare.inputs.samples import fetch_from
from meshfeed.prepare.inputs.web import Web, is_public
from services.needs import needs, needs_root
from services.nodes import nodes

pytestmark = pytest.mark.usefixtures("quick_workers")

PNG = picture(5, 9)
SECRET = b"AKIA-SECRET"
MOST = 1 << 20


class Server(ThreadingHTTPServer):
    """Answers by path, and remembers what it was asked: (method, path, headers)."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, dict(self.headers)))
        path = self.path.partition("?")[0]
        if path.startswith("http://"):  # it is a proxy
            self._answer(PNG)
        elif path.startswith("/to/"):
            self._answer(SECRET, 302, Location=self.path.removeprefix("/to/"))
        elif path.startswith("/status/"):
            self._answer(SECRET, int(path.rpartition("/")[2]))
        elif path == "/broken-status":
            self.wfile.write(SECRET + b"\r\n\r\n")
            self.close_connection = True
        elif path == "/drips":
            for _ in range(10_000):
                if self.server.ends.wait(0.02):
                    break
                self.wfile.write(b"x")
                self.wfile.flush()
        elif path == "/endless":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not self.server.ends.is_set():
                self.wfile.write(b"1000\r\n" + bytes(4096) + b"\r\n")
        elif path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(PNG)))
            self.end_headers()
            self.wfile.write(PNG[:-1])
            self.close_connection = True
        else:
            self._answer(SECRET if path == "/secret" else PNG)

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_CONNECT(self) -> None:
        self.server.asked.append((self.command, self.path, dict(self.headers)))
        self._answer(b"", 502)


@contextmanager
def served(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with served(Server()) as made:
        yield made


@pytest.fixture
def fetch(tmp_path: Path):
    return fetch_from(str(tmp_path), MOST, 5.0)


# -- addresses --------------------------------------------------------------------------------------------


def test_only_addresses_of_the_internet_are_public() -> None:
    for public in (
        "8.8.8.8",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "2002:808:808::",
        "64:ff9b::808:808",
    ):
        assert is_public(public), public
    private = """
        127.0.0.1 127.9.9.9 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1
        240.0.0.1 255.255.255.255 192.0.2.1 198.18.0.1 ::1 :: fe80::1 fe80::1%eth0 fd00:ec2::254 fec0::1
        ff02::1 2001:db8::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1
        64:ff9b::a9fe:a9fe 192.0.0.9 192.0.0.192 192.88.99.1 168.63.129.16 100.100.100.200 ::ffff:168.63.129.16
        64:ff9b::a83f:8110 64:ff9b:1::808:808 100::1 3fff::1 5f00::1
    """
    for address in private.split():
        assert not is_public(address), address


def test_no_name_of_this_machine_is_asked(server: Server, fetch) -> None:
    port = server.server_address[1]
    for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0", "0.0.0.0", "[::1]",
                 "[::ffff:127.0.0.1]", "[::]", "user@127.0.0.1", "169.254.169.254", "8.8.8.8@127.0.0.1"):  # fmt: skip
        with pytest.raises(StoreError, match="not a public address; leave it out") as refused:
            fetch(f"http://{host}:{port}/secret")
        assert "--allow-private" in str(refused.value)
    assert server.asked == []
    allowed = fetch_from("x", MOST, 5.0, allow_private=True)
    assert allowed(f"{server.url}/a.png") == PNG and len(server.asked) == 1


IN_A_NAMESPACE = """
import json, socket, subprocess, sys
sys.path[:0] = json.loads(sys.argv[1])
for address in ("8.8.4.4", "169.254.169.254"):
    subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
from test_prepare_urls import PNG, Server, served
from meshfeed.prepare.inputs.samples import fetch_from
from meshfeed.cli.main import main
from meshfeed.errors import StoreError

private = {host: Server((host, 80)) for host in ("127.0.0.1", "169.254.169.254", "10.0.0.1")}
own, resolutions = socket.getaddrinfo, []

def resolved(host, *rest, **named):
    '''A name server that changes its mind after each answer.'''
    if host != "rebinds.example":
        return own(host, *rest, **named)
    resolutions.append(host)
    return own("8.8.4.4" if len(resolutions) % 2 else "169.254.169.254", *rest, **named)

socket.getaddrinfo = resolved
said = {}
with served(Server(("8.8.4.4", 80))) as public:
    import contextlib
    with contextlib.ExitStack() as stack:
        for each in private.values():
            stack.enter_context(served(each))
        fetch = fetch_from("/tmp", 1 << 20, 5.0)
        for url in json.loads(sys.argv[2]):
            try:
                said[url] = "fetched" if fetch(url) == PNG else "other"
            except StoreError as error:
                said[url] = str(error)
    asked = [path for _, path, _ in public.asked]
print(json.dumps([said, asked, {host: each.asked for host, each in private.items()}, len(resolutions)]))
"""


def test_redirects_and_names_that_change_reach_nothing_private() -> None:
    """On a machine of its own, where a public address leads to its metadata service and its neighbours."""
    needs("ip")
    needs_root()
    base = "http://8.8.4.4"
    refused = [
        f"{base}/to/http://169.254.169.254/latest/meta-data/iam",
        f"{base}/to/http://127.0.0.1/",
        f"{base}/to///10.0.0.1/a.png",
        f"{base}/to/{base}/to/http://10.0.0.1/a.png",
        "http://169.254.169.254/latest",
        "http://10.0.0.1/a.png",
    ]
    others = {
        f"{base}/a.png": "fetched",
        f"{base}/to/{base}/to/{base}/a.png": "fetched",
        "http://rebinds.example/a.png": "fetched",
        f"{base}/to/file:///etc/passwd": "something that is not a web address",
        f"{base}/to/s3://bucket/x": "something that is not a web address",
        f"{base}/to/" * 6 + f"{base}/a.png": "the server redirects endlessly",
    }
    paths = json.dumps([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    with nodes(1) as (node,):
        process = node.start(
            [quick.python(), "-c", IN_A_NAMESPACE, paths, json.dumps([*refused, *others])], {}
        )
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said, asked, private, resolutions = json.loads(out)
    for url in refused:
        assert "not a public address" in said[url], url
        assert said[url].startswith(url), "it names what the record says, and not where that leads"
    for url, wanted in others.items():
        assert wanted in said[url], (url, said[url])
    assert private == {"127.0.0.1": [], "169.254.169.254": [], "10.0.0.1": []}
    assert asked.count("/a.png") == 3 and resolutions == 1


# -- what a server may do ---------------------------------------------------------------------------------


def web(seconds: float = 5.0) -> Web:
    return Web(seconds, allow_private=True)


def test_no_error_repeats_what_a_server_said(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither of an answer that is not HTTP, nor of one that is no image."""
    paths = (
        "secret",
        "status/404",
        "status/403",
        "status/500",
        "broken-status",
        f"to/http://{SECRET.decode()}/",
    )
    rows = [json.dumps({"text": "x", "image": f"{server.url}/{path}"}) for path in paths]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    how = Multimodal(text=Text(tokenizer="bytes"), tokens={"image": "\x01"})
    prepare(
        [tmp_path / "rows.jsonl"],
        tmp_path / "out",
        how,
        engine=Here(),
        max_errors=len(paths),
        allow_private=True,
        url_timeout_s=0.5,
    )
    errors = (tmp_path / "out/errors.jsonl").read_text()
    told = [json.loads(line)["error"] for line in errors.splitlines()]
    wanted = (
        "not an image or audio: 11 bytes",
        "status 404",
        "status 403",
        "status 500",
        "BadStatusLine",
        "",
    )
    assert len(told) == len(paths) and all(part in each for part, each in zip(wanted, told)), told
    assert "SECRET" not in "".join(told[:-1]) + caplog.text and told[-1].count("SECRET") == 1  # in its URL


def test_sizes_and_times_are_bounded(server: Server) -> None:
    assert len(web().read(f"{server.url}/endless", 5000)) == 5001
    with pytest.raises(StoreError, match="more than 5,000 bytes"):
        fetch_from("x", 5000, 5.0, allow_private=True)(f"{server.url}/endless")
    for path in ("drips", "cut"):
        with pytest.raises(StoreError, match=rf"/{path}: failed \d+ times"):
            web(0.3).read(f"{server.url}/{path}", MOST)


def test_a_url_keeps_its_query_and_its_password_is_not_shown(server: Server) -> None:
    url = server.url.replace("//", "//me:word@") + "/größe 1.png?w=9"
    assert web().read(url, MOST) == PNG
    ((_, path, headers),) = server.asked
    assert path == "/gr%C3%B6%C3%9Fe%201.png?w=9" and headers["authorization"] == "Basic bWU6d29yZA=="
    with pytest.raises(StoreError, match="status 404") as refused:
        web().read(url.replace("größe 1.png", "status/404"), MOST)
    assert "word" not in str(refused.value) and "w=9" not in str(refused.value)
    server.asked.clear()
    web().read(url.replace("größe 1.png", "to/" + server.url + "/a.png"), MOST)
    assert "authorization" not in server.asked[-1][2], "a redirect takes no password along"


def test_international_names_of_hosts_are_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As IDNA encodes them; digits of other scripts hide no address of this machine."""
    own, port = socket.getaddrinfo, server.server_address[1]

    def resolved(host: str, *rest: object, **named: object) -> object:
        return own("127.0.0.1" if host == "xn--bcher-kva.example" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert web().read(f"http://me:größe@bücher.example:{port}/ö.png", MOST) == PNG
    ((_, path, headers),) = server.asked
    assert (path, headers["Host"]) == ("/%C3%B6.png", f"xn--bcher-kva.example:{port}")
    assert headers["authorization"] == "Basic bWU6Z3LDtsOfZQ=="
    fetch = fetch_from(f"http://bücher.example:{port}/data", MOST, 2.0)
    assert fetch("a.png") == PNG
    with pytest.raises(StoreError, match="not a public address"):
        fetch(f"http://①②⑦.⓪.⓪.①:{port}/secret")
    with pytest.raises(StoreError, match="not a web address"):
        fetch(f"http://{'ü' * 70}.example/a.png")


def test_names_that_are_no_urls_are_refused(fetch) -> None:
    for name in ("http://[x/a.png", "http://", "http:///a.png", "http://h:99999/", "http://" + "a" * 70 + ".x/",
                 "\ud800.png", "http://h/\ud800"):  # fmt: skip
        with pytest.raises(StoreError):
            fetch(name)
    with pytest.raises(StoreError, match="no host of this name"):
        fetch("http://nowhere.invalid/a.png")


def test_a_proxy_of_the_environment_is_used(server: Server, fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds hosts that this machine cannot, if that is allowed; known private addresses are refused."""
    proxy = server.url.replace("//", "//me:word@")
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.setenv("no_proxy", "other.example")
    with pytest.raises(StoreError, match=r"only the proxy may find.*--allow-private"):
        fetch("http://pictures.invalid/a.png?w=9")
    assert server.asked == []
    allowed = fetch_from("x", MOST, 0.3, allow_private=True)
    assert allowed("http://pictures.invalid/a.png?w=9") == PNG
    method, path, headers = server.asked.pop()
    assert (method, path) == ("GET", "http://pictures.invalid/a.png?w=9")
    assert headers["Proxy-Authorization"] == "Basic bWU6d29yZA==" and headers["Host"] == "pictures.invalid"
    with pytest.raises(StoreError, match="Tunnel connection failed"):
        allowed("https://pictures.invalid/a.png")
    assert server.asked[0][:2] == ("CONNECT", "pictures.invalid:443")
    server.asked.clear()
    with pytest.raises(StoreError, match="not a public address"):
        fetch("http://10.0.0.1/a.png")
    assert server.asked == []


@pytest.mark.parametrize("kind", ["https", "socks5", "socks5h", "HTTPS"])
def test_a_proxy_of_another_kind_gets_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Above all not its password, in clear."""
    for name in ("http", "https"):
        monkeypatch.setenv(f"{name}_proxy", server.url.replace("http://", f"{kind}://me:word@"))
        with pytest.raises(StoreError, match=rf"{name}_proxy names .*no_proxy") as refused:
            web(2.0).read(f"{name}://pictures.example/a.png", MOST)
        assert "word" not in str(refused.value)
    assert server.asked == []


def test_a_certificate_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the name in the URL, by who this machine trusts."""
    needs("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "9", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(certificate, key)
    server = Server()
    server.socket = secured.wrap_socket(server.socket, server_side=True)
    with served(server):
        port = server.server_address[1]
        with pytest.raises(StoreError, match="certificate is not trusted"):
            web().read(f"https://localhost:{port}/a.png", MOST)
        trusted = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr("meshfeed.prepare.inputs.web._tls", lambda: trusted)
        assert web().read(f"https://localhost:{port}/a.png", MOST) == PNG
        with pytest.raises(StoreError, match="certificate is not trusted"):
            web().read(f"https://127.0.0.1:{port}/a.png", MOST)


# -- credentials ------------------------------------------------------------------------------------------


def test_credentials_are_used_below_named_folders_alone(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_REGION": "x",
    }.items():
        monkeypatch.setenv(name, value)
    for url in (
        "s3://b/a.png",
        "S3://b/a.png",
        "gs://b/a",
        "az://b/a",
        "abfss://c@a/x",
        "hf://datasets/o/n/x",
    ):
        with pytest.raises(
            StoreError, match=r"would be read with this machine's credentials.*--parts-folder"
        ):
            fetch_from(str(tmp_path), MOST, 2.0)(url)
        with pytest.raises(StoreError, match="would be read with this machine's credentials"):
            fetch_from("s3://b/sub", MOST, 2.0, own="s3://b/subs/rows")(url)
    assert server.asked == []
    for folder, own in (("s3://b/pictures", "/x"), ("/x", "s3://b/pictures/")):
        with pytest.raises(StoreError, match=r"without '\.\.'"):
            fetch_from(folder, MOST, 2.0, own=own)("s3://b/pictures/../other/a.png")
        assert server.asked == []
        with pytest.raises(StoreError):  # this server has no ranges; that it is asked is what counts
            fetch_from(folder, MOST, 0.3, own=own)("s3://b/pictures/a.png")
        assert "AWS4-HMAC" in json.dumps(server.asked)
        server.asked.clear()


def test_a_folder_of_the_web_is_read_from_its_own_host_alone(server: Server) -> None:
    """Whatever address it has, with its password; what lies elsewhere, or redirects there, is checked."""
    folder = f"{server.url.replace('//', '//me:word@')}/data"
    fetch = fetch_from(folder, MOST, 2.0, own=f"{server.url}/to")
    for name in (
        "a.png",
        "größe 1.png",
        f"{server.url}/data/img?id=3",
        f"{server.url}/to/{server.url}/b.png",
    ):
        assert fetch(name) == PNG, name
    asked = [(path, headers.get("authorization")) for _, path, headers in server.asked]
    password = "Basic bWU6d29yZA=="
    assert asked[:3] == [
        ("/data/a.png", password), ("/data/gr%C3%B6%C3%9Fe%201.png", password), ("/data/img?id=3", password),
    ]  # fmt: skip
    assert [path for path, _ in asked[4:]] == ["/b.png"]
    with served(Server()) as other:
        to = fetch_from(f"{server.url}/to", MOST, 2.0)
        for name in (f"{other.url}/secret", f"{server.url.replace('127.0.0.1', 'localhost')}/secret",
                     f"{other.url}/to/{server.url}/secret"):  # fmt: skip
            with pytest.raises(StoreError, match="redirected to not a public address"):
                to(f"{server.url}/to/{name}")
        for name in (f"{other.url}/a.png", f"{server.url}/a.png", f"{server.url}/data/../secret",
                     f"{server.url}/data/%2e%2e/secret", f"{server.url}/data/..%5csecret"):  # fmt: skip
            with pytest.raises(StoreError, match="not a public address"):
                fetch(name)
        with pytest.raises(StoreError, match=r"without '\.\.'"):
            fetch("../secret")
        assert other.asked == []
    assert "/secret" not in [path for _, path, _ in server.asked]


# -- links ------------------------------------------------------------------------------------------------


def test_links_lead_to_nothing_outside_a_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "outside"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.png").write_bytes(PNG)
    (inside / "sub/a.png").write_bytes(PNG)
    (inside / "file.png").symlink_to(outside / "secret.png")
    (inside / "lnk").symlink_to(outside)
    (inside / "up.png").symlink_to("../outside/secret.png")
    (inside / "chain.png").symlink_to("sub/../file.png")
    (inside / "own.png").symlink_to("sub/a.png")
    (inside / "near").symlink_to("sub")
    (inside / "round.png").symlink_to("round.png")
    (tmp_path / "also").symlink_to(inside)
    os.mkfifo(inside / "pipe.png")
    for folder in (inside, tmp_path / "also"):
        fetch = fetch_from(str(folder), MOST, 5.0)
        for name in ("sub/a.png", "own.png", "near/a.png", str(folder / "own.png")):
            assert fetch(name) == PNG, name
        for name in ("file.png", "lnk/secret.png", "up.png", "chain.png", str(folder / "lnk/secret.png")):
            with pytest.raises(StoreError, match=r"a link that leads out of .*cp -rL") as refused:
                fetch(name)
            assert "outside/" not in str(refused.value)
        for name, why in (
            ("round.png", "levels of symbolic links"),
            ("pipe.png", "not a file"),
            ("sub", "not a file|directory"),
            ("sub/none.png", "missing"),
            ("sub/a.png/x", "[Nn]ot a directory|missing"),
        ):
            with pytest.raises(StoreError, match=why):
                fetch(name)


def test_a_folder_that_becomes_a_link_while_it_is_read_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its real path was found, and before it is opened."""
    inside, outside = tmp_path / "in", tmp_path / "outside"
    for folder in (inside / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(PNG if folder == outside else b"own")
    real = os.path.realpath

    def then_swapped(path: str, **how: bool) -> str:
        found = real(path, **how)
        if str(path).endswith("a.png"):
            (inside / "sub").rename(inside / "was")
            (inside / "sub").symlink_to(outside)
        return found

    monkeypatch.setattr("meshfeed.prepare.inputs.within_folder.os.path.realpath", then_swapped)
    with pytest.raises(StoreError):
        fetch_from(str(inside), MOST, 5.0)("sub/a.png")


def test_a_refused_connection_is_an_error_of_the_url(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreError, match=f"127.0.0.1:{port}/a.png: failed"):
        web(0.2).read(f"http://127.0.0.1:{port}/a.png", MOST)


def test_the_command_asks_private_hosts_where_it_is_told_to(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x", "image": f"{server.url}/a.png"}))
    words = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--multimodal",
        "--tokenizer",
        "bytes",
        "--image-token",
        "#",
    ]
    words += ["--workers", "1", "--out", str(tmp_path / "out")]
    assert main(words) == 2 and "not a public address" in capsys.readouterr().err
    assert server.asked == []
    assert main([*words, "--allow-private", "--resume"]) == 0
    assert "1 part" in capsys.readouterr().out
