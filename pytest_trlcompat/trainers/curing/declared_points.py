"""All names of upstream's that cures depend on, as the cures declare them in ``_points``.

They are read from the texts of the modules, of which nothing is imported: many import the stack, which neither
``nox -s points`` nor the watch has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.names import FOLDER
from pytest_trlcompat.trainers.curing.patching import PatchPoint

__all__ = ["Names", "all_points"]


def all_points() -> Iterator[tuple[str, PatchPoint]]:
    """Each pair of a mixin, or of what mixins derive from, and a point that it declares.

    Raises:
        NameError: a declaration uses something else than patch points, and the module's own names for them.
    """
    for path in sorted(FOLDER.glob("*/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = Names(tree)
        for name, body in ((node.name, node.body) for node in tree.body if isinstance(node, ast.ClassDef)):
            for declaration in body:
                if isinstance(declaration, ast.AnnAssign) and ast.unparse(declaration.target) == "_points":
                    assert declaration.value is not None
                    yield from ((name, point) for point in names.value_of(declaration.value))


class Names(dict[str, Any]):
    """What a declaration may use; a module's own names are evaluated when one is used."""

    def __init__(self, module: ast.Module) -> None:
        super().__init__(PatchPoint=PatchPoint, patch_points=patch_points)
        self._assigned = {
            ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)
        }

    def __missing__(self, name: str) -> Any:
        return self.value_of(self._assigned[name])

    def value_of(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), "<declaration>", "eval"), {"__builtins__": {}}, self)  # noqa: S307 - our own text
