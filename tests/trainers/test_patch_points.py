"""The table of patch points names all that mixins override and change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.trainers.curing.names import MODULES

FOLDER = Path(trainers.__file__).parent
OWN = {"__init__", "__init_subclass__", "__setattr__", "_activity", "_around_generation", "_loss_is_divided"}
"""What mixins call by super() although it is not upstream's."""
BASES = {"AroundGeneration", "Cure", "ScaledBackward"}
"""What mixins derive from."""


def overriding() -> Iterator[tuple[str, str]]:
    """Each mixin with each method of its own that calls upstream's of the same name."""
    for path in sorted(FOLDER.glob("**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in patch_points.POINTS:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name not in OWN and _calls_itself(method):
                        yield node.name, method.name


def _calls_itself(method: ast.FunctionDef) -> bool:
    """Whether it mentions ``super`` and an attribute of its own name."""
    names = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return "super" in names and method.name in attributes


OVERRIDING = list(overriding())


def test_there_is_something_to_look_at() -> None:
    assert len(OVERRIDING) > 40
    assert {mixin for mixin, _ in OVERRIDING} - BASES <= set(MODULES)
    assert ("SamplingMixin", "_around_generation") not in OVERRIDING
    assert ("FSDPSaveMixin", "save_model") in OVERRIDING


@pytest.mark.parametrize(("mixin", "method"), OVERRIDING, ids=lambda value: value)
def test_what_a_mixin_overrides_is_in_the_table(mixin: str, method: str) -> None:
    assert method in {point.name for point in patch_points.of(mixin)}


def test_what_is_changed_is_in_the_table_of_the_mixin_that_changes_it() -> None:
    for mixin, module in MODULES.items():
        text = (FOLDER / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        used = {name for name in vars(patch_points) if name.isupper() and f"patch_points.{name}," in text}
        for name in used - {"POINTS"}:
            users = {each for each in MODULES if MODULES[each] == module}
            assert any(vars(patch_points)[name] in patch_points.of(user) for user in users), (mixin, name)


def test_the_table_names_mixins_that_there_are_and_all_of_them() -> None:
    mixins = {name for name in MODULES if name.endswith("Mixin")}
    assert set(patch_points.POINTS) == mixins | BASES
    assert {mixin for names in KINDS.values() for mixin in names} == mixins


def test_points_can_be_read() -> None:
    for mixin, point in patch_points.all_points():
        assert point.where.count(":") == 1, mixin
        assert point.package in ("trl", "transformers", "accelerate", "deepspeed", "liger_kernel", "peft", "torch")
        SpecifierSet(point.releases)


def test_of_ppos_modules_one_has_it_in_each_release() -> None:
    (old,) = [each for each in patch_points.POINTS["PPOFSDPMixin"] if "ppov2" in each.where and "reward" in each.where]
    assert old == patch_points.ppo("get_reward", "trl.trainer.ppov2_trainer")
    assert old.exists_in("0.11.4")
    assert not old.exists_in("0.12.0")
