"""The directive ``faults-table``: what happens when something goes wrong, read from the tests that hold it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import faults

__all__ = ["FaultsTable", "setup"]


class FaultsTable(SphinxDirective):
    """A table for each area, with the test of each fault."""

    def run(self) -> list[nodes.Node]:
        found = faults.read()
        for fault in found:
            self.env.note_dependency(str(faults.TESTS / fault.test.partition("::")[0]))
        return self.parse_text_to_nodes(faults.table(found), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("faults-table", FaultsTable)
    return {"parallel_read_safe": True}
