"""By day, end to end, with a fake registry."""

from __future__ import annotations

import pytest

from .fakes import ALL_DAYS, FAIL_IF, FakeRegistry, read_result, run_bisect, write_check


def test_by_days_it_names_the_package_and_the_release(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, *ALL_DAYS) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.51.0", "4.52.0")
    # Released on 2025-05-01, so the registry has it when the next day begins.
    assert culprit["days"] == {"last_good": "2025-05-01", "first_bad": "2025-05-02"}
    (search,) = read_result(registry)["searches"]
    assert search["tested"] <= 2 + 8
    held = [tuple(sorted(run.items())) for run in registry.runs]
    assert len(held) == len(set(held)), "equal versions were run twice"
    assert "same versions as the stack of 2025-" in capsys.readouterr().out


def test_by_days_a_package_is_named_without_its_dependencies(registry: FakeRegistry) -> None:
    """One day brought transformers 4.50, the tokenizers that it needs, and an accelerate that is not to blame."""
    registry.released["tokenizers"] = {"0.20": 0, "0.21": 100}
    registry.released["accelerate"] = {"1.0": 0, "1.1": 100}
    registry.needs = [("transformers", "4.50", "tokenizers", "0.21")]
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.50')"))
    assert run_bisect(registry, *ALL_DAYS) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.49.0", "4.50.0")
    assert culprit["alone"] is True


def test_by_days_two_packages_that_fail_only_together_are_both_named(registry: FakeRegistry) -> None:
    registry.released["tokenizers"] = {"0.20": 0, "0.21": 100}
    registry.released["accelerate"] = {"1.0": 0, "1.1": 100}
    write_check(
        registry, FAIL_IF.format(condition="at_least('transformers', '4.50') and at_least('tokenizers', '0.21')")
    )
    assert run_bisect(registry, *ALL_DAYS) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["together_with"]) == ("transformers", ["tokenizers"])
    assert culprit["alone"] is True


def test_by_days_several_releases_of_one_day_are_searched_one_by_one(registry: FakeRegistry) -> None:
    registry.released["transformers"] = {"4.40.0": 0, "4.41.0": 99, "4.42.0": 99, "4.43.0": 99, "4.44.0": 99}
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.42')"))
    assert run_bisect(registry, *ALL_DAYS) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.41.0", "4.42.0")
    assert [search["phase"] for search in read_result(registry)["searches"]] == ["days", "releases"]


@pytest.mark.parametrize(
    "good, bad, message",
    [
        (
            "2025-07-10",
            "2025-02-01",
            "bad must be later than good, but bad 2025-02-01 is earlier than good 2025-07-10; swap ",
        ),
        (
            "2025-02-01",
            "2025-02-01",
            "--good and --bad are both 2025-02-01, so there is nothing to search; name two days",
        ),
        (
            "2025-01-03",
            "2025-02-01",
            "2025-01-03 is too early: the versions of --with were not all released before 2025-01-06; ",
        ),
        ("2025-02-01", "2999-01-01", "2999-01-01 is in the future; today is "),
        ("soon", "2025-02-01", "bad date 'soon'; write a day, for example 2025-02-28"),
    ],
)
def test_invalid_days_are_refused_with_one_clear_message(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str], good: str, bad: str, message: str
) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, "days", "--good", good, "--bad", bad, "--with", "trl=0.14.0") == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
