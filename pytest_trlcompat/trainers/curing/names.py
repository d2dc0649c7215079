"""What the modules of this package say of themselves, read from their texts: public names, and places of mixins.

Nothing of the stack is imported for it, and no list is written by hand.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["FOLDER", "MODULES", "module_named", "names_of", "paths"]

FOLDER = Path(__file__).parents[1]
"""Of the package. A folder in it is a topic, but for that of this module."""
_ENDINGS = ("Mixin", "Trainer", "Config", "Callback")
_HERE = {"CureError": "curing.errors", "cured": "curing.compose"}
"""What the package offers beside classes of these endings; other functions and errors stay in their modules."""
_EXPORTED = re.compile(r"^__all__ = (\[.*?\])", re.MULTILINE | re.DOTALL)
"""Parsing whole modules takes fifty times as long, in each process that imports this package."""


def paths() -> Iterator[tuple[str, str]]:
    """The path of each module of a topic, and its name below this package: ``fsdp.fsdp_save``."""
    yield f"{FOLDER}/corrected.py", "corrected"
    with os.scandir(FOLDER) as entries:
        topics = sorted(entry.name for entry in entries if entry.name.isidentifier() and entry.is_dir())
    for topic in topics:
        if topic != "curing":
            for name in os.listdir(f"{FOLDER}/{topic}"):
                if name.endswith(".py") and not name.startswith("__"):
                    yield f"{FOLDER}/{topic}/{name}", f"{topic}.{name[:-3]}"


def _names() -> Iterator[tuple[str, str]]:
    yield from _HERE.items()
    for path, module in paths():
        with open(path, encoding="utf-8") as file:
            match = _EXPORTED.search(file.read())
        for name in ast.literal_eval(match[1]) if match else ():
            if name.endswith(_ENDINGS):
                yield name, module


MODULES: Mapping[str, str] = MappingProxyType(dict(sorted(_names())))
"""Each public name to the module of this package that defines it, ``FSDPSaveMixin`` to ``fsdp.fsdp_save``."""


def module_named(name: str) -> str:
    """The full name of the module that the catalogue calls by its last part: ``fsdp_save``; empty for an empty name.

    Raises:
        ValueError: no module of this package that defines a public name is called so.
    """
    if not name:
        return ""
    if not (names := names_of(name)):
        raise ValueError(f"no module of pytest_trlcompat.trainers is called {name.rpartition('.')[2]}")
    return f"pytest_trlcompat.trainers.{MODULES[names[0]]}"


def names_of(module: str) -> tuple[str, ...]:
    """The public names that a module of this package defines, by the last part of its name, which no other has."""
    last_part = module.rpartition(".")[2]
    return tuple(name for name, defining in MODULES.items() if defining.rpartition(".")[2] == last_part)
