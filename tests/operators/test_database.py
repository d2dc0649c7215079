"""The software accelerator computes what the CPU computes, for every operator that PyTorch tests."""

from __future__ import annotations

from collections import Counter

import pytest

from .conftest import Trial
from .listing import DTYPES, judge, read_exemptions, without_operator

LEAST = {"float32": 640, "bfloat16": 500, "float16": 490, "int64": 440, "bool": 320, "complex64": 360}
"""Operators in each dtype: a few less than torch 2.4 has, and later releases have more."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_equal_the_cpus_but_for_those_that_are_listed(trial: Trial, dtype: str) -> None:
    outcomes = [outcome for outcome in trial.outcomes if outcome.dtype == dtype]
    assert len(outcomes) >= LEAST[dtype]
    assert judge(outcomes, read_exemptions(), trial.torch) == []


def test_each_entry_of_the_list_is_about_an_operator_of_this_torch(trial: Trial) -> None:
    assert without_operator(trial.outcomes, read_exemptions(), trial.torch) == []


def test_each_operator_is_judged_once(trial: Trial) -> None:
    counted = Counter((outcome.operator, outcome.dtype) for outcome in trial.outcomes)
    assert [names for names, count in counted.items() if count > 1] == []
