"""Names of strategies: of a family, composed with dimensions, with a variant."""

from __future__ import annotations

import pytest

from pytest_trlcompat.catalog.issue import kind
from pytest_trlcompat.launch import StrategyError, strategy
from pytest_trlcompat.strategies import dimensions, parts_of


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("zero3", ("zero3", (), "")),
        ("fsdp1-no_shard", ("fsdp1", (), "no_shard")),
        ("zero2-lora-bf16", ("zero2", (), "lora-bf16")),
    ],
)
def test_what_follows_a_strategy_is_a_variant(label: str, parts: tuple[str, tuple[str, ...], str]) -> None:
    assert parts_of(label) == parts
    assert kind(label) == parts[0]


@pytest.mark.parametrize(
    ("label", "parts", "name"),
    [
        ("fsdp2-tp", ("fsdp2", ("tp",), ""), "fsdp2-tp"),
        ("fsdp2-tp-cp-lora", ("fsdp2", ("tp", "cp"), "lora"), "fsdp2-tp-cp"),
        ("fsdp2-lora-tp", ("fsdp2", (), "lora-tp"), "fsdp2"),
    ],
)
def test_a_dimension_belongs_to_the_strategy(
    label: str, parts: tuple[str, tuple[str, ...], str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimensions, "DIMENSIONS", ("tp", "cp"))
    assert parts_of(label) == parts
    assert kind(label) == name


def test_no_composed_strategy_can_be_launched_yet() -> None:
    with pytest.raises(StrategyError, match="unknown strategy 'fsdp2-tp'; known are single, ddp"):
        strategy("fsdp2-tp")
