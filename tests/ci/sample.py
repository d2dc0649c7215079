"""The project for which the how-to shows files: ``python -m tests.ci.sample`` writes what ``init-ci`` makes of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pytest_trlcompat.ci.project import read_project
from pytest_trlcompat.ci.render import KINDS, render

__all__ = ["PAGES", "texts"]

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ci"
_ORIGIN = "git+URL-OF-THIS-REPOSITORY"
_FILES = {"requirements.txt": "trl==1.16.0\ntransformers==5.23.0\n", ".python-version": "3.11\n", "tests/test_a.py": ""}


def texts() -> dict[Path, str]:
    """Each page of the how-to, and its text."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _FILES.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        project = read_project(Path(folder))
    return {PAGES / f"{kind}.yml": render(kind, project, _ORIGIN) for kind in KINDS}


if __name__ == "__main__":
    for page, text in texts().items():
        page.write_text(text)
