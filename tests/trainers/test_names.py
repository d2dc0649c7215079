"""The public names of the trainers' package: listed once, and found at run time. No stack is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.names import MODULES, names_of

FOLDER = Path(trainers.__file__).parent


def test_every_name_is_defined_and_exported_by_its_module() -> None:
    for name, module in MODULES.items():
        tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, name
        assert name in _exported(tree), name


def test_every_mixin_and_trainer_is_listed() -> None:
    exported = {
        name
        for path in FOLDER.glob("[a-z]*.py")
        for name in _exported(ast.parse(path.read_text(encoding="utf-8")))
        if name[0].isupper() and name.endswith(("Mixin", "Trainer", "Config", "Callback"))
    }
    assert exported == set(MODULES)


def _exported(tree: ast.Module) -> set[str]:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    values = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return {name for value in values if isinstance(value, ast.List) for name in ast.literal_eval(value)}


def test_a_star_import_leaves_out_what_some_releases_of_trl_lack() -> None:
    assert set(MODULES) - set(trainers.__all__) == {"PPOConfig", "PPOTrainer"}
    assert set(MODULES) < set(dir(trainers))
    assert names_of("pytest_trlcompat.trainers.deepspeed_hooks") == ("DeepSpeedHooksMixin", "PPODeepSpeedHooksMixin")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pytest_trlcompat.trainers' has no attribute 'DPOTrainer'"):
        # mypy knows the names as well: it would refuse an ignored error that is none.
        trainers.DPOTrainer  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_of_the_stack() -> None:
    program = "import sys, pytest_trlcompat.trainers; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    found = ast.literal_eval(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert not {"torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "pytest", "packaging"} & set(found)
