"""The stub of this package, ``__init__.pyi``, by which type checkers and editors know the names that modules export.

Git has no copy of it. The build writes it into a wheel, and for an editable installation next to ``__init__.py``;
``nox -s lint`` writes it there too, and so does::

    python -m pytest_trlcompat.trainers.curing.stub

Nothing reads it at run time.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pytest_trlcompat.trainers.curing.names import FOLDER, MODULES

__all__ = ["STUB", "stub", "write"]

STUB = FOLDER / "__init__.pyi"
_HEAD = '''\
"""Made by `python -m pytest_trlcompat.trainers.curing.stub` from what the modules export; do not edit."""

'''


def stub() -> str:
    """The contents of ``__init__.pyi``."""
    in_order = sorted(MODULES.items(), key=lambda item: (item[1], item[0]))
    lines = [f"from .{module} import {name} as {name}\n" for name, module in in_order]
    return f"{_HEAD}{''.join(lines)}\n__all__: list[str]\n"


def write(path: Path = STUB) -> None:
    """Write it if it has changed, in one piece, since several environments may be made at once."""
    text = stub()
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    # Elsewhere a file that comes and goes would be part of the code's digest, where a sweep begins at that moment.
    scratch = path.parent / "__pycache__"
    scratch.mkdir(exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=scratch)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    # mkstemp makes files that only their owner can read.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


if __name__ == "__main__":
    write()
