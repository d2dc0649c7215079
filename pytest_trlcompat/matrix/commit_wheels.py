"""Wheels of commits, which no package index has: built once from a commit's files, installed together with releases.

In a lock such a package has the version that its sources state and, as the local part, the commit:
``trl==1.17.0.dev0+g0123456789``. Its wheel lies in a folder of that commit. Building runs code of the package's own.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import parse_email
from packaging.utils import canonicalize_name
from packaging.version import Version

from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.files import locked
from pytest_trlcompat.matrix.hashes import RELEASE
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.uv import uv_network_first

__all__ = ["COMMIT", "CommitWheel", "build", "drop_others", "wheel_of"]

_DIGITS = 10
_UNFINISHED = "unfinished-"
COMMIT = re.compile(rf"(?:{RELEASE.pattern})\+g[0-9a-f]{{{_DIGITS}}}")
"""How locks write a commit of a package."""


@dataclass(frozen=True)
class CommitWheel:
    """A package as one of its commits has it.

    Attributes:
        public: the version that its sources state, without a local part: ``1.17.0.dev0``.
        version: the same with the commit, as locks have it.
        requires: what it requires, as in its metadata, extras included.
    """

    path: Path
    package: str
    public: str
    version: str
    requires: tuple[str, ...]


def build(
    package: str, sha: str, files: Callable[[], AbstractContextManager[Path]], python: str, layout: Layout
) -> CommitWheel:
    """The wheel of a commit, built in an environment of its own unless it was built before.

    Args:
        files: the commit's files, asked for where they are needed.
        python: as uv understands it.

    Raises:
        Untestable: when it cannot be built, with the reason, or is not of this package.
    """
    folder = _folder(package, sha[:_DIGITS], layout)
    # Another command may be building the same commit.
    with locked(folder.with_suffix(".lock"), lambda: None):
        if _wheel_in(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=layout.commits, prefix=_UNFINISHED) as unfinished, files() as sources:
                whole = Path(unfinished, "wheel")
                uv_network_first(["build", "--wheel", "--python", python, "--out-dir", str(whole), str(sources)])
                # Moved when it is complete, within one file system: a folder of this name never holds half a build.
                whole.rename(folder)
    path = _wheel_in(folder)
    if path is None:
        raise Untestable(f"building {package} {sha[:_DIGITS]} left no wheel")
    return _read(path, package, sha)


def wheel_of(requirement: str, layout: Layout) -> Path:
    """The wheel of a commit that a lock names.

    Raises:
        Untestable: it is not there any more.
    """
    name, _, version = requirement.partition("==")
    path = _wheel_in(_folder(name, version.partition("+g")[2], layout))
    if path is None:
        raise Untestable(f"{requirement}: the wheel of this commit is gone; the command that asked for it builds it")
    return path


def drop_others(used: Iterable[CommitWheel], layout: Layout) -> None:
    """Remove the wheels of all other commits."""
    used_folders: Collection[Path] = {wheel.path.parent for wheel in used}  # also what a killed build has left
    for folder in layout.commits.glob("*"):
        if folder.is_dir() and folder not in used_folders:
            shutil.rmtree(folder)


def _folder(package: str, digits: str, layout: Layout) -> Path:
    return layout.commits / f"{package}-{digits}"


def _wheel_in(folder: Path) -> Path | None:
    return next(folder.glob("*.whl"), None)


def _read(path: Path, package: str, sha: str) -> CommitWheel:
    with zipfile.ZipFile(path) as archive:
        # A wheel has one folder of metadata (PEP 427).
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        raw, _ = parse_email(archive.read(name))
    if canonicalize_name(raw.get("name", "")) != package:
        raise Untestable(f"commit {sha[:_DIGITS]} is one of {raw.get('name')}, not of {package}")
    # A version has one local part, which is the commit's here; the sources may state another.
    public = Version(raw["version"]).public
    version = f"{public}+g{sha[:_DIGITS]}"
    return CommitWheel(path, package, public, version, tuple(raw.get("requires_dist", ())))
