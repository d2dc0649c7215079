"""Known issues whose tests another one stops: their names alone where nothing is known to be wrong, else in full."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.diagnosis import Diagnosis
from pytest_trlcompat.doctor.text import show

from .made_up import Run, ask, cell, issue, predict

STOPPED = "Cannot be judged here, because one stops their tests first: two."


def blocked(by: str = "one", strategies: tuple[str, ...] = (), **when: str) -> Prediction:
    return Prediction(Verdict.BLOCKED, "upstream", when, strategies, "training fails", by)


def two(*predictions: Prediction, strategies: tuple[str, ...] = ("single", "zero3")) -> KnownIssue:
    return issue(*predictions, name="two", strategies=strategies)


def text_of(diagnosis: Diagnosis) -> str:
    file = io.StringIO()
    show(diagnosis, file)
    return " ".join(file.getvalue().split())


def test_what_another_issue_stops_is_named_in_one_line_and_not_counted_as_affecting() -> None:
    found = ask("trl==0.15.2", issues=[issue(predict("broken")), two(blocked())])
    assert [(each.issue.id, each.judged, found.stopped_by(each)) for each in found.issues] == [
        ("one", True, ()),
        ("two", False, ("one",)),
    ]
    text = text_of(found)
    assert "1 known issue affects this stack; 1 more cannot be judged." in text
    assert STOPPED in text
    assert "one (weights): title" in text
    assert "two (weights): title" not in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (predict("ok"), blocked()),  # what stops it does not show
        (predict("broken", ("single",)), blocked()),  # it does not stop it everywhere
        (predict("broken", accelerate="<1.0"), blocked()),  # it may not
        (predict("broken", ("zero3",)), predict("silent", ("single",))),  # and it shows elsewhere
    ],
)
def test_what_may_be_seen_is_described_in_full(first: Prediction, second: Prediction) -> None:
    found = ask("trl==0.15.2", issues=[issue(first), two(second, blocked())])
    text = text_of(found)
    assert STOPPED not in text
    assert "two (weights): title" in text
    assert "one stops its test first: training fails" in text


@pytest.mark.parametrize("beneath", ["silent", "broken", "wasteful", "hang", "error"])
def test_what_is_a_problem_where_nothing_stops_it_is_described_with_its_cure(beneath: str) -> None:
    stopped = two(blocked(), blocked(by="three"), predict(beneath))
    found = ask("trl==0.15.2", issues=[issue(predict("broken")), stopped])
    text = text_of(found)
    assert "1 known issue affects this stack; 1 more cannot be judged." in text
    assert f"one stops its test first: training fails; where it does not, {beneath}: {beneath} because [" in text
    assert text.count("cure workaround") == 2
    assert STOPPED not in text
    (when,) = found.to_dict()["issues"][1]["when"]
    assert (when["blocked_by"], when["otherwise"]) == ("one", f"{beneath}: {beneath} because")


@pytest.mark.parametrize("beneath", [predict("ok"), predict("absent"), predict("silent", trl=">=1.0"), None])
def test_what_is_right_or_not_known_where_nothing_stops_it_is_named_alone(beneath: Prediction | None) -> None:
    stopped = two(blocked(), *([beneath] if beneath else []))
    found = ask("trl==0.15.2", issues=[issue(predict("broken")), stopped])
    assert STOPPED in text_of(found)
    assert "otherwise" not in found.to_dict()["issues"][1]["when"][0]


def test_a_problem_beneath_that_depends_on_what_is_not_known_says_so() -> None:
    stopped = two(blocked(), predict("silent", torch="<2.10"), predict("ok"))
    text = text_of(ask("trl==0.15.2", issues=[issue(predict("broken")), stopped]))
    assert "where it does not, silent with torch <2.10: silent because" in text


def test_what_is_stopped_under_a_condition_is_named_with_it() -> None:
    issues = [
        issue(predict("broken", accelerate="<1.0"), predict("ok")),
        two(blocked(accelerate="<1.0"), predict("ok")),
    ]
    text = text_of(ask("trl==0.15.2", issues=issues))
    assert "Cannot be judged with accelerate <1.0, because one stops their tests first: two." in text


def test_several_reasons_are_named_each_with_its_condition() -> None:
    first = issue(predict("broken", accelerate="<1.0"), predict("ok"))
    third = issue(predict("broken", accelerate=">=1.0"), predict("ok"), name="three")
    stopped = two(blocked(accelerate="<1.0"), blocked(by="three"), predict("ok"))
    text = text_of(ask("trl==0.15.2", issues=[first, stopped, third]))
    assert (
        "Cannot be judged with accelerate <1.0, because one stops their tests first, nor with accelerate >=1.0, "
        "because three stops their tests first: two."
    ) in text


def test_the_cure_is_for_the_strategies_under_which_the_issue_itself_is_a_problem() -> None:
    broken_alone = two(
        blocked(strategies=("single",), trl="==0.15.2"),
        predict("broken", ("single",), trl="<0.15"),
        predict("broken", ("zero3",), trl="<0.18"),
        predict("ok"),
    )
    found = ask("trl==0.15.2", issues=[issue(predict("broken")), broken_alone])
    applicable = next(each for each in found.issues if each.issue.id == "two")
    assert found.remedy(applicable) == "take trl >=0.18, or workaround"


def test_the_reason_of_an_issue_that_stops_another_is_given_once() -> None:
    stopped = two(dataclasses.replace(blocked(), why="broken because"), predict("silent"))
    text = text_of(ask("trl==0.15.2", issues=[issue(predict("broken")), stopped]))
    assert text.count("broken because") == 1
    assert "one stops its test first; where it does not, silent: silent because" in text


def test_where_all_is_stopped_nothing_is_called_clear() -> None:
    found = ask("trl==0.15.2", issues=[two(blocked())])
    assert "No known issue is predicted to affect this stack, but 1 cannot be judged." in text_of(found)


def test_without_triton_what_is_right_is_named_alone_and_what_is_wrong_is_described(doctor: Run) -> None:
    status, out, _ = doctor("trl==1.15.0", "transformers==5.23.0", "--all")
    text = " ".join(out.split())
    assert status == 1
    counted = re.search(r"(\d+) known issues affect this stack; (\d+) more cannot be judged\.", text)
    assert counted is not None
    issues = json.loads(doctor("trl==1.15.0", "transformers==5.23.0", "--json")[1])["issues"]
    assert int(counted[1]) + int(counted[2]) == len(issues)
    assert int(counted[2]) > 60
    named = text.partition("Cannot be judged here, because grpo-needs-triton stops their tests first: ")[2]
    assert "grpo-temperature, " in named.partition(".")[0]
    assert "grpo-temperature: " not in text
    assert "grpo-eval-remainder (numbers): GRPO's evaluation leaves out rows of its last batch" in text
    assert "where it does not, silent: Accelerate takes the number of prompts for that of rows" in text


def test_no_problem_of_the_catalogue_is_dropped_because_another_stops_it() -> None:
    """With the versions of measured cells: what is predicted without blockers is a problem, or the name is enough."""
    known = known_issues.load()
    described = named = 0
    for measured in evidence.published().cells[::9]:
        pins = [f"{package}=={version}" for package, version in measured.versions.items()]
        found = ask(*pins, issues=list(known.values()), cells=[measured], complete=True)
        for each in found.issues:
            rest = dataclasses.replace(each.issue, predictions=each.issue.without_blockers())
            beneath = [rest.predict("upstream", label, measured.versions) for label in each.strategies]
            problem = any(one is not None and one.verdict.is_problem for one in beneath)
            assert not (problem and found.stopped_by(each)), (measured.id, each.issue.id)
            described += problem and not each.judged
            named += bool(found.stopped_by(each))
    assert described > 20
    assert named > 50


def test_a_stopped_issue_is_the_least_of_all_problems_and_a_problem() -> None:
    found = ask("trl==0.15.2", issues=[two(blocked()), issue(predict("wasteful"))])
    assert [each.issue.id for each in found.issues] == ["one", "two"]
    (effect,) = found.issues[1].effects
    assert (effect.verdict, effect.blocked_by) == (Verdict.BLOCKED, "one")


def test_the_status_is_1_where_a_test_is_stopped(doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = doctor("trl==0.15.2", "transformers==4.52.4", "--strategy", "single", "--json")
    assert status == 1
    found = {each["id"]: each for each in json.loads(out)["issues"]}
    (when,) = found["grpo-sampling"]["when"]
    assert (when["verdict"], when["blocked_by"]) == ("blocked", "grpo-train-sampler")
    assert "blocked_by" not in found["grpo-train-sampler"]["when"][0]


def test_an_error_of_before_failures_were_attributed_measures_a_stopped_issue_but_not_its_cause() -> None:
    new = dataclasses.replace(cell("0.15.2"), verdicts={("two", "upstream", "single"): Verdict.ERROR})
    old = dataclasses.replace(new, attributed=False)
    says = dataclasses.replace(new, verdicts={("two", "upstream", "single"): Verdict.BLOCKED})

    def by(name: str) -> MeasuredCell:
        return dataclasses.replace(says, blocked_by={("two", "upstream", "single"): name})

    for measured, level, text in (
        (old, "measured", "failed on trl0.15.2-tf4.49.0; the cause is predicted"),
        (new, "unmeasured", "not measured in the published sweep; predicted by the catalogue"),
        (says, "measured", "measured on trl0.15.2-tf4.49.0"),
        (by("one"), "measured", "measured on trl0.15.2-tf4.49.0"),
        (by("three"), "unmeasured", "not measured in the published sweep; predicted by the catalogue"),
    ):
        issues = [issue(predict("broken")), two(blocked(trl="<0.18"), strategies=("single",))]
        found = ask("trl==0.15.2", issues=issues, cells=[measured])
        (effect,) = found.issues[1].effects
        assert (effect.verdict.value, effect.confidence.level.value) == ("blocked", level)
        assert effect.confidence.describe() == text
        assert found.to_dict()["issues"][1]["when"][0].get("cause_predicted", False) is (measured is old)


@pytest.mark.parametrize(
    ("trl", "text"),
    [
        ("0.16.0", "failed on trl0.15.2-tf4.49.0 and trl0.17.0-tf4.49.0, between which this stack is"),
        ("0.14.0", "outside the measured range; the nearest cell that failed is trl0.15.2-tf4.49.0"),
    ],
)
def test_failures_of_other_cells_do_not_measure_their_cause_either(trl: str, text: str) -> None:
    verdicts = {("two", "upstream", "single"): Verdict.ERROR}
    cells = [dataclasses.replace(cell(each), verdicts=verdicts, attributed=False) for each in ("0.15.2", "0.17.0")]
    found = ask(f"trl=={trl}", issues=[two(blocked(trl="<0.18"), strategies=("single",))], cells=cells)
    (effect,) = found.issues[0].effects
    assert effect.confidence.describe() == f"{text}; the cause is predicted"


def test_causes_are_called_measured_where_the_published_sweep_has_seen_them(doctor: Run) -> None:
    out = json.loads(doctor("trl==0.15.2", "transformers==4.48.3", "--json")[1])
    stopped = [when for each in out["issues"] for when in each["when"] if when["verdict"] == "blocked"]
    assert len(stopped) > 5
    assert sum(bool(when["cells"]) for when in stopped) > 5
    # Some cells of older torches were published before failures were attributed.
    seen = {cell.id: cell.attributed for cell in evidence.published().cells}
    for when in stopped:
        assert when.get("cause_predicted", False) is any(not seen[cell] for cell in when["cells"])
