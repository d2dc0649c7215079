"""The public names of this package and the modules that define them, read from its stub.

``__init__.pyi`` is the one list of them: type checkers and editors need it, and from it follow ``__all__`` and what the
package imports when it is asked for a name. Imports only the standard library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["MODULES", "names_of"]


def _imports(stub: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.name, node.module.rpartition(".")[2]) for alias in node.names)


MODULES: Mapping[str, str] = MappingProxyType(dict(sorted(_imports(Path(__file__).with_name("__init__.pyi")))))
"""Each public name to the module of this package that defines it."""


def names_of(module: str) -> tuple[str, ...]:
    """The public names that a module of this package defines, given by its full name or by its last part."""
    wanted = module.rpartition(".")[2]
    return tuple(name for name, defining in MODULES.items() if defining == wanted)
