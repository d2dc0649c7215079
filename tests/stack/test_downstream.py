"""A project of somebody else: the README's example, run from the wheel and without the checkout."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def example() -> str:
    blocks = re.findall(r"^```python\n(# test_training\.py\n.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.mark.versions(trl=">=0.14", reason="GRPOTrainer")
def test_the_example_of_the_readme_runs_from_the_wheel(
    run_installed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    (project / "test_training.py").write_text(example())
    (project / "conftest.py").write_text(
        "import pytest_trlcompat\ndef pytest_report_header(): return f'plugin from {pytest_trlcompat.__file__}'\n"
    )
    run = run_installed("test_training.py", timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"plugin from {site}/pytest_trlcompat/__init__.py" in run.stdout
    assert "1 passed" in run.stdout
