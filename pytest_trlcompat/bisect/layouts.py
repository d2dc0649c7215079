"""Where a bisect keeps its files: below the checkout, or in the user's cache folder if there is no checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat import __version__
from pytest_trlcompat._trust import UntrustedError, check_folder, make_folder
from pytest_trlcompat.accelerator.build import cache_folder
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.files import locked
from pytest_trlcompat.matrix.layout import Layout

__all__ = ["InstalledLayout", "find_layout", "state_folder"]

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class InstalledLayout(Layout):
    """The files of an installed wheel. ``root`` is a copy of the package alone: site-packages holds other packages as
    well, which must not get into the environments under test."""

    cache: Path

    @property
    def matrix(self) -> Path:
        return self.root / "pytest_trlcompat" / "fixtures" / "matrix.toml"

    @property
    def locks(self) -> Path:
        return self.root / "pytest_trlcompat" / "fixtures" / "locks"

    @property
    def suites(self) -> Path:
        return self.root / "pytest_trlcompat" / "suites"

    @property
    def environments(self) -> Path:
        return self.cache / "envs"

    @property
    def editable(self) -> bool:
        return False  # the copy has the package's metadata with it

    @property
    def results(self) -> Path:
        return self.cache / "compat"


def find_layout(package: Path = _PACKAGE) -> Layout:
    """The checkout that this package belongs to, otherwise the cache folder, with a copy of the package.

    Raises:
        BisectError: when another user could change what is in the cache folder.
    """
    if (package.parent / "pyproject.toml").is_file() and (package.parent / "suites").is_dir():
        return Layout(package.parent)
    cache = cache_folder()
    return InstalledLayout(_copy_package(package, cache / "projects"), cache)


def state_folder(layout: Layout) -> Path:
    """Journals and reports."""
    return layout.bisections


def _copy_package(package: Path, below: Path) -> Path:
    metadata = sorted(package.parent.glob("pytest_trlcompat-*.dist-info"))
    files = [path for folder in (package, *metadata) for path in sorted(folder.rglob("*")) if _is_needed(path)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(package.parent)).encode() + b"\0" + path.read_bytes())
    target = below / f"{__version__}-{digest.hexdigest()[:12]}"
    try:
        make_folder(below)
        if target.is_dir():
            check_folder(target)
    except UntrustedError as error:
        raise BisectError(
            f"{error}, so another user could change what is run from {target}; let TRLCOMPAT_CACHE name a folder that, "
            "with all above it, only you and root can write to"
        ) from error
    with locked(below / f".{target.name}.lock"):
        if not target.is_dir():
            # Renamed at the end, so that an interrupted copy is never mistaken for a complete one.
            temporary = Path(tempfile.mkdtemp(dir=below))
            for path in files:
                copy = temporary / path.relative_to(package.parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
            temporary.chmod(0o755)
            os.replace(temporary, target)
    return target


def _is_needed(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts
