"""Pages that are made when the site is built: of known issues, cures, findings, config fields and branches for NPUs.

They lie beside the pages that people write, so that links between them lead somewhere, and git ignores them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.documentation import write_made_pages

__all__ = ["make_pages", "setup"]


def make_pages(app: Sphinx) -> None:
    """Before Sphinx looks which pages there are."""
    try:
        write_made_pages(Layout(Path(app.srcdir).parent))
    except MatrixError as error:
        raise ExtensionError(f"the pages of known issues cannot be made: {error}") from error


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", make_pages)
    return {"parallel_read_safe": True}
