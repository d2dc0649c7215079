"""An account of what was due is complete only where something was due and all of it, and nothing else, was met."""

from __future__ import annotations

import pytest

from pytest_trlcompat._due import Account


def test_it_is_complete_when_all_that_was_due_is_met() -> None:
    assert Account("quantities", ["loss", "gradient"]).shortfall() == "of 2 quantities 2 are missing: loss, gradient"
    account = Account("quantities", ["loss", "gradient"])
    account.meet_all(["gradient", "loss"])
    assert account.is_complete
    assert account.shortfall() == ""


def test_nothing_due_is_never_complete() -> None:
    account: Account[str] = Account("quantities", [])
    assert not account.is_complete
    assert account.shortfall() == "no quantities were due, so that nothing was shown"


def test_it_names_what_is_missing_in_the_order_in_which_it_was_due() -> None:
    account = Account("ranks", range(7))
    account.meet(0)
    assert account.missing == (1, 2, 3, 4, 5, 6)
    assert account.shortfall() == "of 7 ranks 6 are missing: 1, 2, 3, 4 and 2 more"
    account.meet_all(range(6))
    assert account.shortfall() == "of 7 ranks 1 is missing: 6"


def test_what_was_not_due_makes_it_incomplete() -> None:
    account = Account("weights", ["a.weight"])
    account.meet_all(["a.weight", "b.weight"])
    assert account.unexpected == ("b.weight",)
    assert not account.is_complete
    assert account.shortfall() == "b.weight was not due"


@pytest.mark.parametrize("met_first", [False, True])
def test_what_is_refused_does_not_count_as_met_nor_as_missing(met_first: bool) -> None:
    account = Account("quantities", ["loss"])
    if met_first:
        account.meet("loss")
    account.refuse("loss", "is not finite")
    if not met_first:
        account.meet("loss")
    assert not account.is_complete
    assert account.missing == ()
    assert account.shortfall() == "loss is not finite"


def test_a_refusal_of_what_was_not_due_is_no_all_clear() -> None:
    account: Account[str] = Account("quantities", [])
    account.refuse("loss", "is not finite")
    assert not account.is_complete
    assert account.shortfall() == "loss is not finite"


def test_a_name_of_several_parts_is_written_as_words() -> None:
    account = Account("cells", [("trl==1.0", "tf==5.0")])
    assert account.shortfall() == "of 1 cells 1 is missing: trl==1.0 tf==5.0"
