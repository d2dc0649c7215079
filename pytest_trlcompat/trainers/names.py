"""The public names of this package and the modules that define them, read from ``__init__.pyi``; see ``stub``.

Imports only the standard library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["MODULES", "STUB", "names_of"]

STUB = Path(__file__).with_name("__init__.pyi")


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.name, node.module) for alias in node.names)


MODULES: Mapping[str, str] = MappingProxyType(dict(sorted(_imports(STUB))))
"""Each public name to the module of this package that defines it."""


def names_of(module: str) -> tuple[str, ...]:
    """The public names that a module of this package defines, by its full name or the last part of it."""
    wanted = module.rpartition(".")[2]
    return tuple(name for name, defining in MODULES.items() if defining == wanted)
