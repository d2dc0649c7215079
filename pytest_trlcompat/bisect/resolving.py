"""Locks beside the matrix's own: of exact versions, and as near to another lock as can be.

Imports only the standard library and the matrix.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pytest_trlcompat.bisect.place import Place
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.environments import ensure
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, compile_versions
from pytest_trlcompat.stack import PACKAGES

__all__ = ["environment_place", "exactly", "near"]


def exactly(matrix: Matrix, label: str, versions: Mapping[str, str], date: datetime.date) -> Lock:
    """A lock of exactly these versions, and whatever they need beside them as of ``date``.

    Raises:
        Untestable: when they do not go together; the text is the resolver's reason.
    """
    requirements = [f"{name}=={version}" for name, version in sorted(versions.items())]
    return Lock(label, date, matrix.python, compile_versions(matrix, requirements, date), "bisect")


def near(matrix: Matrix, label: str, pins: Mapping[str, str], base: Lock) -> Lock:
    """``base`` with the versions of ``pins``; the stack's other packages are held, further ones move only if they must.

    Raises:
        Untestable: when they do not go together; the text is the resolver's reason.
    """
    held = {name: version for name, version in base.packages.items() if name in PACKAGES}
    requirements = [f"{name}=={version}" for name, version in sorted({**held, **pins}.items())]
    preferred = [f"{name}=={version}" for name, version in base.packages.items() if name not in pins]
    versions = compile_versions(matrix, [*requirements, *matrix.harness], base.date, preferred)
    return Lock(label, base.date, matrix.python, versions, "bisect")


@contextlib.contextmanager
def environment_place(lock: Lock, layout: Layout, folder: Path, say: Callable[[str], None]) -> Iterator[Place]:
    """A lock's environment, shared with the matrix; it stays when the candidate is done."""
    environment = ensure(lock, layout, say)
    with environment.used():
        yield Place(environment, folder)
