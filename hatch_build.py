"""What the build of a wheel adds to the files that git tracks; ``pyproject.toml`` names it to hatchling.

A wheel gets the stub of the trainers' package, what each cure cures, the index of the catalogue, what the cells gave of
each known issue, and the reports to paste upstream. An editable installation gets the stub alone, next to the sources,
where type checkers look and git ignores it. At run time a checkout reads its sources themselves, so that nothing in it
goes stale.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling finds it by its name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """
        Args:
            version: ``standard``, or ``editable``.
            build_data: what hatchling builds from, to be extended.
        """
        root = Path(self.root)
        with _importable(root):
            if version == "editable":
                self._write_stub()
                return
            self._folder = Path(tempfile.mkdtemp(prefix="trlcompat-build-"))
            for path, text in _generated().items():
                file = self._folder / path.replace("/", "-")
                file.write_text(text, encoding="utf-8")
                build_data["force_include"][str(file)] = path

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after the wheel was written."""
        if version != "editable":
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write_stub(self) -> None:
        from pytest_trlcompat.trainers.curing import stub

        try:
            stub.write()
        except OSError as error:  # a checkout that this user may only read is of use all the same
            self.app.display_warning(f"type checkers will not know the names of pytest_trlcompat.trainers: {error}")


def _generated() -> dict[str, str]:
    """Paths in the wheel, and the texts."""
    from pytest_trlcompat.catalog import evidence, index, known_issues, reading, upstream_reports
    from pytest_trlcompat.catalog.measurements import Measurements
    from pytest_trlcompat.trainers.curing import known, stub

    issues = reading.read(known_issues.SOURCE)
    reports = {name: upstream_reports.stored_report(issues[name]) for name in upstream_reports.reported()}
    return {
        **{f"pytest_trlcompat/fixtures/upstream/{name}.md": text for name, text in reports.items()},
        "pytest_trlcompat/catalog/index.json": index.text_of(issues.values()),
        "pytest_trlcompat/catalog/measurements.json": Measurements.of(issues, evidence.published()).to_json(),
        "pytest_trlcompat/trainers/__init__.pyi": stub.stub(),
        "pytest_trlcompat/trainers/known.json": known.stored(),
    }


@contextmanager
def _importable(root: Path) -> Iterator[None]:
    """Import this project from its sources, and from nowhere else, and write no bytecode into them."""
    before, wrote_nothing = sys.path[:], sys.dont_write_bytecode
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:] = before
        sys.dont_write_bytecode = wrote_nothing
