"""What the modules of this package say of themselves, read from their texts: public names, and places of mixins.

Nothing of the stack is imported for it, and no list is written by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["FOLDER", "MODULES", "NEEDS", "PLACES", "names_of", "paths"]

FOLDER = Path(__file__).parents[1]
"""Of the package. A folder in it is a topic, but for that of this module."""
_ENDINGS = ("Mixin", "Trainer", "Config", "Callback")
_HERE = {"CureError": "curing.errors", "cured": "curing.compose"}
"""What the package offers beside classes of these endings; other functions and errors stay in their modules."""
# Searching for these takes a hundredth of parsing whole modules, in each process that imports this package.
_EXPORTED = "\n__all__ = ["
_PLACES = "\n    _kinds: ClassVar = {"
_NEEDS = "\n    _stands_before: ClassVar = {"


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


def _declared(text: str, declaration: str) -> Iterator[tuple[str, str]]:
    """Each class of a module with this declaration, and the dictionary as it is written, which has no braces inside."""
    at = text.find(declaration)
    while at >= 0:
        start = text.rindex("\nclass ", 0, at) + len("\nclass ")
        yield text[start : text.index("(", start)], text[at + len(declaration) - 1 : text.index("}", at) + 1]
        at = text.find(declaration, at + 1)


_MODULES: dict[str, str] = dict(_HERE)
PLACES: dict[str, str] = {}
"""Mixin to its places in kinds of trainers, as it declares them: ``{"grpo": ("SamplingMixin", "the reason")}``."""
NEEDS: dict[str, str] = {}
"""Mixin to those that must stand behind it, as it declares them: ``{"LogitsToKeepMixin": "the reason"}``."""
for _path, _module in paths():
    with open(_path, encoding="utf-8") as _file:
        _text = _file.read()
    _MODULES.update((name, _module) for name in _exported(_text) if name.endswith(_ENDINGS))
    PLACES.update(_declared(_text, _PLACES))
    NEEDS.update(_declared(_text, _NEEDS))

MODULES: Mapping[str, str] = MappingProxyType(dict(sorted(_MODULES.items())))
"""Each public name to the module of this package that defines it, ``FSDPSaveMixin`` to ``fsdp.fsdp_save``."""


def names_of(module: str) -> tuple[str, ...]:
    """The public names that a module of this package defines, by the last part of its name, which no other has."""
    last_part = module.rpartition(".")[2]
    return tuple(name for name, defining in MODULES.items() if defining.rpartition(".")[2] == last_part)
