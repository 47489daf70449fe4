"""What storage services mean when they say no."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from meshfeed.files.url import without_secrets

Meaning = Literal["missing", "changed", "refused", "wrong", "passing"]

_KINDS: Mapping[str, Meaning] = {
    "NotFoundError": "missing",
    "FileNotFoundError": "missing",
    "PreconditionError": "changed",
    "PermissionDeniedError": "refused",
    "UnauthenticatedError": "refused",
    "InvalidPathError": "wrong",
    "NotSupportedError": "wrong",
    "UnknownConfigurationKeyError": "wrong",
}
_REGION = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|[Rr]egion")
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestTimeTooSkewed|RequestExpired|expired")
_STATUS = re.compile(r"\bstatus(?: code)?:? ([345]\d\d)\b")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>),]+")
_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_")
_FOR_EVER = re.compile(
    r"following redirect|builder error|Could not parse path|MissingContentLength|InvalidContentType"
)
_DETAIL = re.compile(r'(?:message|error): "([^"]+)"')
_RIGHT_REGION = re.compile(r"<Region>([^<]+)</Region>|expecting '([^']+)'")
_MISSING_BUCKET = re.compile(r"NoSuchBucket|NoSuchKey|ContainerNotFound|BlobNotFound")
_LONGEST = 300


def meaning_of(error: BaseException, path: str = "") -> Meaning:
    """What an exception of obstore says; "passing" for what another attempt may mend.

    path: of the object, whose name must not be taken for the service's words.
    """
    text = _URL.sub("", str(error))
    text = text.replace(path, "") if path else text
    kind = _KINDS.get(type(error).__name__)
    if kind in ("missing", "changed"):
        return kind
    if _EXPIRED.search(text) or _is_region(text):
        return "refused"
    if _MISSING_BUCKET.search(text):
        return "missing"
    if kind is not None:
        return kind
    if _FOR_EVER.search(text):
        return "wrong"
    status = _STATUS.search(text)
    if status is None:
        return "wrong" if "credential" in text.lower() and "load" in text.lower() else "passing"
    code = int(status[1])
    if code in (401, 403):
        return "refused"
    if code == 416:
        return "changed"  # the range was inside what was there at first
    return "wrong" if 300 <= code < 500 and code not in (408, 425, 429) else "passing"


def _shown(url: re.Match[str]) -> str:
    """A URL without passwords and signatures."""
    return without_secrets(url[0])


def refuses_method(error: Exception) -> bool:
    """Whether a server knows the request's method, such as HEAD, but does not take it."""
    status = _STATUS.search(str(error))
    return status is not None and status[1] in ("405", "501")


def reason(error: BaseException, path: str = "") -> str:
    """One line of what an exception says, and what to do about it where that is known."""
    told, _, debug = _URL.sub(_shown, str(error)).partition("Debug source:")
    text = " ".join(told.split())
    brief = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    detail = _DETAIL.search(debug)
    if detail is not None and detail[1] not in brief:
        brief = f"{brief}: {detail[1]}"
    for sign, hint in _HINTS.items():
        if sign in told or sign in debug:
            return f"{hint} ({brief})"
    if meaning_of(error, path) != "refused":
        return brief or type(error).__name__
    if _EXPIRED.search(text):
        return f"the credentials have expired; renew them and start again ({brief})"
    if _is_region(text):
        right = _RIGHT_REGION.search(text)
        told = f", which is {right[1] or right[2]}" if right else ""
        return f"the bucket is of another region; give its region{told} ({brief})"
    return f"no permission; look at the credentials and the bucket's policy ({brief})"


_HINTS: Mapping[str, str] = {
    "InvalidContentType": "the server speaks no TLS; is the URL http://?",
    "TooManyRedirects": "the server redirects for ever",
    "MissingContentLength": "the server does not say how long objects are",
    "Range request not supported": "the server ignores Range; serve it by one that does, as nginx or an "
    "object store",
}


def _is_region(text: str) -> bool:
    status = _STATUS.search(text)
    return status is not None and status[1] in ("301", "307", "400") and _REGION.search(text) is not None


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
}
"""By scheme, the variables of the cloud's usual chain. A rank hands its own on to the leader, which may have
been started by another job."""


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a leader, which serves jobs that have others: they bring theirs along."""
    return {name: value for name, value in environ.items() if not name.startswith(_CLOUDS)}


def options_of_environment(root: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The credentials and endpoints that a process's environment has for a root such as s3://bucket."""
    scheme = root.partition("://")[0]
    names = ENVIRONMENT.get("az" if scheme.startswith("abfs") else scheme, ())
    return {name.lower(): environ[name] for name in names if environ.get(name)}
