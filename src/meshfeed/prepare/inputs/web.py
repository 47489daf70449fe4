"""The bytes of URLs that records name.

The author of the records chose the URLs, so requests go to public addresses only. Each redirect is checked
again, and the connection goes to the very address that was checked, so a name that changes its address in
between (DNS rebinding) gains nothing. A proxy resolves the name itself; there, the check uses the address
that this machine finds. Sizes and times are bounded. No error repeats what a server sent.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import urllib.request
from collections.abc import Generator
from functools import lru_cache
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from meshfeed.errors import AccessError, MissingError, StoreError
from meshfeed.files.remote.retries import GIVE_UP, Patience, Retries
from meshfeed.files.url import credentials_of, is_http, without_secrets

_MOST_REDIRECTS = 5
_MOST_ADDRESSES = 4  # of a host that are tried
_PIECE_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT = (408, 425, 429)
_KINDS = {401: AccessError, 403: AccessError, 404: MissingError, 410: MissingError}
_PORTS = {"http": 80, "https": 443}
_UNKNOWN_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NEVER_PUBLIC = tuple(
    ipaddress.ip_network(each)  # services of a cloud or a provider, and what some Pythons call global
    for each in ("100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24",
                 "64:ff9b:1::/48", "100::/64", "3fff::/20", "5f00::/16")
)  # fmt: skip
_BARE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")

PRIVATE = "not a public address; leave it out, or allow private ones by --allow-private"
"""The reason for a host on this machine or in its networks."""
_UNCHECKED = (
    "a host that only the proxy may find, so its address cannot be checked; allow it by --allow-private"
)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet: not private, loopback, link-local, multicast, reserved.

    An IPv6 address that carries one of IPv4 (mapped, 6to4, NAT64) is judged by that.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(ip.packed[-4:])
        if inner is None and ip.is_site_local:  # the older kind, which Python calls global
            return False
        ip = inner or ip
    if any(ip in network for network in _NEVER_PUBLIC):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


class Web(Retries):
    """Reads URLs of http and https.

    Args:
        give_up_s: for all attempts at a URL.
        allow_private: whether hosts may have addresses that are not public.
    """

    def __init__(self, give_up_s: float, *, allow_private: bool) -> None:
        super().__init__("", Patience.of({GIVE_UP: f"{give_up_s:g}"}))
        self._allow_private = allow_private

    def read(self, url: str, most_bytes: int, *, named: str = "") -> bytes:
        """The bytes of a URL, at most `most_bytes` + 1 of them.

        named: a URL that the user chose. Its host may have any address, at its port, until a redirect leads
        to another.

        Raises StoreError.
        """
        where = without_secrets(url)
        return self._retry(lambda: self._followed(url, most_bytes + 1, named), url, where)

    def _followed(self, url: str, most_bytes: int, named: str) -> bytes:
        """The bytes at the end of its redirects."""
        url, is_named = _escaped(url), bool(named)
        for hop in range(1 + _MOST_REDIRECTS):
            is_named = is_named and _place_of(url) == _place_of(_escaped(named))
            try:
                with self._asked(url, hop, any_address=is_named or self._allow_private) as answer:
                    location = answer.headers.get("Location")
                    if answer.status not in _REDIRECTS or location is None:
                        return _body(answer, most_bytes)
            except http.client.HTTPException as error:  # its text may repeat what the server sent
                raise ConnectionError(f"no whole answer of HTTP ({type(error).__name__})") from None
            url = _escaped(urljoin(url, location))
        raise _RefusedError("the server redirects endlessly")

    @contextlib.contextmanager
    def _asked(
        self, url: str, hop: int, *, any_address: bool
    ) -> Generator[http.client.HTTPResponse, None, None]:
        """The answer to one request. hop: how many redirects led there. any_address: also private."""
        if not is_http(url) or not urlsplit(url).hostname:
            raise _RefusedError(
                "the server redirects to something that is not a web address" if hop else "has no host"
            )
        to = urlsplit(url)
        headers = {"Accept-Encoding": "identity", "User-Agent": "meshfeed", **credentials_of(url)}
        timeout_s, proxy = self._patience.timeout_s, _proxy_of(to)
        addresses = _addresses(to, hop, any_address=any_address, through_proxy=proxy is not None)
        if proxy is None:
            connection = http.client.HTTPConnection(str(to.hostname), _port_of(to), timeout_s)
            connection.default_port = _PORTS[to.scheme]
            connection.sock = _connected(addresses, timeout_s)
            target = ""
        else:
            connection = _to_proxy(proxy, to, headers, timeout_s)
            target = f"http://{to.netloc.rpartition('@')[2]}" if to.scheme == "http" else ""
        with contextlib.closing(connection), _limited(connection.sock, timeout_s):
            if to.scheme == "https":
                connection.sock = _tls().wrap_socket(connection.sock, server_hostname=to.hostname)
            target += (to.path or "/") + (f"?{to.query}" if to.query else "")
            connection.request("GET", target, headers=headers)
            yield connection.getresponse()

    def _refuse(self, error: Exception, path: str, where: str) -> None:
        """See `Retries`. Nothing that a server sent is repeated."""
        if isinstance(error, _RefusedError):
            raise StoreError(f"{where}: {error}") from error
        if isinstance(error, _StatusError):
            if error.status < 500 and error.status not in _TRANSIENT:
                kind = _KINDS.get(error.status, StoreError)
                raise kind(f"{where}: the server answers with status {error.status}") from None
        elif isinstance(error, socket.gaierror) and error.errno in _UNKNOWN_HOST:
            raise MissingError(f"{where}: no host of this name; check the URL") from error
        elif isinstance(error, ssl.SSLCertVerificationError):
            raise StoreError(f"{where}: its certificate is not trusted: {error.verify_message}") from error
        elif isinstance(error, ValueError):  # also a host that is no name
            raise StoreError(f"{where}: not a web address") from error

    def _asked_to_wait_s(self, error: Exception) -> float:
        return error.wait_s if isinstance(error, _StatusError) else 0.0


class _RefusedError(Exception):
    """An error that no further attempt can change."""


class _StatusError(Exception):
    """An answer with another status. wait_s: the wait that the server requests."""

    def __init__(self, status: int, wait: str | None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.wait_s = float(wait) if wait is not None and re.fullmatch("[0-9]{1,4}", wait) else 0.0


def _escaped(url: str) -> str:
    """A URL in ASCII: a host's name as IDNA encodes it, all other characters escaped. Raises ValueError."""
    parts = urlsplit(url)
    named, at, host = parts.netloc.rpartition("@")
    if not host.isascii():
        name, colon, port = host.partition(":")
        host = f"{name.encode('idna').decode()}{colon}{port}"
        url = urlunsplit(parts._replace(netloc=f"{named}{at}{host}"))
    return quote(_BARE_PERCENT.sub("%25", url), safe="%/:=&?~#+!$,;'@()*[]")


def _port_of(to: SplitResult) -> int:
    return to.port or _PORTS[to.scheme]


def _place_of(url: str) -> tuple[str | None, int | None]:
    """Host and port of a URL; no port for what is no web address."""
    to = urlsplit(url)
    return to.hostname, to.port or _PORTS.get(to.scheme)


def _addresses(to: SplitResult, hop: int, *, any_address: bool, through_proxy: bool) -> list[tuple[str, int]]:
    """Addresses of a host, at most _MOST_ADDRESSES; none if only the proxy can resolve it."""
    try:
        found = socket.getaddrinfo(to.hostname, _port_of(to), type=socket.SOCK_STREAM)
    except socket.gaierror:
        if not through_proxy:
            raise
        if not any_address:
            raise _RefusedError(f"{'redirected to ' if hop else ''}{_UNCHECKED}") from None
        return []
    sockets = [(str(where[0]), int(where[1])) for *_, where in found]
    allowed = [each for each in sockets if any_address or is_public(each[0])]
    if not allowed:
        raise _RefusedError(f"{'redirected to ' if hop else ''}{PRIVATE}")
    return allowed[:_MOST_ADDRESSES]


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _connected(addresses: list[tuple[str, int]], timeout_s: float) -> socket.socket:
    """A connection to the first address that accepts."""
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection(address, timeout_s)
    return socket.create_connection(addresses[-1], timeout_s)


@contextlib.contextmanager
def _limited(connection: socket.socket, seconds: float) -> Generator[None, None, None]:
    """Ends a connection after some seconds: a timeout bounds each wait, but a server may cause many."""
    own = connection.dup()
    timer = threading.Timer(seconds, _end, (own,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        own.close()


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may have ended
        connection.shutdown(socket.SHUT_RDWR)


def _body(answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
    """Its first bytes."""
    if answer.status != http.client.OK:
        raise _StatusError(answer.status, answer.headers.get("Retry-After"))
    size = answer.length
    if size is None and not answer.chunked:
        raise _RefusedError("the server does not send the length of objects")
    body = bytearray()
    while len(body) < most_bytes and (piece := answer.read(min(_PIECE_BYTES, most_bytes - len(body)))):
        body += piece
    if size is not None and len(body) < min(size, most_bytes):
        raise ConnectionError(f"received {len(body)} of {size} bytes")
    return bytes(body)


# -- proxies ----------------------------------------------------------------------------------------------


def _proxy_of(to: SplitResult) -> SplitResult | None:
    """The proxy for a host, from the environment; None without one. Only http proxies are accepted."""
    named = urllib.request.getproxies().get(to.scheme)
    if not named or urllib.request.proxy_bypass(str(to.hostname)):
        return None
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise _RefusedError(
            f"{to.scheme}_proxy names a proxy that is not one of http://, the only kind that is used; change "
            f"it, or list the host in no_proxy"
        )
    return proxy


def _to_proxy(
    proxy: SplitResult, to: SplitResult, headers: dict[str, str], timeout_s: float
) -> http.client.HTTPConnection:
    """A connection to a proxy, or through it where TLS follows. It gets its own password."""
    connection = http.client.HTTPConnection(str(proxy.hostname), proxy.port or 80, timeout_s)
    own: dict[str, str] = {}
    if proxy.username is not None:
        named = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        own["Proxy-Authorization"] = f"Basic {base64.b64encode(named.encode()).decode()}"
    if to.scheme == "https":
        connection.set_tunnel(str(to.hostname), _port_of(to), own)
    else:
        headers |= own
    connection.connect()
    return connection
