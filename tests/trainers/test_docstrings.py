"""What a cure's module says of itself agrees with the catalogue, which alone says where the cure is needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.cures_page import known, page
from pytest_trlcompat.trainers.kinds import KINDS
from pytest_trlcompat.trainers.known import FILE

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for path in Path(trainers.__file__).parent.glob("[a-z]*.py"))
RELEASE = re.compile(r"\d+\.\d+")
NO_CURE = {
    "command",
    "compose",
    "device_map",
    "distillation",
    "errors",
    "dpo",
    "grpo",
    "kinds",
    "known",
    "names",
    "patch_points",
    "points_in_sources",
    "reward",
    "kto",
    "rloo",
    "sft",
    "stub",
}
"""Modules that cure no entry of the catalogue by themselves."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_names_the_issues_that_it_cures(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = known_issues.load()
    named = set(re.findall(r"``([\w-]+)``", ast.get_docstring(tree) or "")) & set(known)
    name = f"pytest_trlcompat.trainers.{path.stem}"
    assert named == {issue.id for issue in known.values() if name in (issue.cure, *issue.cure_with)}
    assert bool(named) != (path.stem in NO_CURE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_docstrings_leave_releases_to_the_catalogue(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    public = [node for node in classes if node.name.endswith(("Mixin", "Trainer", "Config"))]
    for text in (ast.get_docstring(tree), *(ast.get_docstring(node) for node in public)):
        assert not RELEASE.findall(text or "")


def test_the_page_of_cures_is_made_from_the_catalogue() -> None:
    assert (ROOT / "docs" / "cures.md").read_text(encoding="utf-8") == page(known_issues.load().values()), (
        "write it anew: python -m pytest_trlcompat.catalog.cures_page docs/cures.md"
    )


def test_what_the_mixins_say_is_made_from_the_catalogue() -> None:
    assert FILE.read_text(encoding="utf-8") == known(known_issues.load().values()), (
        "write it anew: python -m pytest_trlcompat.catalog.cures_page docs/cures.md"
    )


def test_the_page_has_a_row_for_each_cured_issue_in_the_sections_of_its_kinds() -> None:
    known = known_issues.load()
    sections = dict(re.findall(r"^## (.+)\n(?s:(.*?))(?=^## )", page(known.values()), re.MULTILINE))
    rows = {title: set(re.findall(r"^\| `([\w-]+)`: ", text, re.MULTILINE)) for title, text in sections.items()}
    assert list(rows) == ["Any trainer", "GRPO", "PPO", "RLOO", "Distillation", "RLOO until TRL 0.21"]
    assert set().union(*rows.values()) == {issue.id for issue in known.values() if issue.cure}
    assert {"fsdp-sharded-save", "deepspeed-evaluate-before-train"} <= rows["Any trainer"]
    assert not {known[name].trainer for name in rows["Any trainer"]} & {"grpo", "ppo"}
    assert not rows["Any trainer"] & (rows["GRPO"] | rows["RLOO"] | rows["RLOO until TRL 0.21"])
    assert "deepspeed-hook-registration" in rows["GRPO"] & rows["PPO"]
    assert rows["Any trainer"] & rows["PPO"] == {
        "deepspeed-empty-param-group",
        "lora-zero3-whole-modules",
        "transformers-decayed-norms",
    }
    for title, kind in (
        ("Any trainer", "trainer"),
        ("GRPO", "grpo"),
        ("PPO", "ppo"),
        ("RLOO", "rloo"),
        ("Distillation", "distillation"),
        ("RLOO until TRL 0.21", "first_rloo"),
    ):
        named = set(re.findall(r"`(\w+Mixin)`", sections[title]))
        assert named
        assert named <= set(KINDS[kind])
