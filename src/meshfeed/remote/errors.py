"""Classifies the errors of storage services.

obstore has a class for a missing object, a failed precondition and a lack of permission. All other errors are
one class, and only its text has the status and the code of the service's answer, so they are searched there.
The status alone is not enough: 400 is an expired token or another region, 404 a missing bucket or upload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshfeed.errors import AccessError, ChangedError, MissingError, StoreError
from meshfeed.files.url import without_secrets

REPLACED = (
    "it was replaced after this run opened it; restore the old one, or start a new run with the new one"
)
# by name: obstore need not be installed
_KINDS: Mapping[str, type[StoreError]] = {
    "NotFoundError": MissingError,
    "FileNotFoundError": MissingError,
    "PreconditionError": ChangedError,
    "PermissionDeniedError": AccessError,
    "UnauthenticatedError": AccessError,
    "InvalidPathError": StoreError,
    "NotSupportedError": StoreError,
    "UnknownConfigurationKeyError": StoreError,
}
_REGION = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|[Rr]egion")
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired|expired")
_CLOCK = re.compile(r"RequestTimeTooSkewed|[Dd]ate header too old")
_UNKNOWN_HOST = re.compile(r"Name or service not known|No address associated|nodename nor servname")
_NO_NAMES = re.compile(r"Temporary failure in name resolution")
_STATUS = re.compile(r"\bstatus(?: code)?:? ([345]\d\d)\b")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>),]+")
_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_")
_PERMANENT = re.compile(
    r"following redirect|builder error|Could not parse path|MissingContentLength|InvalidContentType"
)
_DETAIL = re.compile(r'(?:message|error): "([^"]+)"')
_RIGHT_REGION = re.compile(r"<Region>([^<]+)</Region>|expecting '([^']+)'")
_MISSING_BUCKET = re.compile(r"NoSuchBucket|NoSuchKey|ContainerNotFound|BlobNotFound")
_NO_RANGE = "Range request not supported"
_LONGEST = 300


def kind_of(error: BaseException, path: str = "") -> type[StoreError] | None:
    """The kind of a permanent error of obstore; None if another attempt may succeed.

    path: of the object; its name is removed from the text before matching.
    """
    text = _URL.sub("", str(error))
    text = text.replace(path, "") if path else text
    kind = _KINDS.get(type(error).__name__)
    if kind in (MissingError, ChangedError):
        return kind
    if _CLOCK.search(text) or _EXPIRED.search(text) or _is_region(text):
        return AccessError
    if _MISSING_BUCKET.search(text):
        return MissingError
    if kind is not None:
        return kind
    if _PERMANENT.search(text):
        return StoreError
    if (status := _status_in(text)) is None:
        return StoreError if "credential" in text.lower() and "load" in text.lower() else None
    code = int(status)
    if code in (401, 403):
        return AccessError
    if code == 416:
        return ChangedError  # the range fitted the object when it was opened
    return StoreError if 300 <= code < 500 and code not in (408, 425, 429) else None


def is_unknown_host(error: BaseException) -> bool:
    """Whether the name of a host is not known, as opposed to a name service that does not answer."""
    return _UNKNOWN_HOST.search(str(error)) is not None


def has_no_names(error: BaseException) -> bool:
    """Whether no name service answers, as without a network."""
    return _NO_NAMES.search(str(error)) is not None


def refuse_other_size(where: str, size_bytes: int | None, told_bytes: int) -> None:
    """Raises ChangedError if an answer tells another size than the one that an object was opened with."""
    if size_bytes not in (None, told_bytes):
        raise ChangedError(
            f"{where}: of an object of {told_bytes} bytes, which had {size_bytes} when it was opened; it was "
            f"replaced, or the server tells two sizes: see what it answers to HEAD and to a range"
        )


def refuses_method(error: Exception) -> bool:
    """Whether a server refuses the request's method, such as HEAD."""
    return _status_in(str(error)) in ("405", "501")


def refuses_range(error: Exception) -> bool:
    """Whether a server answers a range with 416, or with the whole object."""
    return _status_in(str(error)) == "416" or _NO_RANGE in str(error)


def _status_in(text: str) -> str | None:
    status = _STATUS.search(text)
    return None if status is None else status[1]


def reason(error: BaseException, path: str = "") -> str:
    """An exception's message in one line, and what to do about it if known."""
    kind = kind_of(error, path)
    if kind is MissingError:
        return "no such object; check the URL"
    if kind is ChangedError:
        return REPLACED
    plain = _URL.sub(lambda url: without_secrets(url[0]), str(error))
    message_text, _, debug = plain.partition("Debug source:")
    text = " ".join(message_text.split())
    brief = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    detail = _DETAIL.search(debug)
    if detail is not None and detail[1] not in brief:
        brief = f"{brief}: {detail[1]}"
    for sign, hint in _HINTS.items():
        if sign in message_text or sign in debug:
            return f"{hint} ({brief})"
    if kind is not AccessError:
        return brief or type(error).__name__
    if _CLOCK.search(text):
        return f"the clock of this machine is wrong; set it, as NTP does, and start again ({brief})"
    if _EXPIRED.search(text):
        return f"the credentials have expired; renew them and start again ({brief})"
    if _is_region(text):
        right = _RIGHT_REGION.search(text)
        hint = f", which is {right[1] or right[2]}" if right else ""
        return f"the bucket is in another region; give its region{hint} ({brief})"
    return f"no permission; check the credentials and the bucket's policy ({brief})"


_HINTS: Mapping[str, str] = {
    "InvalidContentType": "the server does not speak TLS; is the URL http://?",
    "TooManyRedirects": "the server redirects endlessly",
    "MissingContentLength": "the server does not send the length of objects",
    _NO_RANGE: "the server ignores Range; use one that supports it, such as nginx or an object store",
}


def _is_region(text: str) -> bool:
    return _status_in(text) in ("301", "307", "400") and _REGION.search(text) is not None


ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_DEFAULT_REGION",
        "AWS_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_SKIP_SIGNATURE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_STORAGE_TENANT_ID",
        "AZURE_STORAGE_TOKEN",
        "AZURE_STORAGE_ENDPOINT",
        "AZURE_FEDERATED_TOKEN_FILE",
    ),
    "hf": ("HF_ENDPOINT", "HF_TOKEN"),
}
"""The usual environment variables of each cloud, by scheme. A rank sends their values to its fetcher with
each request, so they may change while it runs."""


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a fetcher, without credentials: its reader sends them with each request."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_CLOUDS) and name not in ENVIRONMENT["hf"]
    }


def options_of_environment(root: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The credentials and endpoints in a process's environment for a root such as s3://bucket."""
    scheme = root.partition("://")[0]
    names = ENVIRONMENT.get("az" if scheme.startswith("abfs") else scheme, ())
    return {name.lower(): environ[name] for name in names if environ.get(name)}
