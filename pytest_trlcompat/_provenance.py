"""What a verdict was measured with: a digest of the code that ran, and of the packages that the process really had.

Each record carries it. Code that reuses earlier measurements (a resumed session, an interrupted sweep, a merge,
publishing, the watch, a bisection) asks :func:`difference`, and does not compare in any other way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CODE_VARIABLES",
    "OF_A_RUN",
    "OF_THE_MACHINE",
    "Provenance",
    "code_digest",
    "difference",
    "distributions_in",
    "of_environment",
    "of_this_process",
    "packages_digest",
]

OF_THE_MACHINE = (
    *("TRLCOMPAT_CACHE", "TRLCOMPAT_NODE_CACHE", "TRLCOMPAT_SWEEP", "TRLCOMPAT_RUN", "TRLCOMPAT_RDZV_SECRET"),
    *("TRLCOMPAT_LAUNCH", "TRLCOMPAT_LAUNCHER", "TRLCOMPAT_VLLM_CONTROL", "TRLCOMPAT_VLLM_SERVER"),
    "TRLCOMPAT_PLACES",
)
"""Variables on which no verdict depends, and which mean nothing on another machine: folders, secrets, and marks of
processes. A process may also set them for those that it starts."""

OF_A_RUN = ("TRLCOMPAT_RESULTS", "TRLCOMPAT_RESUME", "TRLCOMPAT_ISSUE", "TRLCOMPAT_SUBJECT", "TRLCOMPAT_TRAINER")
"""Settings that select which verdicts are measured and where they are written; no verdict depends on them."""

CODE_VARIABLES = "TRLCOMPAT_"
"""Prefix of variables that are settings of this project, and part of the code's digest."""

_IRRELEVANT = (
    *("matrix", "bisect", "doctor", "watch", "templates", "__pycache__"),
    *("boundaries.py", "header.py", "summary.py", "evidence.json"),
    *("locks", "hashes", "matrix.toml"),
    # A build makes these, so that it depends on how this project is installed whether they exist.
    *("__init__.pyi", "known.json", "index.json"),
)
"""Files and folders on which no verdict depends; for locks, the digest of packages stands in."""

_LENGTH = 12
_TEXT = re.compile(rf"(?P<code>[0-9a-f]{{{_LENGTH}}})\.(?P<packages>[0-9a-f]{{{_LENGTH}}})", re.ASCII)
_HEADER = re.compile(r"^(Name|Version): *(\S+)", re.MULTILINE)
_HEADER_LENGTH = 2048
"""Characters of a distribution's metadata that are read; name and version are in the first lines."""

WITHOUT_EFFECT = ("pytest-trlcompat", "coverage")
"""Distributions that are no part of what is measured: this project, whose code has its own digest, and the one that
``nox -s coverage`` adds for a while."""


@dataclass(frozen=True)
class Provenance:
    """What something was measured with; empty where it is not known, and then equal to nothing.

    Attributes:
        code: digest of this project's code, the suites, their data and the ``TRLCOMPAT_`` settings.
        packages: digest of the interpreter and of every distribution, name and version.
    """

    code: str = ""
    packages: str = ""

    @classmethod
    def parse(cls, text: str) -> Provenance:
        """The inverse of ``str``; any other text counts as not known."""
        match = _TEXT.fullmatch(text)
        return cls(match["code"], match["packages"]) if match else cls()

    def __str__(self) -> str:
        return f"{self.code}.{self.packages}" if self.is_known else ""

    @property
    def is_known(self) -> bool:
        return bool(self.code and self.packages)


def difference(recorded: Provenance | str, current: Provenance) -> str:
    """Why a record is not what ``current`` would measure, to be read after "it was measured"; empty where it is.

    A provenance that is not known, on either side, is never the same.
    """
    recorded = Provenance.parse(recorded) if isinstance(recorded, str) else recorded
    if not recorded.is_known or not current.is_known:
        return "with code and packages that nobody wrote down"
    parts = [
        *(["other code"] if recorded.code != current.code else []),
        *(["other packages"] if recorded.packages != current.packages else []),
    ]
    return f"with {' and '.join(parts)}" if parts else ""


def code_digest(root: Path, environ: Mapping[str, str] = os.environ) -> str:
    """A digest of the code of a checkout: this package, the suites, their data and the ``TRLCOMPAT_`` settings."""
    digest = hashlib.sha256()
    for name, value in _settings(environ):
        digest.update(f"{name}={value}".encode())
    for folder in ("pytest_trlcompat", "suites", "fixtures"):
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root)
            if path.is_file() and not set(relative.parts) & {*_IRRELEVANT}:
                with contextlib.suppress(FileNotFoundError):
                    digest.update(str(relative).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:_LENGTH]


def packages_digest(python: str, distributions: Mapping[str, str]) -> str:
    """A digest of an interpreter (``3.11``) and distributions, by their canonical names."""
    lines = [
        python,
        *(f"{name}=={distributions[name]}" for name in sorted(distributions) if name not in WITHOUT_EFFECT),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_LENGTH]


def of_this_process() -> Provenance:
    """The provenance of the running process: of the package that it has imported and the distributions on its path."""
    return _of_process(tuple(sys.path), tuple(_settings(os.environ)))


# Once for each path and settings: a suite has thousands of verdicts.
@functools.cache
def _of_process(path: tuple[str, ...], settings: tuple[tuple[str, str], ...]) -> Provenance:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    # An empty entry of the path is the current folder.
    packages = packages_digest(python, distributions_in(Path(entry or ".") for entry in path))
    return Provenance(code_digest(Path(__file__).resolve().parents[1], dict(settings)), packages)


def _settings(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The settings of this project on which a verdict may depend, sorted."""
    return sorted(
        (name, value)
        for name, value in environ.items()
        if name.startswith(CODE_VARIABLES) and name not in (*OF_THE_MACHINE, *OF_A_RUN)
    )


def of_environment(root: Path) -> str:
    """The digest of packages of a process in a virtual environment, found without starting one."""
    site_packages = sorted((root / "lib").glob("python*/site-packages"))
    python = site_packages[0].parent.name.removeprefix("python") if site_packages else ""
    return packages_digest(python, distributions_in(site_packages))


def distributions_in(folders: Iterable[Path]) -> dict[str, str]:
    """The version of every distribution in folders, by its canonical name; the first folder that has it counts.

    Metadata alone is read, no package is imported. Of a distribution that stands twice in one folder, as a broken
    upgrade leaves it, the version is ``1.0 and 1.1``; of one whose metadata cannot be read ``unreadable``.
    """
    distributions: dict[str, str] = {}
    for folder in folders:
        versions: dict[str, list[str]] = {}
        for path in _metadata_folders(folder):
            name, version = _name_and_version(path)
            versions.setdefault(name, []).append(version)
        for name, several in versions.items():
            distributions.setdefault(name, " and ".join(sorted(several)))
    return distributions


def _metadata_folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))
    except OSError:  # an entry of the path that is no folder
        return []


def _name_and_version(path: str) -> tuple[str, str]:
    fallback = _canonical(Path(path).name.rpartition(".")[0].partition("-")[0])
    file = Path(path) / ("METADATA" if path.endswith(".dist-info") else "PKG-INFO")
    try:
        # An .egg-info may be a file itself, as distutils wrote it.
        with open(path if os.path.isfile(path) else file, encoding="utf-8", errors="replace") as stream:
            header = dict(_HEADER.findall(stream.read(_HEADER_LENGTH)))
    except OSError:
        return fallback, "unreadable"
    return _canonical(header.get("Name", fallback)), header.get("Version", "unreadable")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
