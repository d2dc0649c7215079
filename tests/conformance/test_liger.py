"""Which fields of a config the axis ``liger`` means, and what it needs."""

from __future__ import annotations

import importlib.util

import pytest

from pytest_trlcompat.conformance import liger, rows

LAYERS = {"rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"}


def test_the_loss_alone_is_asked_for_by_the_argument_that_a_release_has() -> None:
    assert liger.fields({"liger": "loss"}, {"use_liger_loss", "use_liger_kernel"}) == {"use_liger_loss": True}
    found = liger.fields({"liger": "loss"}, {"use_liger_kernel", "liger_kernel_config"})
    assert found == {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(LAYERS, False)}


def test_kernels_are_all_that_liger_has() -> None:
    assert liger.fields({"liger": "kernels"}, {"use_liger_loss", "use_liger_kernel"}) == {"use_liger_kernel": True}


def test_a_setting_without_liger_has_none_of_its_fields_and_needs_nothing() -> None:
    assert liger.fields({"beta": 0.1}, {"use_liger_kernel"}) == {}
    assert liger.lacking({"beta": 0.1}) == ""


def test_what_is_lacking_is_named_where_liger_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Liger is not installed" in liger.lacking({"liger": "loss"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert liger.lacking({"liger": "loss"}) == ""


def test_rows_with_liger_are_of_trainers_that_have_it_and_use_known_values() -> None:
    found = {trainer: [row for row in rows.load(trainer).values() if row.needs_liger] for trainer in rows.TRAINERS}
    assert {trainer for trainer, some in found.items() if some} == {"dpo", "grpo", "sft"}
    assert {row.setting["liger"] for some in found.values() for row in some} == {"loss", "kernels"}
    assert all(row.name.startswith("liger_") for some in found.values() for row in some)
