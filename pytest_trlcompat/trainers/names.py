"""The public names of this package and the modules that define them, read from the modules' ``__all__``.

Nothing of the stack is imported for it, and no list is written by hand. Imports only the standard library.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["MODULES", "names_of"]

_FOLDER = Path(__file__).parent
_ENDINGS = ("Mixin", "Trainer", "Config", "Callback")
_OTHERS = ("CureError", "cured")
"""What the package offers beside classes of these endings; other functions and errors stay in their modules."""
_EXPORTED = re.compile(r"^__all__ = (\[.*?\])", re.MULTILINE | re.DOTALL)
"""Parsing whole modules takes fifty times as long, in each process that imports this package."""


def _names() -> Iterator[tuple[str, str]]:
    for path in _FOLDER.glob("[a-z]*.py"):
        if match := _EXPORTED.search(path.read_text(encoding="utf-8")):
            for name in ast.literal_eval(match[1]):
                if name.endswith(_ENDINGS) or name in _OTHERS:
                    yield name, path.stem


MODULES: Mapping[str, str] = MappingProxyType(dict(sorted(_names())))
"""Each public name to the module of this package that defines it."""


def names_of(module: str) -> tuple[str, ...]:
    """The public names that a module of this package defines, by its full name or the last part of it."""
    last_part = module.rpartition(".")[2]
    return tuple(name for name, defining in MODULES.items() if defining == last_part)
