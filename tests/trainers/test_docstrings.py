"""What a cure's module says of itself agrees with the catalogue, which alone says where the cure is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.cures_page import page
from pytest_trlcompat.trainers.curing import known
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.trainers.curing.known import CuredIssue

FOLDER = Path(trainers.__file__).parent
MODULES = sorted(path for path in FOLDER.glob("**/[a-z]*.py") if path.parent.name != "curing")
RELEASE = re.compile(r"\d+\.\d+")
NO_CURE = {"corrected", "device_map"}
"""Modules that cure no entry of the catalogue by themselves."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_names_the_issues_that_it_cures(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    catalog = known_issues.load()
    named = set(re.findall(r"``([\w-]+)``", ast.get_docstring(tree) or "")) & set(catalog)
    cures = {issue.id: (issue.cure, *issue.cure_with) for issue in catalog.values()}
    assert named == {
        name for name, modules in cures.items() if path.stem in {one.rpartition(".")[2] for one in modules}
    }
    assert bool(named) != (path.stem in NO_CURE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_docstrings_leave_releases_to_the_catalogue(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    public = [node for node in classes if node.name.endswith(("Mixin", "Trainer", "Config"))]
    for text in (ast.get_docstring(tree), *(ast.get_docstring(node) for node in public)):
        assert not RELEASE.findall(text or "")


def test_what_the_mixins_say_is_what_the_catalogue_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read from the catalogue in a checkout, and from ``known.json`` where a wheel has one."""
    cured: dict[str, list[CuredIssue]] = {}
    for issue in known_issues.load().values():
        for mixin in remedies.mixins(issue):
            cured.setdefault(mixin, []).append(CuredIssue(issue.id, issue.title, issue.upstream))
    assert len(cured) > 60
    for path in (tmp_path / "missing.json", tmp_path / "known.json"):
        monkeypatch.setattr(known, "FILE", path)
        known._issues.cache_clear()
        assert {mixin: list(known.issues_of(mixin)) for mixin in cured} == cured
        assert set(known._issues()) == set(cured)
        (tmp_path / "known.json").write_text(known.stored(), encoding="utf-8")
    known._issues.cache_clear()


def test_a_training_does_not_read_the_catalogue() -> None:
    """It would take as long as a short training: which cures are at work is logged without it."""
    program = (
        "import pathlib; from pytest_trlcompat.trainers.curing import cure, known\n"
        "known._CATALOG = known.FILE = pathlib.Path('/missing')\n"
        "class AMixin(cure.Cure): ...\n"
        "AMixin.__module__ = 'pytest_trlcompat.trainers.a'\n"
        "class Trainer(AMixin): pass\n"
        "at_work = {'AMixin': cure._activity_of(AMixin, Trainer)}\n"
        "print(cure._in_words(at_work))\n"
        "try: Trainer.cures\n"
        "except FileNotFoundError as error: print('asked:', error.filename)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "none for certain; depending on what it meets: AMixin\nasked: /missing\n"


def test_the_page_has_a_row_for_each_cured_issue_in_the_sections_of_its_kinds() -> None:
    catalog = known_issues.load()
    sections = dict(re.findall(r"^## (.+)\n(?s:(.*?))(?=^## )", page(catalog.values()), re.MULTILINE))
    rows = {title: set(re.findall(r"^\| `([\w-]+)`: ", text, re.MULTILINE)) for title, text in sections.items()}
    assert list(rows) == ["Any trainer", "GRPO", "PPO", "RLOO", "Distillation", "RLOO until TRL 0.21"]
    assert set().union(*rows.values()) == {issue.id for issue in catalog.values() if issue.cure}
    assert {"fsdp-sharded-save", "deepspeed-evaluate-before-train"} <= rows["Any trainer"]
    assert not {catalog[name].trainer for name in rows["Any trainer"]} & {"grpo", "ppo"}
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
