"""The table of settings holds every pair of values that can be chosen together."""

from __future__ import annotations

import itertools

import pytest

from pytest_trlcompat.catalog import known_issues
from suites.settings.table import AXES, FEW, PLAIN, row

LABELS = known_issues.load()["setting-equivalence"].strategies


def possible(pair: frozenset[str]) -> bool:
    """Whether a strategy has such a memory setting or checkpointing."""
    sharded = {"fsdp1", "fsdp2"}
    having = {
        "offload_optimizer": {"zero2", "zero3"},
        "offload_parameters": {"zero3", *sharded},
        "persistent": {"zero3"},
        "ram_loading": sharded,
        "wrapper_checkpointing": sharded,
    }
    strategies = pair & set(AXES["strategy"])
    if any(not strategies <= having.get(value, strategies) for value in pair):
        return False
    found = [having[value] for value in pair if value in having]
    return not found or bool(set.intersection(*found))


def missing() -> list[str]:
    held: set[frozenset[str]] = set()
    for label in LABELS:
        values = [value for value in row(label).values.values() if value != PLAIN]
        held |= {frozenset(pair) for pair in itertools.combinations(values, 2)}
    wanted = {
        frozenset(pair)
        for one, other in itertools.combinations(AXES, 2)
        for pair in itertools.product(AXES[one], AXES[other])
        if PLAIN not in pair
        and "qlora" not in pair  # bitsandbytes is part of no cell
        and ("compiled" not in pair or set(pair) & set(AXES["strategy"]))  # 20 seconds a row: with each strategy
    }
    return sorted("-".join(sorted(pair)) for pair in wanted - held if possible(pair))


def test_every_pair_stands_in_a_row() -> None:
    assert missing() == []


def test_few_rows_hold_every_value() -> None:
    assert set(LABELS) > FEW
    held = {value for label in FEW for value in row(label).values.values()}
    assert held == {value for values in AXES.values() for value in values} - {"compiled"}


@pytest.mark.parametrize("label", ["zero3-bf16-bf16_weights", "zero3-fp8", "zero3--bf16", "bf16-"])
def test_a_label_with_an_unknown_or_a_second_value_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=f"^{label}: no axis has "):
        row(label)


def test_a_label_gives_options_and_what_a_rank_chooses() -> None:
    chosen = row("fsdp1-offload_parameters-bf16-wrapper_checkpointing")
    assert chosen.options == {"offload_params": True, "activation_checkpointing": True}
    assert chosen.setting == chosen.setting_of_one_process == {"precision": "bf16"}
    other = row("zero3-persistent-peft_model-checkpointing")
    assert other.options == {"zero_optimization": {"stage3_param_persistence_threshold": 100_000}}
    assert other.setting == {"adapter": "peft_model", "checkpointing": "model"}
    assert other.setting_of_one_process == {"adapter": "peft_model"}
