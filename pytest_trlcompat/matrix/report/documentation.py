"""The pages of the site that are made when it is built, from the evidence, the catalogue and other tables.

Git ignores them. Needs ``jinja2``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_trlcompat.accelerator import decision_table, decisions_page
from pytest_trlcompat.catalog import cures_page, findings_page, known_issues
from pytest_trlcompat.conformance import fields, fields_page
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.publish import pages_of_evidence, remove_old_issues

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["made_pages", "write_made_pages"]


def made_pages(layout: Layout) -> Mapping[Path, str]:
    """Each page's path and text.

    Raises:
        MatrixError: nothing was published.
    """
    issues = known_issues.load().values()
    listed = tomllib.loads(layout.releases.read_text(encoding="utf-8"))["trl"]
    releases = {version: entry["requires"] for version, entry in listed.items()}
    docs = layout.root / "docs"
    return {
        **pages_of_evidence(layout),
        docs / "cures.md": cures_page.page(issues),
        docs / "explanation" / "findings.md": findings_page.page(issues, releases),
        docs / "npu-branches.md": decisions_page.page(decision_table.load()),
        docs / "reference" / "fields.md": fields_page.page(fields.load()),
    }


def write_made_pages(layout: Layout) -> list[Path]:
    """Write them below ``docs/``, and return the paths of those that were not there as they are now.

    Raises:
        MatrixError: as :func:`made_pages`.
    """
    pages = made_pages(layout)
    # What has not changed is not touched, so that Sphinx need not read it again.
    changed = [path for path, text in pages.items() if not path.is_file() or path.read_bytes() != text.encode()]
    for path in changed:
        write_whole(path, pages[path])
    remove_old_issues(layout, pages)
    return changed
