"""CUDA libraries of torch: what is kept for each release, and which torch is a CUDA build."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.matrix import cuda
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.cuda import CudaLibraries, is_cuda_build, kept, libraries_of, renew, strays
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
SHIPPED = read_matrix(CHECKOUT.matrix)
DAY = datetime.date(2025, 1, 29)
MATRIX = Matrix("3.11", {}, (), (), (), 3, cells=(Cell({"trl": "1"}),), torch={"2.6.0": DAY})
LIBRARIES = CudaLibraries(
    "2.6.0",
    datetime.date(2025, 2, 1),
    {"cuda-bindings": "13.5.0", "nvidia-cublas-cu12": "12.4.5.8"},
    {"torch": 766, "cuda-bindings": 8, "nvidia-cublas-cu12": 363},
)
PYLOCK = """
[[packages]]
name = "cuda-bindings"
version = "13.5.0"
wheels = [{ url = "x", size = 8 }]
[[packages]]
name = "filelock"
version = "3.0"
wheels = [{ url = "x", size = 5 }]
[[packages]]
name = "nvidia-cublas-cu12"
version = "12.4.5.8"
wheels = [{ url = "of another machine", size = 300 }, { url = "x", size = 363 }]
[[packages]]
name = "torch"
version = "2.6.0"
wheels = [{ url = "x", size = 766 }]
[[packages]]
name = "triton"
version = "3.2.0"
wheels = [{ url = "x", size = 253 }]
"""


class Index:
    """Stands for uv, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, arguments: Sequence[str], **how: Any) -> str:
        self.calls.append((list(arguments), how))
        return PYLOCK


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(cuda, "uv_network_first", index)
    return index


@pytest.mark.parametrize(
    ("text", "built_for_cuda"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '12.4'\ngit_version = 'x'\n", True),
        ("debug = False\ncuda = '11.8'\n", True),
        ("__all__ = ['debug', 'cuda', 'hip']\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", False),
        ("__all__ = ['__version__', 'cuda']\n__version__ = '2.6.0'\n", False),
        (None, False),
    ],
)
def test_a_cuda_build_is_recognised_by_its_version_file(tmp_path: Path, text: str | None, built_for_cuda: bool) -> None:
    if text is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(text)
    assert is_cuda_build(tmp_path) is built_for_cuda


def test_libraries_are_resolved_with_the_index_as_of_the_release_without_triton(index: Index, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert renew(MATRIX, "2.6.0", layout) == LIBRARIES
    ((arguments, how),) = index.calls
    assert how == {"stdin": "torch==2.6.0", "index_alone": True}
    assert "--exclude-newer 2025-02-01T00:00:00Z" in " ".join(arguments)
    assert (layout.locks / "cuda" / "torch2.6.0.txt").read_text().splitlines()[2:] == [
        "# torch: 2.6.0",
        "# date: 2025-02-01",
        "# wheel: 766 bytes",
        "cuda-bindings==13.5.0  # 8 bytes",
        "nvidia-cublas-cu12==12.4.5.8  # 363 bytes",
    ]
    assert LIBRARIES.requirements == ["cuda-bindings==13.5.0", "nvidia-cublas-cu12==12.4.5.8"]


def test_libraries_are_resolved_once_and_locked_ones_take_precedence(index: Index, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    today = libraries_of("2.6.0", "3.11", layout)
    assert libraries_of("2.6.0", "3.11", layout) == today
    assert len(index.calls) == 1
    assert today.packages == LIBRARIES.packages
    assert not kept("2.6.0", layout)
    renew(MATRIX, "2.6.0", layout)
    assert kept("2.6.0", layout)
    assert libraries_of("2.6.0", "3.11", layout) == LIBRARIES
    assert strays(MATRIX, layout) == []
    assert strays(dataclasses.replace(MATRIX, torch={}), layout) == [layout.locks / "cuda" / "torch2.6.0.txt"]


@pytest.mark.parametrize("line", ["nvidia-cublas-cu12==12.4.5.8", "--find-links=x==1  # 1 bytes", "# wheel: many"])
def test_a_damaged_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "fixtures" / "locks" / "cuda" / "torch2.6.0.txt"
    path.parent.mkdir(parents=True)
    path.write_text(f"{LIBRARIES.to_text()}{line}\n")
    with pytest.raises(
        MatrixError, match=r"torch2\.6\.0\.txt: damaged \(.+\); remove it and create it again with: nox -s lock"
    ):
        libraries_of("2.6.0", "3.11", Layout(tmp_path))


@pytest.mark.parametrize("torch", SHIPPED.torch)
def test_every_supported_torch_has_locked_libraries_that_no_cell_repeats(torch: str) -> None:
    libraries = libraries_of(torch, "3.11", CHECKOUT)
    assert kept(torch, CHECKOUT)
    assert libraries.torch == torch
    assert libraries.date == SHIPPED.torch[torch] + datetime.timedelta(days=SHIPPED.settle_days)
    assert len(libraries.packages) >= 12
    assert all(size > 0 for size in libraries.sizes.values())
    assert 2e9 < sum(libraries.sizes.values()) < 5e9
    # What is not left out by name would be resolved as of the cell's day, which may be before it came out.
    assert set(libraries.packages) <= set(cuda.LEFT_OUT)
    assert "triton" not in libraries.packages
    assert strays(SHIPPED, CHECKOUT) == []
