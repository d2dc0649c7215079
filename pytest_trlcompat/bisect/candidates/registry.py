"""The releases of a package, as the registry lists them, asked through pip so that pip's own settings hold.

uv resolves but does not list; pip lists, and says on its most talkative level which files it passes by because they
were yanked. Imports only the standard library, ``packaging`` and the matrix.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.uv import find_uv, settings

__all__ = ["Listing", "list_releases"]

_YANKED = re.compile(r"Skipping link: yanked for reason: (?P<reason>.*?): (?P<link>\S+)(?: \(from |$)")
_VERSIONS = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Listing:
    """What the registry has of a package for one Python.

    Attributes:
        versions: releases and pre-releases that were not withdrawn, oldest first.
        yanked: withdrawn versions with the reason that was given, maybe empty.
        day: when it was asked.
    """

    package: str
    versions: tuple[str, ...]
    yanked: dict[str, str]
    day: str

    def to_json(self) -> str:
        return json.dumps({"versions": self.versions, "yanked": self.yanked, "day": self.day}, indent=1) + "\n"


def list_releases(package: str, python: str, kept: Path) -> Listing:
    """Ask the registry.

    Args:
        kept: a file with the newest answer, which is taken where the registry cannot be reached.

    Raises:
        BisectError: when there is neither.
    """
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    command = [
        *(find_uv(), "run", "--quiet", "--no-project", "--isolated", "--python", python, "--with", "pip"),
        *("python", "-m", "pip", "index", "versions", package, "--pre", "-vvv", "--disable-pip-version-check"),
    ]
    done = subprocess.run(command, env=_pips_settings(), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        listing = parse(package, done.stdout + done.stderr, today)
        if listing.versions:
            write_whole(kept, listing.to_json())
            return listing
    if kept.is_file():
        raw = json.loads(kept.read_text(encoding="utf-8"))
        return Listing(package, tuple(raw["versions"]), dict(raw["yanked"]), raw["day"])
    raise BisectError(
        f"the releases of {package} could not be listed: {_reason(done.stderr or done.stdout)}\n"
        "Is there a network, and does pip reach the package index (pip config list)?"
    )


def parse(package: str, output: str, day: str) -> Listing:
    """Read what ``pip index versions --pre -vvv`` prints."""
    found = _VERSIONS.search(output)
    texts = [text.strip() for text in found[1].split(",")] if found else []
    versions = sorted((text for text in texts if _version(text) is not None), key=Version)
    yanked: dict[str, str] = {}
    for match in _YANKED.finditer(output):
        version = _version_of_file(match["link"].split("#")[0].rsplit("/", 1)[-1])
        if version is not None and str(version) not in versions:
            reason = match["reason"].strip()
            yanked[str(version)] = "" if reason == "<none given>" else reason
    return Listing(package, tuple(versions), yanked, day)


def _pips_settings() -> dict[str, str]:
    child = settings(os.environ)
    # Whoever has told only uv of an index means pip as well.
    if "UV_DEFAULT_INDEX" in child:
        child.setdefault("PIP_INDEX_URL", child["UV_DEFAULT_INDEX"])
    return child


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _version_of_file(name: str) -> Version | None:
    try:
        return parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _reason(output: str) -> str:
    wanted = re.compile(
        r"^(?:ERROR:|WARNING: Retrying|error:)|^\s+Caused by:|Could not|network|No matching", re.IGNORECASE
    )
    lines = [line.strip() for line in output.splitlines() if wanted.search(line)]
    return " / ".join(dict.fromkeys(lines[-3:])) or "pip gave no reason"
