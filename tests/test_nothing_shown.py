"""A run of the project's tests in which nothing was shown, and other programs of its sessions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .conftest import is_all_skipped

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_a(n):
    {before}pytest.skip("no device")
"""


ONE = SimpleNamespace(nodeid="tests/stack/test_gpu.py::test_a")
IN_A_BROWSER = SimpleNamespace(nodeid="tests/browser/test_explorer.py")


@pytest.mark.parametrize(
    ("stats", "nothing"),
    [
        ({"skipped": [ONE, ONE]}, True),
        ({"skipped": [ONE], "deselected": [ONE], "warnings": [ONE], "": [ONE]}, True),
        ({"skipped": [ONE], "passed": [ONE]}, False),
        ({"skipped": [ONE], "xfailed": [ONE]}, False),
        ({"passed": [ONE]}, False),
        ({"": [ONE]}, False),
        ({"skipped": [IN_A_BROWSER]}, False),
        ({"skipped": [IN_A_BROWSER, ONE]}, True),
    ],
)
def test_a_run_that_has_skipped_everything_has_shown_nothing(
    stats: dict[str, list[SimpleNamespace]], nothing: bool
) -> None:
    assert is_all_skipped(stats) is nothing


@pytest.mark.parametrize(("before", "status"), [("", 5), ("n == 1 or ", 0)])
def test_such_a_run_ends_as_one_that_collected_no_test(tmp_path: Path, before: str, status: int) -> None:
    (tmp_path / "test_a.py").write_text(SKIPPED.format(before=before))
    hook = "from tests.conftest import is_all_skipped, pytest_sessionfinish\n"
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{hook}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout
    assert ("of 2 tests 2 were skipped, so that nothing was shown" in done.stdout) is (status == 5)
