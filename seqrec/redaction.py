"""Secrets: where settings may not hold one, and how a text loses those that it holds.

Settings are written into dvc.lock, compiled pipelines, MLflow and reports, so they must not contain any secret. The
environment may; whatever is printed or logged passes through `redacted`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

HIDDEN = "***"
SHORTEST = 6  # characters of a variable's value that is looked for: `true` and `1` occur everywhere
_WORDS = r"pass(?:word|wd|phrase)|secret|token|credentials?|cookies?|authorization|api_?key"
_SECRET_NAME = re.compile(
    rf"(?:{_WORDS})(?![a-z])|access_?key|(?:^|[_.-])(?:pass|key|sig|signature|auth)$|[_.-]pwd$", re.IGNORECASE
)
# what follows the colon may be a password with slashes, but not a port and a path
_USERINFO = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?P<user>[^\s/?#:@'\"<>]*(?P<password>:(?!\d+/)[^\s'\"<>]*)?)@", re.IGNORECASE
)
_QUERY = re.compile(r"(?P<before>[?&;](?P<name>[\w.-]+)=)(?P<value>[^\s&;#'\"<>)]+)")


def redacted(text: str, *known: str) -> str:
    """Return `text` without secrets.

    Hidden are the user and password of a URL, the values of its query whose names speak of one (`token`, `sig`,
    `X-Amz-Signature`), the values of environment variables whose names do (`AWS_SECRET_ACCESS_KEY`), and `known`.
    """
    text = _USERINFO.sub(lambda found: f"{found['scheme']}{HIDDEN}@" if _is_login(found) else found[0], text)
    text = _QUERY.sub(lambda found: f"{found['before']}{HIDDEN}" if is_secret_name(found["name"]) else found[0], text)
    values = {value for name, value in os.environ.items() if is_secret_name(name)} | set(known)
    for value in sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True):
        text = text.replace(value, HIDDEN).replace(quote(value, safe=""), HIDDEN)
    return text


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name is likely to hold a secret."""
    return _SECRET_NAME.search(name) is not None


def holds_secret(value: str) -> bool:
    """Return whether a setting's value is a URL with a password in it, or with a token or signature in its query.

    A user name alone, as in `ssh://git@host`, is not a secret; over HTTP it is, since tokens are given that way.
    """
    logins, queries = _USERINFO.finditer(value), _QUERY.finditer(value)
    return any(map(_is_login, logins)) or any(is_secret_name(found["name"]) for found in queries)


def _is_login(found: re.Match[str]) -> bool:
    return bool(found["password"]) or found["scheme"].lower() in ("http://", "https://")


def secret_settings(values: Any, path: str) -> Iterator[str]:
    """Yield the keys in `values` that hold a secret; below `environment` the names of variables tell it, too."""
    if isinstance(values, str):
        if holds_secret(values):
            yield path
    elif isinstance(values, Mapping):
        variables = path.rpartition(".")[2] == "environment"
        for key, value in values.items():
            name = f"{path}.{key}" if path else str(key)
            if variables and value and is_secret_name(str(key)):
                yield name
            else:
                yield from secret_settings(value, name)
    elif isinstance(values, Sequence):
        for number, value in enumerate(values):
            yield from secret_settings(value, f"{path}[{number}]")


def split_credentials(uri: str) -> tuple[str, str, str]:
    """Return an address without its user and password, the user, and the password."""
    parts = urlsplit(uri)
    userinfo, login, host = parts.netloc.rpartition("@")
    if not login:
        return uri, "", ""
    user, _, password = userinfo.partition(":")
    return urlunsplit(parts._replace(netloc=host)), unquote(user), unquote(password)


class Formatter(logging.Formatter):
    """A formatter whose lines, tracebacks among them, hold no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`."""
        return redacted(super().format(record))


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what was not caught, as Python does, without secrets: for `sys.excepthook`. Of Ctrl-C, a word is enough."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))
