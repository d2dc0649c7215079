"""By day, end to end, over the made-up registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .made_up import OVER_DAYS, SILENT, Registry, ask, result, rule

if TYPE_CHECKING:
    pass


def test_by_days_it_names_the_package_and_the_release(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.51.0", "4.52.0")
    # Released on 2025-05-01, so in the registry as it stood when the next day began.
    assert culprit["days"] == {"last_good": "2025-05-01", "first_bad": "2025-05-02"}
    (search,) = result(registry)["searches"]
    assert search["asked"] <= 2 + 8
    held = [tuple(sorted(run.items())) for run in registry.runs]
    assert len(held) == len(set(held)), "equal versions were run twice"
    assert "the versions of the stack of 2025-" in capsys.readouterr().out


def test_by_days_a_package_with_what_it_needs(registry: Registry) -> None:
    """On one day came transformers 4.50, the tokenizers that it needs, and an innocent accelerate."""
    registry.released["tokenizers"] = {"0.20": 0, "0.21": 100}
    registry.released["accelerate"] = {"1.0": 0, "1.1": 100}
    registry.needs = [("transformers", "4.50", "tokenizers", "0.21")]
    rule(registry, SILENT.format(condition="at_least('transformers', '4.50')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.49.0", "4.50.0")
    assert culprit["alone"] is True


def test_by_days_two_packages_that_are_needed_together(registry: Registry) -> None:
    registry.released["tokenizers"] = {"0.20": 0, "0.21": 100}
    registry.released["accelerate"] = {"1.0": 0, "1.1": 100}
    rule(registry, SILENT.format(condition="at_least('transformers', '4.50') and at_least('tokenizers', '0.21')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["together_with"]) == ("transformers", ["tokenizers"])
    assert culprit["alone"] is True


def test_by_days_several_releases_of_one_day(registry: Registry) -> None:
    registry.released["transformers"] = {"4.40.0": 0, "4.41.0": 99, "4.42.0": 99, "4.43.0": 99, "4.44.0": 99}
    rule(registry, SILENT.format(condition="at_least('transformers', '4.42')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.41.0", "4.42.0")
    assert [search["phase"] for search in result(registry)["searches"]] == ["days", "releases"]


@pytest.mark.parametrize(
    "good, bad, message",
    [
        ("2025-07-10", "2025-02-01", "the bad one comes after the good one, but bad 2025-02-01 comes before good "),
        (
            "2025-02-01",
            "2025-02-01",
            "good and bad are both 2025-02-01; there is nothing to search, name ",
        ),
        ("2025-01-03", "2025-02-01", "2025-01-03 is too early: the versions of --with were all there on 2025-01-06 "),
        ("2025-02-01", "2999-01-01", "2999-01-01 is in the future; today is "),
        ("soon", "2025-02-01", "bad date 'soon'; write a day, for example 2025-02-28"),
    ],
)
def test_days_that_make_no_sense_are_one_clear_message(
    registry: Registry, capsys: pytest.CaptureFixture[str], good: str, bad: str, message: str
) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, "days", "--good", good, "--bad", bad, "--with", "trl=0.14.0") == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
