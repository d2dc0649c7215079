"""The stub of this package, ``__init__.pyi``, made from what its modules export. A test fails where it is out of date.

    python -m pytest_trlcompat.trainers.stub  # writes it anew

Type checkers and editors find the names in it, and at run time ``names`` does, so that nobody lists them by hand.
Imports only the standard library.
"""

from __future__ import annotations

import ast
from pathlib import Path

from pytest_trlcompat.trainers.names import STUB

__all__ = ["stub"]

_ENDINGS = ("Mixin", "Trainer", "Config", "Callback")
_OTHERS = ("CureError", "cured")
"""What the package offers beside classes of these endings; other functions and errors stay in their modules."""
_HEAD = '''\
"""Made by `python -m pytest_trlcompat.trainers.stub` from what the modules export; do not edit."""

'''


def stub() -> str:
    """What ``__init__.pyi`` must be."""
    names = [(path.stem, name) for path in sorted(STUB.parent.glob("[a-z]*.py")) for name in sorted(_exported(path))]
    lines = [
        f"from .{module} import {name} as {name}\n"
        for module, name in names
        if name.endswith(_ENDINGS) or name in _OTHERS
    ]
    return f"{_HEAD}{''.join(lines)}\n__all__: list[str]\n"


def _exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found: list[str] = ast.literal_eval(node.value)
            return found
    return []


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
