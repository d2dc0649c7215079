"""The public names of the trainers' package: what its modules export, found without a stack."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.names import MODULES, STUB, names_of
from pytest_trlcompat.trainers.stub import stub


def test_the_stub_is_made_from_what_modules_export() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "write it anew: python -m pytest_trlcompat.trainers.stub"


def test_every_name_is_defined_by_its_module() -> None:
    for name, module in MODULES.items():
        tree = ast.parse((STUB.parent / f"{module}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}, name


def test_the_names_that_people_import() -> None:
    assert MODULES["GRPOTrainer"] == "grpo"
    assert MODULES["FSDPSyncRefModelCallback"] == "fsdp_sync_ref_model"
    assert "LogitsShapeError" not in MODULES  # from its module, as before


def test_a_star_import_leaves_out_what_some_releases_of_trl_lack() -> None:
    assert set(MODULES) - set(trainers.__all__) == {"PPOConfig", "PPOTrainer"}
    assert set(MODULES) < set(dir(trainers))
    assert names_of("pytest_trlcompat.trainers.deepspeed_hooks") == ("DeepSpeedHooksMixin", "PPODeepSpeedHooksMixin")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pytest_trlcompat.trainers' has no attribute 'ORPOTrainer'"):
        # mypy knows the names as well: it would refuse an ignored error that is none.
        trainers.ORPOTrainer  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_of_the_stack() -> None:
    program = "import sys, pytest_trlcompat.trainers; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    found = ast.literal_eval(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert not {"torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "pytest", "packaging"} & set(found)
