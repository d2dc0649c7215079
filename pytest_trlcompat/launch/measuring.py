"""Coverage of ranks, wherever the test process is measured: by pytest-cov, by ``coverage run`` or by coverage's API.

A rank measures itself as the test process does, and what it finds becomes part of the data of the test process when the
launcher is closed. Nothing is done where coverage's own ``patch = subprocess`` measures the rank already. Must not
import the stack, and imports coverage only where it is in use.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Measurement", "is_measured", "measured", "measurement", "merge"]

_OPTIONS = ("branch", "concurrency", "context", "core", "cover_pylib", "include", "omit", "relative_files", "source")
_MORE_OPTIONS = ("dynamic_context", "plugins", "source_dirs", "source_pkgs", "timid")
_QUIET = ("already-imported", "module-not-imported", "module-not-measured", "module-not-python", "no-data-collected")
"""What a rank need not warn of: it runs few of the lines that are looked for."""
_DATA = "coverage"


@dataclass(frozen=True)
class Measurement:
    """How ranks measure themselves.

    Attributes:
        folder: where their data goes, a file for each rank of each launch.
        base: the folder that relative paths in the options start from.
        config_file: of coverage; ``False`` for none.
    """

    folder: str
    base: str
    config_file: str | bool
    options: tuple[tuple[str, Any], ...]


def is_measured() -> bool:
    """Whether the lines that this process runs are counted."""
    return _current() is not None


def measurement(folder: Path) -> Measurement | None:
    """As this process is measured; ``None`` where it is not.

    Args:
        folder: where the ranks' data goes; made where it is missing.
    """
    current = _current()
    if current is None:
        return None
    from coverage.files import relative_directory

    options = []
    for name in (*_OPTIONS, *_MORE_OPTIONS):
        with contextlib.suppress(Exception):  # this release of coverage has no such option
            options.append((f"run:{name}", current.get_option(f"run:{name}")))
    folder.mkdir(exist_ok=True)
    return Measurement(str(folder), relative_directory(), current.config.config_file or False, tuple(options))


@contextlib.contextmanager
def measured(how: Measurement | None) -> Iterator[None]:
    """Measure this process, a rank, as long as the block lasts."""
    # Where coverage's patch = subprocess is on, this process measures itself already.
    if how is None or _current() is not None:
        yield
        return
    import coverage

    # coverage takes the folder of relative paths from the working directory, when it is built and started.
    here = os.getcwd()
    os.chdir(how.base)
    try:
        measuring = coverage.Coverage(
            data_file=os.path.join(how.folder, f"{_DATA}.{uuid.uuid4().hex}"), config_file=how.config_file
        )
        for name, value in how.options:
            measuring.set_option(name, value)
        measuring.set_option("run:disable_warnings", list(_QUIET))
        measuring.start()
    finally:
        os.chdir(here)
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


def merge(folder: Path) -> None:
    """Add what ranks have measured to the data of this process."""
    files = sorted(folder.glob(f"{_DATA}.*"))
    current = _current()
    if current is None or not files:
        return
    import coverage

    data = current.get_data()
    for file in files:
        measured = coverage.CoverageData(basename=str(file))
        measured.read()
        data.update(measured)


def _current() -> Any:
    """The coverage that measures this process; ``None`` where none does."""
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()
