"""The catalogue: the known issues of this project, or another one's."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pytest_trlcompat.catalog import index
from pytest_trlcompat.catalog.entries import SOURCE, Catalog, CatalogError, file_of, source_of

__all__ = ["SOURCE", "Catalog", "CatalogError", "file_of", "fingerprint", "load", "source_of"]


@lru_cache
def load(path: Path = SOURCE) -> Catalog:
    """The known issues of a folder, or of one file; see :func:`reading.read <pytest_trlcompat.catalog.reading.read>`.

    This project's own come from its :mod:`index <pytest_trlcompat.catalog.index>`, if what that was made from, and
    checked, is what is there.

    Raises:
        CatalogError: as that function.
    """
    if path != SOURCE:
        return _read(path)
    made_from = fingerprint()
    issues = index.packaged()
    if issues is None:
        issues = index.cached(path, made_from)
        if issues is None:
            issues = list(_read(path).values())
            index.keep(path, issues, made_from)
    catalog = Catalog({issue.id: issue for issue in issues})
    catalog.made_from = made_from
    return catalog


def _read(path: Path) -> Catalog:
    from pytest_trlcompat.catalog import reading  # pytest loads this module at every start

    return reading.read(path)


def fingerprint() -> str:
    """Changes when the catalogue does; costs no reading."""
    try:
        status = index.FILE.stat()
    except OSError:
        # A checkout has no index beside its catalogue.
        return index.stamp(SOURCE)
    return f"{status.st_size} {status.st_mtime_ns}"
