"""The module ``regions``: what is predicted all over a domain is what is predicted at each of its points."""

from __future__ import annotations

import itertools

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import SUBJECTS, KnownIssue, Prediction
from pytest_trlcompat.catalog.ranges import ABSENT, ALL, at, parse
from pytest_trlcompat.catalog.regions import regions, unreachable
from pytest_trlcompat.catalog.verdict import Verdict


def predict(verdict: str, strategies: tuple[str, ...] = (), subject: str = "upstream", **when: str) -> Prediction:
    return Prediction(Verdict(verdict), subject, when, strategies, f"{verdict} because")


def issue(*predictions: Prediction, strategies: tuple[str, ...] = ("single", "zero3")) -> KnownIssue:
    return KnownIssue("one", "t", "w", (), "s", "", (), predictions, strategies)


TRL = ("0.14.0", "0.15.2", "0.18.0", "1.16.0")
TRANSFORMERS = ("4.48.3", "4.49.0", "4.52.4", "5.23.0")
ACCELERATE = ("1.3.0", "1.6.0", "1.15.0")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_known_stack_has_the_answer_that_the_catalogue_gives(subject: str) -> None:
    for entry in known_issues.load().values():
        for strategy in entry.labels():
            for trl, transformers, accelerate in itertools.product(TRL, TRANSFORMERS, ACCELERATE):
                versions = {"trl": trl, "transformers": transformers, "accelerate": accelerate}
                found = regions(entry, subject, strategy, {name: at(text) for name, text in versions.items()})
                # Packages that no prediction settles leave axes; here every package that matters is known.
                named = set(entry.packages) - set(versions)
                if named:
                    continue
                wanted = next((p for p in entry.predictions if p.applies(subject, strategy, versions)), None)
                assert list(found.predicted.values()) == [wanted], (entry.id, strategy, versions)


def test_an_unknown_package_leaves_an_axis_and_a_condition() -> None:
    entry = issue(predict("ok", accelerate=">=1.9"), predict("broken", trl="<0.18"), predict("ok"))
    found = regions(entry, "upstream", "zero3", {"trl": at("0.15.2")})
    assert [axis.package for axis in found.axes] == ["accelerate"]
    assert [(p and p.verdict, region.describe()) for p, region in found.by_prediction()] == [
        (Verdict.BROKEN, "accelerate <1.9"),
        (Verdict.OK, "accelerate >=1.9"),
    ]


def test_conditions_on_several_packages_are_told_as_boxes() -> None:
    entry = issue(predict("broken", trl="<1", accelerate=">=1.0,<1.9"), predict("silent", trl=">=1.2"), predict("ok"))
    found = {
        p.verdict: region.describe()
        for p, region in regions(entry, "upstream", "zero3", {}).by_prediction()
        if p is not None
    }
    assert found == {
        Verdict.BROKEN: "trl <1 and accelerate >=1.0,<1.9",
        Verdict.SILENT: "trl >=1.2",
        Verdict.OK: "trl <1 and accelerate <1.0 or >=1.9, or trl >=1,<1.2",
    }


def test_what_does_not_decide_is_no_axis() -> None:
    entry = issue(predict("broken", trl="<1"), predict("silent", trl=">=1", peft="<0.14"), predict("ok"))
    found = regions(entry, "upstream", "single", {"trl": at("0.15.2")})
    assert found.axes == ()
    ((prediction, region),) = found.by_prediction()
    assert prediction is entry.predictions[0]
    assert region.whole
    assert region.describe() == ""


@pytest.mark.parametrize(
    "predictions",
    [
        (predict("silent", trl=">=1", peft="<0.14"), predict("broken")),  # cannot hold
        (predict("broken", trl="<1"), predict("silent", peft="<0.14")),  # is never reached
    ],
)
def test_a_prediction_that_cannot_decide_leaves_no_axis(predictions: tuple[Prediction, ...]) -> None:
    found = regions(issue(*predictions), "upstream", "single", {"trl": at("0.15.2")})
    assert found.axes == ()
    assert [p and p.verdict for p in found.predicted.values()] == [Verdict.BROKEN]


def test_a_package_that_is_not_installed_satisfies_no_range() -> None:
    entry = issue(predict("broken", deepspeed=">=0"))
    assert list(regions(entry, "upstream", "single", {"deepspeed": None}).predicted.values()) == [None]
    assert list(regions(entry, "upstream", "single", {"deepspeed": ALL}).predicted.values()) == [entry.predictions[0]]


def test_a_range_in_place_of_a_version_settles_what_it_can() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("ok"))
    inside = regions(entry, "upstream", "single", {"trl": parse(">=0.15,<0.17")})
    across = regions(entry, "upstream", "single", {"trl": parse(">=0.15,<0.19")})
    assert inside.axes == ()
    assert [region.describe() for _, region in across.by_prediction()] == ["trl <0.18", "trl >=0.18"]


def test_strategies_and_subjects_are_kept_apart() -> None:
    entry = issue(predict("broken", ("zero*",)), predict("silent", subject="corrected"))
    assert list(regions(entry, "upstream", "zero3", {}).predicted.values()) == [entry.predictions[0]]
    assert list(regions(entry, "upstream", "single", {}).predicted.values()) == [None]
    assert list(regions(entry, "corrected", "single", {}).predicted.values()) == [entry.predictions[1]]


@pytest.mark.parametrize(
    "shadowed",
    [
        predict("silent", trl=">=0.15,<0.16"),
        predict("silent", ("zero3",), trl=">=0.15,<0.18", accelerate="<1.0"),
    ],
)
def test_a_prediction_behind_one_that_holds_wherever_it_would_is_unreachable(shadowed: Prediction) -> None:
    first = predict("broken", trl=">=0.14,<0.18")
    assert unreachable(issue(first, shadowed, predict("ok"))) == [shadowed]
    assert unreachable(issue(shadowed, first, predict("ok"))) == []


def test_two_predictions_together_can_shadow_a_third() -> None:
    third = predict("ok", trl=">=0.15,<0.18")
    assert unreachable(issue(predict("broken", trl="<0.16"), predict("silent", trl=">=0.16"), third)) == [third]


def test_a_prediction_for_another_strategy_shadows_nothing() -> None:
    assert unreachable(issue(predict("broken", ("zero3",)), predict("ok", ("single", "zero3")))) == []


def test_a_pattern_for_variants_alone_is_reached_by_some_variant() -> None:
    assert unreachable(issue(predict("broken", ("zero3-*",)), predict("ok"), strategies=())) == []


# Stacks of which some versions stand together


def test_points_at_which_no_fork_stands_are_left_out() -> None:
    entry = issue(predict("broken", trl="<1", transformers="<5"), predict("silent", trl="<1"), predict("ok"))
    versions = {"trl": parse("==0.15.2") | parse("==1.16.0"), "transformers": parse("==4.48.3") | parse("==5.23.0")}
    forks = [
        {"trl": at("0.15.2"), "transformers": at("4.48.3")},
        {"trl": at("1.16.0"), "transformers": at("5.23.0")},
    ]
    free = regions(entry, "upstream", "single", versions)
    assert {p.verdict for p in free.predicted.values() if p} == {Verdict.BROKEN, Verdict.SILENT, Verdict.OK}
    together = regions(entry, "upstream", "single", versions, forks)
    assert [(p and p.verdict, region.describe(), region.whole) for p, region in together.by_prediction()] == [
        (Verdict.BROKEN, "transformers ==4.48.3 and trl ==0.15.2", False),
        (Verdict.OK, "transformers ==5.23.0 and trl ==1.16.0", False),
    ]
    assert together.impossible == {(0, 1), (1, 0)}


def test_what_every_fork_has_is_the_whole() -> None:
    entry = issue(predict("broken", trl="<2", transformers="<6"), predict("ok"))
    versions = {"trl": parse("==0.15.2") | parse("==3.0"), "transformers": parse("==4.48.3") | parse("==7.0")}
    forks = [{"trl": at("0.15.2"), "transformers": at("4.48.3")}]
    ((prediction, region),) = regions(entry, "upstream", "single", versions, forks).by_prediction()
    assert prediction is entry.predictions[0]
    assert region.whole


def test_many_exclusions_in_every_package_make_no_more_points() -> None:
    """Of 31 intervals in each of three packages there were 29,791 points."""
    entry = issue(predict("broken", trl="<1", transformers="<5", peft=">=0.5"), predict("ok"))
    excluded = parse(",".join(f"!=0.{number}" for number in range(30)))
    found = regions(entry, "upstream", "single", {"trl": excluded, "transformers": excluded, "peft": excluded})
    assert len(found.predicted) == 8
    assert [axis.package for axis in found.axes] == ["transformers", "trl", "peft"]
    assert len(found.axes[0].pieces[0].intervals) == 31


def test_a_package_that_may_be_missing_meets_no_range() -> None:
    entry = issue(predict("ok", peft=">=0.13"), predict("broken"))
    maybe = regions(entry, "upstream", "single", {"peft": at("0.14.0") | ABSENT})
    assert [(p and p.verdict, region.describe()) for p, region in maybe.by_prediction()] == [
        (Verdict.BROKEN, "peft not installed"),
        (Verdict.OK, "peft ==0.14.0"),
    ]
