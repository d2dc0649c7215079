"""Families of strategies: their names, and which of them measurements need not all try."""

from __future__ import annotations

import pytest

from pytest_trlcompat.strategies import DISTINCT, NAMES, families, family_of


def test_names_are_in_the_order_of_their_families() -> None:
    assert NAMES == ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
    assert DISTINCT == ("single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2")


def test_every_family_has_a_place_of_its_own() -> None:
    assert len({family.position for family in families()}) == len(families()) == 5
    assert [type(family_of(name)).__name__ for name in DISTINCT] == [
        *("Single", "DDP", "DeepSpeed", "DeepSpeed", "FSDP1", "FSDP2"),
    ]


def test_a_name_of_no_family() -> None:
    with pytest.raises(KeyError, match="zero4"):
        family_of("zero4")
