"""The directive ``settings-table``: the plugin's settings as a table, made from their one definition."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pytest_trlcompat.plugin.settings import SPECS

__all__ = ["SettingsTable", "setup"]

_HEAD = ("option", "environment variable", "ini value", "meaning")


class SettingsTable(SphinxDirective):
    """A row for each setting: how it is called in each place, and its help."""

    def run(self) -> list[nodes.Node]:
        lines = [_row(_HEAD), _row(("---",) * len(_HEAD))]
        for spec in SPECS:
            option = spec.option if spec.metavar is None else f"{spec.option} {spec.metavar}"
            lines.append(_row((f"`{option}`", f"`{spec.variable}`", f"`{spec.ini}`", spec.help)))
        return self.parse_text_to_nodes("\n".join(lines))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("settings-table", SettingsTable)
    return {"parallel_read_safe": True}
