"""What ``pytest_trlcompat.checks`` imports, and host memory: the stack is not needed for either."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_trlcompat.checks
from pytest_trlcompat.checks import memory

FOLDER = Path(pytest_trlcompat.checks.__file__).parent
MODULES = sorted(FOLDER.glob("*.py"))
ALLOWED = ("pytest_trlcompat.checks", "pytest_trlcompat.trainers", "pytest_trlcompat.training")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_imports_pytest_or_a_package_of_the_harness(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    ours = {name for name in imported if name.startswith("pytest_trlcompat")}
    assert {name for name in ours if not name.startswith(ALLOWED)} == set()
    assert not any(name.partition(".")[0] in ("pytest", "_pytest") for name in imported)


def test_importing_the_package_imports_no_stack() -> None:
    code = "import sys, pytest_trlcompat.checks as c; print('torch' in sys.modules, 'CompatCallback' in dir(c))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False True\n"


def test_an_unknown_name_is_reported() -> None:
    with pytest.raises(AttributeError, match="module 'pytest_trlcompat.checks' has no attribute 'check_nothing'"):
        pytest_trlcompat.checks.check_nothing  # noqa: B018


def test_host_memory_is_in_bytes_and_its_peak_stays() -> None:
    before = memory.read_memory()
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])  # touch every page
    during = memory.read_memory()
    del held
    after = memory.read_memory()
    assert during.host - before.host > 60 << 20
    assert after.host < during.host <= during.host_peak
    assert abs(after.host_peak - during.host_peak) < 4 << 20  # the kernel counts in batches
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert abs(after.host_peak - kibibytes * 1024) < 16 << 20
    assert set(after.as_logs()) == {
        "memory/accelerator_bytes",
        "memory/accelerator_peak_bytes",
        "memory/host_bytes",
        "memory/host_peak_bytes",
    }


def test_without_proc_the_peak_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    measured = memory.read_memory()
    assert measured.host == measured.host_peak > 5e6


def test_memory_beyond_its_limit_is_reported() -> None:
    assert memory.check_memory(host_limit=1 << 50).host > 0
    with pytest.raises(AssertionError, match=r"expected memory within its limits, but the host's peak is \d+ bytes"):
        memory.check_memory(host_limit=1)
