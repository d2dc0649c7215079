"""Where a bisect keeps its files: below the checkout, or in the cache folder of who has installed the package alone.

Imports only the standard library and the matrix.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat import __version__
from pytest_trlcompat.accelerator.build import cache_folder
from pytest_trlcompat.matrix.files import locked
from pytest_trlcompat.matrix.layout import Layout

__all__ = ["InstalledLayout", "find_layout", "state_folder"]

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class InstalledLayout(Layout):
    """Of an installed wheel: ``root`` is a copy of the package alone, since its own folder holds other packages too,
    which must not come into the environments under test."""

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
    def results(self) -> Path:
        return self.cache / "compat"


def find_layout(package: Path = _PACKAGE) -> Layout:
    """The checkout that this package is run from, else the cache folder, the package copied there."""
    if (package.parent / "pyproject.toml").is_file() and (package.parent / "suites").is_dir():
        return Layout(package.parent)
    cache = cache_folder()
    return InstalledLayout(_copied(package, cache / "projects"), cache)


def state_folder(layout: Layout) -> Path:
    """Journals and reports."""
    return layout.results.parent / "bisect"


def _copied(package: Path, below: Path) -> Path:
    metadata = sorted(package.parent.glob("pytest_trlcompat-*.dist-info"))
    files = [path for folder in (package, *metadata) for path in sorted(folder.rglob("*")) if _matters(path)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(package.parent)).encode() + b"\0" + path.read_bytes())
    target = below / f"{__version__}-{digest.hexdigest()[:12]}"
    with locked(below / f".{target.name}.lock"):
        if not target.is_dir():
            # Renamed into place, so that a copy that was cut short is not taken for a whole one.
            temporary = Path(tempfile.mkdtemp(dir=below))
            for path in files:
                copy = temporary / path.relative_to(package.parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
            temporary.chmod(0o755)
            os.replace(temporary, target)
    return target


def _matters(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts
