"""The catalogue as a whole: known issues by id, and where each is written down."""

from __future__ import annotations

from pathlib import Path

from pytest_trlcompat._issue_ids import folder_of
from pytest_trlcompat.catalog.issue import KnownIssue

__all__ = ["SOURCE", "Catalog", "CatalogError", "file_of", "source_of"]

SOURCE = Path(__file__).with_name("issues")
"""The folder where they are written down."""


class CatalogError(ValueError):
    """The catalogue, or a question to it, makes no sense."""


class Catalog(dict[str, KnownIssue]):
    """Known issues by id.

    Attributes:
        made_from: of this project's own what changes with its files; else empty.
    """

    made_from = ""

    def get_issue(self, issue_id: str) -> KnownIssue:
        """
        Raises:
            CatalogError: an unknown id, with the known ones.
        """
        try:
            return self[issue_id]
        except KeyError:
            raise CatalogError(f"unknown issue {issue_id!r}; known are {', '.join(sorted(self))}") from None


def file_of(issue_id: str, folder: Path = SOURCE) -> Path:
    """Where an issue is, or would be, written down."""
    return folder / folder_of(issue_id) / f"{issue_id}.toml"


def source_of(issue_id: str) -> str:
    """:func:`file_of`, as a path from the root of a checkout."""
    return file_of(issue_id, Path(*SOURCE.parts[-3:])).as_posix()
