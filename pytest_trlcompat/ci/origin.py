"""Where continuous integration gets this package from, which is on no package index."""

from __future__ import annotations

import json
import re
from importlib import metadata

from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.ci.errors import CiError

__all__ = ["checked", "installed_from"]

_ASK = "say where CI gets pytest-trlcompat from, for example --from git+https://HOST/OWNER/pytest-trlcompat@COMMIT"
_ALLOWED = re.compile(r"[A-Za-z0-9._~:/?#@!&=+,%\[\]-]+( @ [A-Za-z0-9._~:/?#@!&=+,%-]+)?")
"""Of URLs (RFC 3986), paths and requirements that name a URL; nothing that a shell, YAML or a template would read."""


def installed_from() -> str:
    """The requirement by which pip installed this package from a repository, at the same commit.

    Raises:
        CiError: it was installed otherwise, from a folder or a file say, which CI has not.
    """
    try:
        text = metadata.distribution("pytest-trlcompat").read_text("direct_url.json")
        direct_url = json.loads(text or "{}")
        url, vcs = str(direct_url["url"]), direct_url["vcs_info"]
        return checked(f"{vcs['vcs']}+{url}@{vcs['commit_id']}")
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError) as error:
        raise CiError(f"this pytest-trlcompat was not installed from a repository: {_ASK}") from error


def checked(text: str) -> str:
    """A requirement, a URL or a path as it may stand in a file of the repository.

    Raises:
        CiError: it holds a secret, or what is no part of any of them.
    """
    if redacted(text) != text:
        raise CiError("--from holds a secret, which would stand in the repository: let CI's own settings provide it")
    if not _ALLOWED.fullmatch(text):
        raise CiError(f"--from {text!r} is no URL, path or requirement: {_ASK}")
    return text
