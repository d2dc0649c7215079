"""The directive ``settings-list``: the plugin's settings, made from their one definition."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pytest_trlcompat.plugin.settings import SPECS

__all__ = ["SettingsList", "setup"]


class SettingsList(SphinxDirective):
    """For each setting its option, its meaning, and what it is called elsewhere."""

    def run(self) -> list[nodes.Node]:
        lines = []
        for spec in SPECS:
            option = spec.option if spec.metavar is None else f"{spec.option} {spec.metavar}"
            help_text = f"{spec.help[0].upper()}{spec.help[1:]}."
            lines += [f"`{option}`", f": {help_text}", f"  Environment: `{spec.variable}`, ini: `{spec.ini}`.", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("settings-list", SettingsList)
    return {"parallel_read_safe": True}
