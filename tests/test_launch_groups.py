"""Which tests of the suites share a group, hence a process: those that judge the same launches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import FINDINGS, measured_with
from suites.conformance.row_choice import launch_of
from suites.launch_groups import group_of


def item(folder: str, name: str, issue: str = "", **values: object) -> Any:
    marker = SimpleNamespace(args=(issue,)) if issue else None
    return SimpleNamespace(
        path=Path("suites") / folder / "test_x.py",
        name=name,
        callspec=SimpleNamespace(params=values),
        get_closest_marker=lambda kind: marker if kind == "known_issue" else None,
    )


@pytest.mark.parametrize(
    ("folder", "name", "values", "group"),
    [
        ("grpo", "test_a[upstream-zero3]", {"subject": "upstream", "strategy": "zero3"}, "grpo upstream zero3"),
        ("grpo", "test_a[upstream-zero3-lora]", {"subject": "upstream", "label": "zero3-lora"}, "grpo upstream zero3"),
        ("adapters", "test_biases_under_zero3[corrected]", {"subject": "corrected"}, "adapters corrected zero3"),
        ("adapters", "test_rows_under_fsdp2_twice", {"subject": "corrected"}, "adapters corrected fsdp2"),
        ("sft", "test_rows[corrected]", {"subject": "corrected"}, "sft corrected"),
        ("sft", "test_rows", {}, "sft"),
    ],
)
def test_suites_of_a_folder_share_launches_of_a_subject_and_a_strategy(
    folder: str, name: str, values: dict[str, Any], group: str
) -> None:
    assert group_of(item(folder, name, **values)) == group


def test_what_the_conformance_suite_finds_and_the_known_issues_of_the_same_launch_are_one_group() -> None:
    groups: dict[tuple[str, int], set[str]] = {}
    for issue in known_issues.load().values():
        if issue.suite != FINDINGS:
            continue
        trainer = measured_with(issue.id)
        for label in issue.strategies:
            finding = item("conformance", "test_finding", issue.id, subject="upstream", label=label)
            search = item("conformance", "test_setting", subject="upstream", label=label, trainer=trainer)
            other = item("conformance", "test_setting", subject="corrected", label=label, trainer=trainer)
            assert group_of(finding) == group_of(search) != group_of(other)
            first = launch_of(trainer, label).rows[0].label
            groups.setdefault((trainer, hash(first)), set()).add(group_of(finding))
    assert len(groups) > 10
    assert {len(names) for names in groups.values()} == {1}
