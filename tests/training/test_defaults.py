"""Defaults by release: measured ones, those between two that agree, and nothing where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.training import defaults
from pytest_trlcompat.training.training import UNKNOWN


@pytest.mark.parametrize(
    ("trainer", "release", "name", "value"),
    [
        ("grpo", "0.17.0", "beta", 0.04),
        ("grpo", "0.16.0", "beta", 0.04),  # measured on either side
        ("grpo", "0.20.0", "beta", UNKNOWN),  # changed between 0.18.2 and 0.26.2
        ("grpo", "1.16.0", "beta", 0.0),
        ("grpo", "1.17.0", "beta", 0.0),  # as in the newest that was measured
        ("grpo", "0.9.0", "beta", UNKNOWN),
        ("grpo", ">=1", "beta", UNKNOWN),
        ("grpo", "", "beta", UNKNOWN),
        ("grpo", "0.14.0", "epsilon", None),  # there is no such argument
        ("grpo", "1.16.0", "bf16", UNKNOWN),
        ("dpo", "1.16.0", "loss_type", ["sigmoid"]),
        ("grpo", "1.0.0", "gradient_checkpointing", True),
        ("dpo", "1.0.0", "no_such_argument", UNKNOWN),
        ("gold", "1.16.0", "beta", UNKNOWN),
    ],
)
def test_a_default(trainer: str, release: str, name: str, value: Any) -> None:
    found = defaults.of(trainer, release)(name)
    assert found is value if value in (UNKNOWN, None) else found == value
