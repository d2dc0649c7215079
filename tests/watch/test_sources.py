"""What the sources of a release say by themselves, with small ones in place of the real."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.conformance import fields
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.trainers.curing.declared_points import all_points
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.points_in_sources import defines
from pytest_trlcompat.watch.sources import keep_remarks, read_remarks, remarks

from .small_index import day

TRL = Release("trl", "1.17.0", day("2026-12-01"))


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """TRL with a config that has a field of its own, without most of what cures change, and with a branch for NPUs."""
    folder = tmp_path / "site-packages"
    trainer = folder / "trl" / "trainer"
    trainer.mkdir(parents=True)
    for path in (folder / "trl", trainer):
        (path / "__init__.py").write_text("")
    (trainer / "grpo_config.py").write_text(
        "class GRPOConfig(TrainingArguments):\n    beta: float = 0.0\n    never_heard_of: int = 3\n"
    )
    (trainer / "grpo_trainer.py").write_text(
        "class GRPOTrainer:\n    def compute_loss(self):\n        if is_npu_available():\n            return 2\n"
    )
    info = folder / "trl-1.17.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.17.0\n")
    return folder


def test_fields_points_and_branches_that_nobody_has_looked_at_are_named(site_packages: Path) -> None:
    found = remarks(TRL, site_packages)
    assert any("never_heard_of of grpo stands nowhere in fields.toml" in line for line in found)
    assert not any(" beta " in line for line in found)
    assert any(line.startswith("trl.trainer.grpo_trainer:GRPOTrainer.") and "is gone" in line for line in found)
    assert not any("GRPOTrainer.compute_loss is gone" in line for line in found)
    assert any("branch for one kind of accelerator" in line for line in found)


def test_of_another_package_nothing_of_trl_is_said(site_packages: Path) -> None:
    assert remarks(Release("datasets", "9.0", day("2026-12-01")), site_packages) == []


def test_they_outlive_the_environment(site_packages: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "x.remarks.json"
    assert read_remarks(path) == []
    keep_remarks(TRL, site_packages, path)
    assert read_remarks(path) == remarks(TRL, site_packages)
    path.write_text("{}")
    assert read_remarks(path) == []


def test_config_classes_that_are_gone_are_said(site_packages: Path) -> None:
    (site_packages / "trl" / "trainer" / "grpo_config.py").write_text("")
    assert any("its config fields cannot be read" in line for line in remarks(TRL, site_packages))


def test_a_name_counts_as_there_where_it_is_imported_or_defined_behind_a_condition(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("from q import a\nif x:\n    b = 1\nclass C:\n    def m(self): ...\n")
    there = [name for name in ("a", "b", "C.m", "C.n", "d") if defines(tmp_path, PatchPoint(f"p:{name}"))]
    assert there == ["a", "b", "C.m"]
    assert not defines(tmp_path, PatchPoint("no_module:a"))


def test_the_tables_that_are_asked_have_something() -> None:
    assert any(point.package == "trl" for _, point in all_points())
    assert "beta" in fields.load().placed("grpo")
