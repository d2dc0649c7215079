"""There is no import circle, and packages import only from layers below, as their sources show."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pytest_trlcompat"
STANDIN = ROOT / PACKAGE / "accelerator" / "standin"

LAYERS = (
    {"__main__"},
    {"cli"},
    {"watch"},
    {"bisect", "plugin"},
    {"equivalence"},
    {"checks", "ci", "doctor", "matrix"},
    {"catalog"},
    {"conformance"},
    {"launch"},
    {"accelerator", "inference"},
    {"reference", "tiny", "trainers", "_cache", "_cleaner", "_location"},
    {
        "__init__",
        "_data",
        "_devices",
        "_due",
        "_escaping",
        "_issue_ids",
        "_json_files",
        "_processes",
        "_provenance",
        "_secrets",
    }
    | {"_trust", "stack", "strategies", "training"},
)
"""The packages, and the modules that they share, from the top down: none imports another of its own layer."""

OTHER_PACKAGES = {
    "accelerator": {"packaging"},
    "bisect": {"packaging"},
    "catalog": {"packaging"},
    "ci": {"packaging"},
    "doctor": {"packaging"},
    "inference": {"packaging"},
    "inference.torchvision_watch": set[str](),
    "launch": set[str](),
    "launch.payload": {"cloudpickle"},
    "launch.rank": {"cloudpickle"},
    "launch.unpicklable": {"cloudpickle"},
    "matrix": {"packaging"},
    "matrix.covering": {"packaging"},
    "matrix.covering.array": {"covertable"},
    "matrix.covering.registry": {"packaging", "pypi_simple", "remotezip", "requests"},
    "matrix.engines.cluster": {"ray"},
    "matrix.engines.ray_streams": {"ray"},
    "matrix.engines.ray_tasks": {"ray"},
    "matrix.report.explorer": {"markupsafe"},
    "matrix.report.pages": {"jinja2"},
    "matrix.report.terminal": {"rich"},
    "plugin": {"pytest"},
    "tiny": set[str](),
    "watch": {"packaging"},
    "watch.index": {"packaging"},
}
"""What these packages and modules may import from others when they are imported. Functions may import more."""

Imports = dict[str, set[str]]


def read_imports(root: Path, package: str, compiled: Sequence[str] = ()) -> Imports:
    """What each module of a package below ``root`` imports from it: at the top, in functions, and only for types."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if "standin" not in parts:  # another package
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(_imports(name, path, {*modules, *compiled})) for name, path in modules.items()}


def _imports(name: str, path: Path, modules: Set[str]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for named in _named(ast.parse(path.read_text(encoding="utf-8")), package):
        target = named
        while target and target not in modules:  # a function or a class of the module
            target = target.rpartition(".")[0]
        if target and target != name:
            yield target
        # This also imports its parent packages; those of the importing module are imported already.
        while (target := target.rpartition(".")[0]) and not f"{name}.".startswith(f"{target}."):
            yield target


def _named(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circle(imports: Imports) -> str | None:
    """``a -> b -> a``, or ``None``."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def package_of(module: str) -> str:
    """The package that a module belongs to; a module at the top counts as a package."""
    return module.split(".")[1] if "." in module else "__init__"


def between_packages(imports: Imports) -> set[tuple[str, str]]:
    """Every import from one package to another."""
    return {(one, other) for one, others in imports.items() for other in others if package_of(one) != package_of(other)}


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_imports(ROOT, PACKAGE)


def test_no_import_circle(imports: Imports) -> None:
    found = circle(imports)
    assert found is None, f"an import circle: {found}"


def test_no_import_circle_in_the_standin() -> None:
    found = circle(read_imports(STANDIN, "torch_npu", ["torch_npu._C"]))
    assert found is None, f"an import circle: {found}"


def test_every_package_has_a_layer(imports: Imports) -> None:
    packages = {package_of(module) for module in imports}
    assert packages == {name for layer in LAYERS for name in layer}


def test_packages_import_only_from_layers_below(imports: Imports) -> None:
    height = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    upwards = [
        f"{one} -> {other}"
        for one, other in between_packages(imports)
        if height[package_of(one)] >= height[package_of(other)]
    ]
    assert not sorted(upwards)


def test_trainers_checks_and_the_reference_import_no_package_of_the_harness(imports: Imports) -> None:
    """So that users can train with them."""
    crossing = {(package_of(one), package_of(other)) for one, other in between_packages(imports)}
    alone = ("checks", "reference", "trainers", "training")
    found = {(one, other) for one, other in crossing if one in alone}
    training = {("checks", "training"), ("trainers", "training")}
    assert found == {("checks", "trainers"), *training, ("trainers", "_issue_ids")}, (
        "the last is a module of names alone, and the vocabulary of trainings imports the standard library alone"
    )


def test_the_reference_imports_nothing_of_the_stack_but_torch() -> None:
    """It is independent of the trainers that are held against it."""
    named = {
        name.partition(".")[0]
        for path in (ROOT / PACKAGE / "reference").glob("*.py")
        for name in _named(ast.parse(path.read_text(encoding="utf-8")), f"{PACKAGE}.reference")
    }
    assert named - set(sys.stdlib_module_names) == {PACKAGE, "torch"}


def _named_on_import(body: Sequence[ast.stmt]) -> Iterator[str]:
    """What statements import as they run: neither inside functions nor for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _named_on_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for blocks in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
                yield from _named_on_import(blocks)
            for handler in getattr(node, "handlers", []):
                yield from _named_on_import(handler.body)


@pytest.mark.parametrize("room", sorted({name.partition(".")[0] for name in OTHER_PACKAGES}))
def test_packages_of_others_are_imported_only_where_they_are_there(room: str) -> None:
    """The stack is not installed where nox and the test process run, nor ``ray``, ``rich`` and ``jinja2`` in cells."""
    known = {*sys.stdlib_module_names, "tomllib", "tomli", PACKAGE}
    unexpected = []
    for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        if "standin" in parts or parts[:3] == ("inference", "recording_engine", "vllm"):  # other packages
            continue
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        allowed = next(OTHER_PACKAGES[prefix] for prefix in prefixes if prefix in OTHER_PACKAGES)
        named = {name.partition(".")[0] for name in _named_on_import(ast.parse(path.read_text(encoding="utf-8")).body)}
        unexpected += [f"{'.'.join(parts)} imports {name}" for name in sorted(named - known - allowed)]
    assert not unexpected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "import p.b", "b": "from p import c", "c": "from p.d import name"}, ()),
        ({"r/__init__": "from p.r.a import name", "r/a": "from p.r import b", "r/b": ""}, ()),
        ({"a": "from p import b", "b": "def f():\n    from p.a import name"}, ("p.a", "p.b")),
        ({"a": "from .b import name", "b": "from . import a"}, ("p.a", "p.b")),
        ({"a": "from p.r.b import name", "r/__init__": "from p.a import name", "r/b": ""}, ("p.a", "p.r")),
        ({"r/__init__": "from p.r.a import name", "r/a": "from p.r import other"}, ("p.r", "p.r.a")),
    ],
)
def test_circles_are_found_wherever_the_import_is(
    tmp_path: Path, files: dict[str, str], expected: tuple[str, ...]
) -> None:
    for name, text in {"__init__": "", "d": "", **files}.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = circle(read_imports(tmp_path, "p"))
    first, second = expected or ("", "")
    assert found in ((f"{first} -> {second} -> {first}", f"{second} -> {first} -> {second}") if expected else (None,))
