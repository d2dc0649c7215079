"""A folder in which the software accelerator is built without torch and without a compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .building import FILE, MODULE, PASSED, Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(MODULE, "_python_headers", lambda: tmp_path / "python")
    monkeypatch.setattr(MODULE.self_test, "perform", lambda folder, _: (folder / FILE).write_text(PASSED))
    monkeypatch.setenv("CXX", made.compiler())
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(made.cache))
    return made
