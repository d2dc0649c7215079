"""How far logged rewards may be off by rounding alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_trlcompat.conformance.supervised.quantities import _of_rewards

LOGS = {"logps/chosen": -20.0, "logps/rejected": -12.5, "rewards/margins": 0.0}


def test_rewards_may_be_off_by_the_last_places_of_the_log_probabilities_that_they_differ_in() -> None:
    allowed = _of_rewards("rewards/margins", LOGS, SimpleNamespace(beta=0.1))
    assert allowed == pytest.approx(8 * 2.0**-23 * 20 * 0.1)
    assert 1.7e-6 < allowed < 1e-5  # seen: policy and reference model are equal, and their batches are not
    assert (
        _of_rewards(
            "rewards/chosen", {f"eval_{name}": value for name, value in LOGS.items()}, SimpleNamespace(beta=0.1)
        )
        == allowed
    )


def test_rounding_decides_which_of_two_equal_rewards_is_larger() -> None:
    """As where policy and reference model are equal, and are not computed in the same way."""
    assert _of_rewards("rewards/accuracies", LOGS, SimpleNamespace(beta=0.1)) == 1.0
    near = {**LOGS, "rewards/margins": 1e-6}
    assert _of_rewards("rewards/accuracies", near, SimpleNamespace(beta=0.1)) == 1.0
    apart = {**LOGS, "rewards/margins": -1e-3}
    assert _of_rewards("rewards/accuracies", apart, SimpleNamespace(beta=0.1)) == 0.0


@pytest.mark.parametrize("name", ["logps/chosen", "loss"])
def test_other_numbers_may_not(name: str) -> None:
    assert _of_rewards(name, LOGS, SimpleNamespace(beta=0.1)) == 0.0


def test_rewards_without_log_probabilities_may_not_either() -> None:
    assert _of_rewards("rewards/chosen", {"rewards/chosen": 1.0}, object()) == 0.0
