"""Nothing that others wrote is unpickled; the rules that ruff has are in ``pyproject.toml``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    path for folder in ("pytest_trlcompat", "suites", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]


def unsafe_loads(source: str) -> Iterator[int]:
    """Lines that call ``torch.load``, or take it as it is, without ``weights_only=True`` in the same call."""
    tree = ast.parse(source)
    safe = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if words.get("weights_only") == "True":
                safe.add(node.func)
    for node in ast.walk(tree):
        taken = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load" and node not in safe
        named = isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {it.name for it in node.names}
        if taken or named:
            yield getattr(node, "lineno", 0)


def test_torch_load_takes_weights_alone() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in MODULES for line in unsafe_loads(path.read_text())]
    assert len(MODULES) > 100
    assert not found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.load(path, weights_only=True)", []),
        ("torch.load(path)", [1]),
        ("\ntorch.load(path, weights_only=False)", [2]),
        ("torch.load(path, weights_only=safe)", [1]),
        ("read = torch.load", [1]),
        ("from torch import load", [1]),
    ],
)
def test_what_counts_as_unsafe(source: str, lines: list[int]) -> None:
    assert list(unsafe_loads(source)) == lines
