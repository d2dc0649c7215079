"""The directives ``classes-of`` and ``fixtures-of``: docstrings read from source files, without importing them.

For what autodoc cannot import where the stack is missing (trainers derive from TRL's own classes, and not every release
has PPO), and for fixtures, which pytest wraps.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

__all__ = ["ClassesOf", "FixturesOf", "setup"]

ROOT = Path(__file__).resolve().parents[2]
Definition = ast.ClassDef | ast.FunctionDef


class _FromSource(SphinxDirective):
    required_arguments = 1  # files below the root of the project, as a pattern
    option_spec: ClassVar = {"except": str.split}  # names of files that are left out
    role = ""

    def run(self) -> list[nodes.Node]:
        left_out = self.options.get("except", [])
        files = [file for file in ROOT.glob(self.arguments[0]) if file.stem not in left_out and file.stem[0] != "_"]
        pairs = ((file, each) for file in files for each in _definitions(file) if self.is_meant(each))
        found = sorted(pairs, key=lambda pair: pair[1].name)
        if not found:
            raise self.error(f"{self.arguments[0]} holds nothing to show")
        lines: list[str] = []
        for file, definition in found:
            self.env.note_dependency(str(file))
            docstring = GoogleDocstring(inspect.cleandoc(ast.get_docstring(definition) or ""), self.config)
            lines += [f".. {self.role} {definition.name}", ""]
            lines += [*(f"   {line}" for line in str(docstring).splitlines()), ""]
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *lines, "```"]))

    def is_meant(self, definition: Definition) -> bool:
        raise NotImplementedError


class ClassesOf(_FromSource):
    """Public classes, in alphabetical order."""

    role = "py:class::"

    def is_meant(self, definition: Definition) -> bool:
        return isinstance(definition, ast.ClassDef)


class FixturesOf(_FromSource):
    """Fixtures of pytest, in alphabetical order."""

    role = "py:data::"

    def is_meant(self, definition: Definition) -> bool:
        return any("fixture" in ast.unparse(decorator) for decorator in definition.decorator_list)


def _definitions(file: Path) -> Iterator[Definition]:
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, Definition) and not statement.name.startswith("_"):
            yield statement


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("classes-of", ClassesOf)
    app.add_directive("fixtures-of", FixturesOf)
    return {"parallel_read_safe": True}
