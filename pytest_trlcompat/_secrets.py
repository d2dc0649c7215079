"""Remove secrets from what is kept and shown: evidence, reports, errors, the ends of programs' outputs.

A secret is recognised by its place: an environment variable whose name says so (``HF_TOKEN``), the user part of a URL,
a parameter of a URL or a header with such a name; or by its form, which the tokens of hubs and forges have. Whatever
describes a stack stays, in any place: a version, a number, a path, one or two words, and anything shorter than eight
characters. So no verdict depends on the variables of a machine.

Text is redacted before it is cut to a length, since half a secret would not be recognised.
"""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

__all__ = ["REDACTED", "Redactor", "redacted", "redacted_values"]

REDACTED = "[redacted]"

_LEAST = 8
"""Characters that a secret has at least; a shorter value is part of too many other words."""
_WORDS = re.compile(r"[a-z]+(?:[-_. ][a-z]+)?", re.IGNORECASE)
_LONGEST_WORDS = 19
_NUMBER = re.compile(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?", re.IGNORECASE)
_PATH = re.compile(r"/[^/\x00]+(?=/)")
"""The first folder of a path; a value is taken for a path where this folder exists."""
_LINE = 16
"""Characters of a line that is looked for by itself, of a value with several lines, such as a private key."""

_SECRET_WORDS = "TOKEN|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL"
_NAME = re.compile(rf"(?:{_SECRET_WORDS}|(?:^|_)(?:KEY|PASS|PWD|PAT|AUTH|COOKIE))S?(?:_|$)", re.IGNORECASE)
_ABOUT = re.compile(r"_(?:PATH|FILE|DIR|FOLDER|SOCK|URL|URI|HOST|PORT|NAME|TYPE|LENGTH|SIZE|COUNT|TTL)$", re.IGNORECASE)
"""Endings of names of variables that hold the place or a property of a secret, and not the secret itself."""
_FOLDERS = ("PWD", "OLDPWD")

_URL = re.compile(r"://[^\s/?#'\"<>:@]*:([^\s/?#'\"<>]+)@")
# git@ is no secret: forges have one user of that name for everybody.
_USER = re.compile(r"(?<=://)(?!git@)[^\s/?#'\"<>]+@")
_PARAMETER = re.compile(
    rf"(?<=[?&;#])([\w.~%-]*(?:{_SECRET_WORDS}|KEY|PASS|PWD|AUTH|SIGNATURE|SIG)S?=)[^\s&;#'\"<>]+", re.IGNORECASE
)
_HEADER = re.compile(r"(\bAuthorization['\"]?\s*[:=]\s*['\"]?)(?:(?:Basic|Bearer|Token)\s+)?[^\s'\",]+", re.IGNORECASE)
_ASSIGNMENT = re.compile(rf"(\b[A-Z][A-Z0-9_]*(?:{_SECRET_WORDS}|_KEY)S?=['\"]?)([^\s'\"]+)")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|pypi-[\w-]{50,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}\b|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""Tokens of Hugging Face, GitHub, GitLab, PyPI, OpenAI, Slack and AWS; JSON web tokens (RFC 7519); private keys
(RFC 7468)."""


class Redactor:
    """Takes the same secrets out of many texts; :func:`redacted` looks for them anew each time.

    Args:
        environ: in which secrets are looked for by their names; by default this process's.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._named = _pattern(tuple((os.environ if environ is None else environ).items()))

    def text(self, text: str) -> str:
        """``text`` with :data:`REDACTED` in place of each secret."""
        if self._named is not None:
            text = self._named.sub(REDACTED, text)
        if "://" in text:
            text = _USER.sub(f"{REDACTED}@", text)
        if "=" in text:
            text = _PARAMETER.sub(rf"\g<1>{REDACTED}", text)
            text = _ASSIGNMENT.sub(lambda match: match[1] + (REDACTED if _is_secret(match[2]) else match[2]), text)
        if "uthorization" in text or "UTHORIZATION" in text:
            text = _HEADER.sub(rf"\g<1>{REDACTED}", text)
        return _FORMS.sub(REDACTED, text)

    def values(self, document: Any, keep: Collection[str] = ()) -> Any:
        """JSON values with redacted texts, keys included.

        Args:
            keep: keys of the outermost mapping whose values stay as they are.
        """
        if isinstance(document, str):
            return self.text(document)
        if isinstance(document, Mapping):
            return {
                self.values(name): value if name in keep else self.values(value) for name, value in document.items()
            }
        return [self.values(item) for item in document] if isinstance(document, (list, tuple)) else document


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """:meth:`Redactor.text`, with the variables of ``environ`` or of this process."""
    return Redactor(environ).text(text)


def redacted_values(document: Any, environ: Mapping[str, str] | None = None, keep: Collection[str] = ()) -> Any:
    """:meth:`Redactor.values`, with the variables of ``environ`` or of this process."""
    return Redactor(environ).values(document, keep)


@functools.lru_cache(maxsize=8)
def _pattern(environ: tuple[tuple[str, str], ...]) -> re.Pattern[str] | None:
    """A pattern of the values of these variables that are secrets, the longest first: one may begin another."""
    spellings = {spelling for value in _values(environ) for spelling in _spellings(value)}
    return (
        re.compile("|".join(map(re.escape, sorted(spellings, key=lambda spelling: (-len(spelling), spelling)))))
        if spellings
        else None
    )


def _values(environ: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for name, value in environ:
        if _NAME.search(name) and not _ABOUT.search(name) and name not in _FOLDERS:
            yield from filter(_is_secret, (value, value.strip()))
            lines = map(str.strip, value.splitlines())
            yield from (line for line in lines if len(line) >= _LINE and _is_secret(line))
        for password in _URL.findall(value):
            yield from filter(_is_secret, (password, urllib.parse.unquote(password)))


def _spellings(value: str) -> set[str]:
    """The value, and its spellings in a URL and in a quoted text."""
    in_url = (urllib.parse.quote(value, safe="", errors="replace"), urllib.parse.quote_plus(value, errors="replace"))
    return {value, *in_url, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}


def _is_secret(value: str) -> bool:
    """Whether a value may be a secret, and is no word, number, version or path."""
    if len(value) < _LEAST or _NUMBER.fullmatch(value):
        return False
    if (path := _PATH.match(value)) and os.path.isdir(path[0]):
        return False
    if len(value) <= _LONGEST_WORDS and _WORDS.fullmatch(value):
        return False
    return not ("." in value and _is_version(value))


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
