"""The directive ``held-trainings``: real projects' trainings that are held against the reference, from their tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream import axolotl, cases, llamafactory
from downstream.axolotl import cases as of_axolotl
from downstream.llamafactory import cases as of_llamafactory

__all__ = ["HeldTrainings", "setup"]

_TRAININGS = {
    "LlamaFactory, SFT": of_llamafactory.SFT_CASES,
    "LlamaFactory, DPO": of_llamafactory.DPO_CASES,
    "axolotl, SFT": of_axolotl.SFT_CASES,
    "axolotl, DPO": of_axolotl.DPO_CASES,
}


class HeldTrainings(SphinxDirective):
    """Which trainings differ, in what, and why."""

    def run(self) -> list[nodes.Node]:
        for package in (llamafactory, axolotl):
            self.env.note_dependency(str(Path(package.__path__[0]) / "cases.py"))
        return self.parse_text_to_nodes(cases.table(_TRAININGS))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("held-trainings", HeldTrainings)
    return {"parallel_read_safe": True}
