"""The public names of the trainers' package: what its modules export, found without a stack."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.curing.names import MODULES, names_of, paths
from pytest_trlcompat.trainers.curing.stub import stub, write

FOLDER = Path(trainers.__file__).parent


def test_the_names_are_those_that_modules_export() -> None:
    """As the modules' syntax trees have them, which takes too long when a training begins."""
    exported = {}
    for path in FOLDER.glob("**/[a-z]*.py"):
        module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exported.update(dict.fromkeys(ast.literal_eval(node.value), module))
    offered = ("Mixin", "Trainer", "Config", "Callback", "CureError", "cured")
    assert dict(MODULES) == {name: module for name, module in exported.items() if name.endswith(offered)}
    assert len(MODULES) > 80


def test_the_stub_imports_every_name_from_its_module() -> None:
    head, *imports, blank, last = stub().splitlines()
    assert head.startswith('"""Made by `python -m pytest_trlcompat.trainers.curing.stub`')
    nodes = [node for line in imports for node in ast.parse(line).body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in nodes for alias in node.names} == dict(MODULES)
    assert all(alias.asname == alias.name for node in nodes for alias in node.names)  # by which it is exported again
    assert (blank, last) == ("", "__all__: list[str]")


def test_a_stub_is_written_whole_and_only_where_it_differs(tmp_path: Path) -> None:
    path = tmp_path / "__init__.pyi"
    path.write_text("of another day")
    write(path)
    assert path.read_text(encoding="utf-8") == stub()
    os.utime(path, ns=(1, 1))
    write(path)
    assert path.stat().st_mtime_ns == 1
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_every_name_is_defined_by_its_module() -> None:
    for name, module in MODULES.items():
        tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}, name


def test_the_names_that_people_import() -> None:
    assert MODULES["GRPOTrainer"] == "corrected"
    assert MODULES["FSDPSyncRefModelCallback"] == "fsdp.fsdp_sync_ref_model"
    assert "LogitsShapeError" not in MODULES  # from its module, as before


def test_a_star_import_leaves_out_what_some_releases_of_trl_lack() -> None:
    assert set(MODULES) - set(trainers.__all__) == {"PPOConfig", "PPOTrainer"}
    assert set(MODULES) < set(dir(trainers))
    assert names_of("deepspeed_hooks") == (
        "DeepSpeedHooksMixin",
        "PPODeepSpeedHooksMixin",
    )


def test_no_two_modules_have_the_same_last_part_of_their_names() -> None:
    last_parts = [module.rpartition(".")[2] for _, module in paths()]
    assert sorted(set(last_parts)) == sorted(last_parts)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pytest_trlcompat.trainers' has no attribute 'ORPOTrainer'"):
        # mypy knows the names as well: it would refuse an ignored error that is none.
        trainers.ORPOTrainer  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_of_the_stack() -> None:
    program = "import sys, pytest_trlcompat.trainers; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    found = ast.literal_eval(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert not {"torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "pytest", "packaging"} & set(found)
