"""Which rows of the conformance suites a sweep of the default cells tries, and which share a launch."""

from __future__ import annotations

import json

import pytest

from pytest_trlcompat.conformance import rows
from suites.conformance.row_choice import SHOWN, covering, launch_of

TRAINERS = rows.TRAINERS


def values(row: rows.Row) -> set[tuple[str, str]]:
    return {(name, json.dumps(value)) for name, value in row.setting.items()}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_value_of_a_setting_that_is_not_refused_is_tried(trainer: str) -> None:
    alone = [row for row in rows.load(trainer).values() if row.strategy == "single" and not row.added]
    tried = [row for row in alone if (trainer, row.label) in SHOWN or row.label in covering(trainer)]
    assert set().union(*map(values, tried)) >= {
        one for row in alone if "refused" not in row.setting and not row.is_of_array for one in values(row)
    }
    assert all(row in tried for row in alone if "refused" in row.setting)
    assert "single-default" in {row.label for row in tried}


def test_a_value_of_a_refused_row_is_tried_in_one_that_trains() -> None:
    robust = [
        row
        for row in rows.load("dpo").values()
        if row.setting.get("loss_type") == "robust" and row.strategy == "single"
    ]
    tried = [row for row in robust if ("dpo", row.label) in SHOWN or row.label in covering("dpo")]
    assert any("refused" in row.setting for row in robust)
    assert any("refused" not in row.setting for row in tried)


@pytest.mark.parametrize("trainer", ["dpo", "grpo", "sft"])
def test_rows_whose_values_others_have_are_left_out(trainer: str) -> None:
    alone = [row for row in rows.load(trainer).values() if row.strategy == "single" and not row.added]
    others = [row for row in alone if (trainer, row.label) not in SHOWN and not row.is_of_array]
    assert 0 < len(covering(trainer)) < 0.75 * len(others)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_of_one_launch_are_of_one_kind(trainer: str) -> None:
    for label, row in rows.load(trainer).items():
        launch = launch_of(trainer, label)
        assert row in launch.rows
        kinds = {
            (
                launch_of(trainer, each.label).number,
                each.strategy,
                each.added,
                (trainer, each.label) in SHOWN,
                each.label in covering(trainer),
            )
            for each in launch.rows
        }
        assert len(kinds) == 1, (label, kinds)


def test_launches_of_a_kind_are_numbered_across_trainers() -> None:
    first = {trainer: next(label for each, label in sorted(SHOWN) if each == trainer) for trainer in ("dpo", "sft")}
    alike = [launch_of(trainer, label) for trainer, label in first.items()]
    assert len({launch.number for launch in alike}) == len(alike)
