"""What the modules of this package say of themselves, read from their texts: public names, and places of mixins.

Nothing of the stack is imported for it, and no list is written by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["FOLDER", "MODULES", "PLACES", "names_of", "paths"]

FOLDER = Path(__file__).parents[1]
"""Of the package. A folder in it is a topic, but for that of this module."""
_ENDINGS = ("Mixin", "Trainer", "Config", "Callback")
_HERE = {"CureError": "curing.errors", "cured": "curing.compose"}
"""What the package offers beside classes of these endings; other functions and errors stay in their modules."""
# Searching for these takes a hundredth of parsing whole modules, in each process that imports this package.
_EXPORTED = "\n__all__ = ["
_PLACES = "\n    _kinds: ClassVar = {"


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


def _exported(text: str) -> list[str]:
    """What a module exports; nothing where it has no ``__all__``."""
    start = text.find(_EXPORTED)
    return text[start : text.index("]", start + len(_EXPORTED))].split('"')[1::2] if start >= 0 else []


def _places(text: str) -> Iterator[tuple[str, str]]:
    """Each mixin of a module, and its places as they are written."""
    at = text.find(_PLACES)
    while at >= 0:
        start = text.rindex("\nclass ", 0, at) + len("\nclass ")
        yield text[start : text.index("(", start)], text[at + len(_PLACES) - 1 : text.index("}", at) + 1]
        at = text.find(_PLACES, at + 1)


_MODULES: dict[str, str] = dict(_HERE)
PLACES: dict[str, str] = {}
"""Mixin to its places in kinds of trainers, as it declares them: ``{"trainer": 360, "grpo": 500}``."""
for _path, _module in paths():
    with open(_path, encoding="utf-8") as _file:
        _text = _file.read()
    _MODULES.update((name, _module) for name in _exported(_text) if name.endswith(_ENDINGS))
    PLACES.update(_places(_text))

MODULES: Mapping[str, str] = MappingProxyType(dict(sorted(_MODULES.items())))
"""Each public name to the module of this package that defines it, ``FSDPSaveMixin`` to ``fsdp.fsdp_save``."""


def names_of(module: str) -> tuple[str, ...]:
    """The public names that a module of this package defines, by the last part of its name, which no other has."""
    last_part = module.rpartition(".")[2]
    return tuple(name for name, defining in MODULES.items() if defining.rpartition(".")[2] == last_part)
