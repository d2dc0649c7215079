"""The rows of settings, and the array that most of them come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_trlcompat.conformance import array, rows
from pytest_trlcompat.conformance.grpo.configs import AXES

ROWS = rows.load("grpo")
SPACES = {(trainer, prefix): known for trainer in rows.TRAINERS for prefix, known in array.spaces(trainer).items()}


def of(prefix: str, trainer: str = "grpo") -> list[rows.Row]:
    return [row for row in rows.load(trainer).values() if row.name.startswith(prefix)]


@pytest.mark.parametrize("trainer, prefix", SPACES)
def test_the_rows_hold_every_two_values_that_may_stand_together(trainer: str, prefix: str) -> None:
    known = SPACES[trainer, prefix]
    chosen = of(f"{prefix}_", trainer)
    settings = [{**row.setting, **({"strategy": row.strategy} if prefix == "ranks" else {})} for row in chosen]
    held = array.covered_pairs(known.factors, settings)
    missing = [pair for pair in known.pairs() if tuple((name, json.dumps(value)) for name, value in pair) not in held]
    assert missing == []


def test_a_pair_is_missing_without_a_row() -> None:
    known = SPACES["grpo", "pair"]
    held = array.covered_pairs(known.factors, [row.setting for row in of("pair_")[1:]])
    wanted = {tuple((name, json.dumps(value)) for name, value in pair) for pair in known.pairs()}
    assert wanted - held


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_no_row_of_the_array_holds_values_that_exclude_each_other(trainer: str) -> None:
    known = SPACES[trainer, "pair"]
    defaults = {name: values[0] for name, values in known.factors.items()}
    assert [row.name for row in of("pair_", trainer) if not known.is_possible({**defaults, **row.setting})] == []


def test_values_exclude_each_other() -> None:
    assert not SPACES["grpo", "pair"].is_possible({"loss_type": "luspo", "importance_sampling_level": "token"})
    assert not SPACES["ppo", "pair"].is_possible({"whiten_rewards": True, "num_mini_batches": 2})


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_each_value_that_the_array_holds_beside_the_first_is_one_of_a_row_that_stands_alone_too(trainer: str) -> None:
    """What fails in a row of many values is looked up where it stands with few."""
    written = rows.load(trainer).values()
    alone = [row.setting for row in written if not row.name.startswith(("pair_", "ranks_"))]
    missing = [
        f"{name}={value}"
        for name, values in SPACES[trainer, "pair"].factors.items()
        for value in values[1:]
        if not any(name in setting and setting[name] == value for setting in alone)
    ]
    assert missing == []


def test_axes_have_the_values_that_rows_choose() -> None:
    unknown = [
        f"{row.label}: {name}={value}"
        for row in ROWS.values()
        for name, value in row.setting.items()
        if name in AXES and value not in AXES[name]
    ]
    assert unknown == []


NAMES = {"distillation": "Distillation", "first_rloo": "RLOO until 0.21", "reward": "Reward"}


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_the_page_has_the_numbers(trainer: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "conformance.md").read_text()
    cells = [NAMES.get(trainer, trainer.upper()), str(len(rows.load(trainer)))]
    for prefix in ("pair", "ranks"):
        known = SPACES.get((trainer, prefix))
        made = [row for row in rows.load(trainer).values() if re.fullmatch(rf"{prefix}_\d+", row.name)]
        cells += ["", ""] if known is None else [str(len(made)), f"{len(list(known.pairs())):,}"]
    assert f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") in page.splitlines()


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_labels_are_read_without_the_settings(trainer: str) -> None:
    assert rows.labels(trainer) == tuple(rows.load(trainer))


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_a_row_is_read_alone_as_with_all_others(trainer: str) -> None:
    assert {label: rows.row_named(trainer, label) for label in rows.labels(trainer)} == rows.load(trainer)
    assert rows.row_named(trainer, "single-there_is_none") is None


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_the_settings_are_each_another(trainer: str) -> None:
    written = [json.dumps([row.strategy, row.setting], sort_keys=True) for row in rows.load(trainer).values()]
    assert len(set(written)) == len(written)


def test_rows_of_the_array_are_made_anew_behind_those_that_people_wrote() -> None:
    before = "default = {}\n\n" + array.MADE + "pair_01 = {}\n"
    after = array.with_made_rows(before, ["pair_02 = {}"])
    assert after == "default = {}\n\n" + array.MADE + "pair_02 = {}\n"
    assert array.with_made_rows(after, ["pair_02 = {}"]) == after


def test_rows_that_people_wrote_below_that_line_are_not_lost() -> None:
    text = "default = {}\n\n" + array.MADE + "pair_01 = {}\n# With Liger.\nliger_default = {}\n"
    with pytest.raises(ValueError, match=r"2 lines stand below .*, first '# With Liger\.'; move them above it"):
        array.with_made_rows(text, ["pair_01 = {}"])


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_the_rows_of_the_array_can_be_made_anew(trainer: str) -> None:
    text = (Path(rows.__file__).with_name(trainer) / "rows.toml").read_text()
    made = text.partition(array.MADE)[2].splitlines()
    assert array.with_made_rows(text, made) == text
