"""What a setting that was tried means: a verdict of the conformance suite, or of a known issue that it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.conformance import driver
from pytest_trlcompat.conformance.adapter import TrainerAdapter
from pytest_trlcompat.conformance.comparison import Comparison, ToleranceUnknown
from pytest_trlcompat.launch import LaunchResult
from pytest_trlcompat.launch.result import RankResult
from pytest_trlcompat.plugin.judging import Absent, Untestable
from suites.conformance.row_choice import launch_of
from suites.conformance.trainings import ConformanceTrainings
from suites.launches import LaunchCache

NAME_ERROR = "AttributeError: 'functools.partial' object has no attribute '__name__'"
ENTRY = """
[[issue]]
id = "{id}"
title = "t"
wrong = "w"
severity = "weights"
upstream = []
suite = "conformance/test_findings.py"
cure = ""
settings = {{ trainer = "grpo", labels = ["{label}"] }}
{shown}
[[issue.prediction]]
verdict = "{verdict}"
subject = "upstream"
when = {{ trl = "<1" }}
why = "y"
"""


@dataclass
class Found:
    """What the ranks of a launch return, without launching any."""

    of: dict[str, dict[str, Any]]
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is not driver.compare_with_reference:
            return None
        self.asked.append(args)
        nothing: dict[str, Any] = {"failure": None, "differences": [], "compared": 9, "unknown": []}
        value = {name: {**nothing, **self.of.get(name, {})} for name in args[3]}
        return LaunchResult(
            "compare_with_reference", kwargs["strategy"], "software", (RankResult(0, value, returned=True),)
        )


def differing(*stages: str) -> dict[str, Any]:
    return {"differences": [{"stage": stage, "where": "step 0"} for stage in stages]}


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "0.20.0"})

    def made(of: dict[str, dict[str, Any]], *entries: str) -> ConformanceTrainings:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"  # a file is read once
        path.write_text("schema = 1\n" + "".join(entries))
        return ConformanceTrainings(cast(LaunchCache, Found(of)), cast(Any, None), known_issues.load(path))

    return made


def entry(id: str, verdict: str, label: str = "single-beta", quantity: str = r"gradients\[.*\]") -> str:
    shown = f"[[issue.difference]]\nquantity = '{quantity}'\n"
    if verdict == "broken":
        shown = "[[issue.symptom]]\ntype = 'AttributeError'\ntext = \"has no attribute '__name__'\"\n"
    return ENTRY.format(id=id, verdict=verdict, label=label, shown=shown)


def test_a_value_that_a_release_does_not_know_is_absent_and_speaks_against_nothing(trainings: Any) -> None:
    finding = trainings({"delta": {"unknown": ["delta"]}}).judge("upstream", "single-delta", "grpo")
    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence["reason"] == "this release knows no delta as the setting has it"
    record = Record("conformance-grpo", "upstream", "single-delta", Verdict.ABSENT, Verdict.OK, finding.evidence)
    assert record.as_predicted
    assert not Record("x", "upstream", "single", Verdict.ABSENT, Verdict.SILENT, finding.evidence).as_predicted
    assert not Record("x", "upstream", "single", Verdict.ABSENT, Verdict.OK, {"reason": "other"}).as_predicted


def test_what_needs_something_that_is_not_installed_cannot_be_tested(trainings: Any) -> None:
    made = trainings({"tools": {"lacking": "no jmespath"}})
    with pytest.raises(Untestable, match="no jmespath"):
        made.judge("upstream", "single-tools", "grpo")


def test_a_setting_that_rounding_hides_costs_no_other_one_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(TrainerAdapter):
        def unknown(self, setting: Any) -> list[str]:
            return []

        def record(self, *args: Any) -> tuple[None, None]:
            return None, None

        def compare(self, recordings: Any, untrained: Any, model: Any, setting: Any, seed: int) -> Comparison:
            if setting:
                raise ToleranceUnknown("logs[loss] (step 0) is off by 1, and may be by 2")
            return Comparison([], 7, [], [])

    monkeypatch.setattr(driver, "adapter_of", lambda trainer: Adapter())
    monkeypatch.setattr(driver, "of_all_ranks", lambda recording: [recording])
    settings = {"one": {"beta": 0.1}, "other": {}}
    found = driver.compare_with_reference("grpo", "upstream", cast(Any, None), settings)
    assert found["one"]["lacking"].endswith("nothing can be told: logs[loss] (step 0) is off by 1, and may be by 2")
    assert (found["other"]["compared"], "lacking" in found["other"]) == (7, False)


def test_a_training_of_which_nothing_was_compared_is_not_right(trainings: Any) -> None:
    made = trainings({"beta": {"compared": 0}}, entry("grpo-one", "silent"))
    finding = made.judge("upstream", "single-beta", "grpo")
    assert (finding.verdict, finding.evidence["failure"]) == (
        Verdict.ERROR,
        "AssertionError: nothing of this training was compared with the reference",
    )
    assert made.judge_issue(made.catalog["grpo-one"], "upstream", "single-beta").verdict is Verdict.ERROR
    refused = trainings({"beta": {"compared": 0, "refused_with": "ValueError: no"}})
    assert refused.judge("upstream", "single-beta", "grpo").verdict is Verdict.OK


def test_what_a_recording_does_not_see_is_neither_right_nor_the_trainers_fault(trainings: Any) -> None:
    unseen = {"unseen": ["old_logprobs"], "shortfall": "the recording sees nothing of old_logprobs"}
    made = trainings({"beta": unseen}, entry("grpo-one", "silent", quantity="old_logprobs"))
    with pytest.raises(Untestable, match="sees nothing of old_logprobs"):
        made.judge("upstream", "single-beta", "grpo")
    with pytest.raises(Untestable, match="sees nothing of old_logprobs"):
        made.judge_issue(made.catalog["grpo-one"], "upstream", "single-beta")
    seen = trainings({"beta": unseen}, entry("grpo-one", "silent"))
    assert seen.judge_issue(seen.catalog["grpo-one"], "upstream", "single-beta").verdict is Verdict.OK
    differs = trainings({"beta": {**unseen, **differing("advantages")}}).judge("upstream", "single-beta", "grpo")
    assert (differs.verdict, differs.evidence["not_recorded"]) == (Verdict.SILENT, ["old_logprobs"])


def test_a_row_of_the_array_is_tried_with_what_a_release_knows(trainings: Any) -> None:
    made = trainings({"pair_01": {"unknown": ["delta"]}})
    finding = made.judge("upstream", "single-pair_01", "grpo")
    assert (finding.verdict, finding.evidence["not_in_this_release"]) == (Verdict.OK, ["delta"])
    *_, seed, partly = made.launches.asked[0]
    assert (seed, "pair_01" in partly, "resumed" in partly) == (0, True, False)


def test_settings_are_tried_together_whoever_asks_for_one(trainings: Any) -> None:
    made = trainings({}, entry("grpo-one", "silent"))
    together = launch_of("grpo", "single-beta").rows
    made.judge("upstream", next(row.label for row in together if row.name != "beta"), "grpo")
    made.judge_issue(made.catalog["grpo-one"], "upstream", "single-beta")
    first, second = (each[3] for each in made.launches.asked)
    assert len(first) > 1
    assert first == second == {row.name: row.setting for row in together}


def test_a_training_that_fails_is_blocked_by_the_issue_that_it_shows(trainings: Any) -> None:
    of = {"rewards_partial": {"failure": NAME_ERROR}}
    finding = trainings(of, entry("grpo-name", "broken")).judge("upstream", "single-rewards_partial", "grpo")
    assert (finding.verdict, finding.evidence["blocked_by"]) == (Verdict.BLOCKED, "grpo-name")
    assert "differing" in finding.evidence  # by which the verdict is as predicted
    assert trainings(of).judge("upstream", "single-rewards_partial", "grpo").verdict is Verdict.ERROR


def test_an_error_that_a_known_issue_explains_is_no_refusal(trainings: Any) -> None:
    of = {"refused_mapping": {"refused_with": NAME_ERROR}}
    assert trainings(of).judge("upstream", "single-refused_mapping", "grpo").verdict is Verdict.OK
    finding = trainings(of, entry("grpo-name", "broken")).judge("upstream", "single-refused_mapping", "grpo")
    assert (finding.verdict, finding.evidence["blocked_by"]) == (Verdict.BLOCKED, "grpo-name")


@pytest.mark.parametrize("predicted, verdict", [("silent", Verdict.SILENT), ("ok", Verdict.BLOCKED)])
def test_what_two_issues_may_be_is_that_of_which_it_is_predicted(
    predicted: str, verdict: Verdict, trainings: Any
) -> None:
    made = trainings({"beta": differing("gradients[w]")}, entry("grpo-one", predicted), entry("grpo-two", "silent"))
    finding = made.judge_issue(made.catalog["grpo-one"], "upstream", "single-beta")
    assert finding.verdict is verdict
    alone = trainings({"beta": differing("gradients[w]")}, entry("grpo-one", "ok"))
    assert alone.judge_issue(alone.catalog["grpo-one"], "upstream", "single-beta").verdict is Verdict.SILENT


def test_an_issue_of_what_is_only_logged_is_seen_after_another_one(trainings: Any) -> None:
    log, gradient = entry("grpo-log", "silent", quantity=r"logs\[kl\]"), entry("grpo-gradient", "silent")
    made = trainings({"beta": differing("logs[kl]", "gradients[w]")}, log, gradient)
    assert made.judge_issue(made.catalog["grpo-gradient"], "upstream", "single-beta").verdict is Verdict.SILENT
    made = trainings({"beta": differing("gradients[w]", "logs[kl]")}, log, gradient)
    finding = made.judge_issue(made.catalog["grpo-log"], "upstream", "single-beta")
    assert (finding.verdict, finding.evidence["blocked_by"]) == (Verdict.BLOCKED, "grpo-gradient")


def test_an_issue_of_a_value_that_a_release_does_not_know_is_absent(trainings: Any) -> None:
    made = trainings({"beta": {"unknown": ["beta"]}}, entry("grpo-one", "silent"))
    with pytest.raises(Absent, match="this release knows no beta"):
        made.judge_issue(made.catalog["grpo-one"], "upstream", "single-beta")
