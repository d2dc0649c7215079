"""Whether the sources of a release have a name that a cure changes; nothing of them is imported.

A name counts as there if the module, or the class in it, defines or imports it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from pytest_trlcompat.trainers.curing.patching import PatchPoint

__all__ = ["defines"]


def defines(folder: Path, point: PatchPoint) -> bool:
    """Whether the packages in ``folder`` define the name of a patch point."""
    base = folder.joinpath(*point.module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            body: list[ast.stmt] = _tree(path).body
            for part in point.where.rpartition(":")[2].split("."):
                definitions = dict(_names(body))
                if part not in definitions:
                    return False
                body = getattr(definitions[part], "body", [])
            return True
    return False


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (((alias.asname or alias.name).split(".")[0], node) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _names(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _names(handler.body)
