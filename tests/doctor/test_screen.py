"""Without a training: the worst first, siblings together, on a screen; counts; and the status by severity."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest

from pytest_trlcompat import cli
from pytest_trlcompat.catalog.issue import SEVERITIES, SEVERITY_TEXTS, KnownIssue
from pytest_trlcompat.doctor.diagnosis import Diagnosis
from pytest_trlcompat.doctor.text import show

from .made_up import Run, ask, issue, predict

NEWEST = ("trl==1.16.0", "transformers==5.23.0", "torch==2.13.0", "accelerate==1.15.0", "deepspeed==0.19.8")


def _known(name: str, severity: str = "weights", by: str = "") -> KnownIssue:
    prediction = predict("blocked" if by else "broken")
    entry = issue(dataclasses.replace(prediction, by=by), name=name)
    return dataclasses.replace(entry, severity=severity)


def _ids(diagnosis: Diagnosis) -> list[str]:
    return [applicable.issue.id for applicable in diagnosis.issues]


def _shown(diagnosis: Diagnosis) -> list[str]:
    file = io.StringIO()
    show(diagnosis, file, everything=False)
    return file.getvalue().splitlines()


def test_what_ends_the_first_step_comes_before_all_then_severity_with_siblings_together() -> None:
    later = dataclasses.replace(_known("grpo-later", "crash"), when={"use_vllm": True})
    entries = [
        *(_known("dpo-b", "numbers"), _known("sft-a"), _known("grpo-start", "crash"), _known("dpo-a")),
        *(_known("sft-b", "numbers"), later, _known("grpo-c", by="grpo-start")),
    ]
    found = ask("trl==1.16.0", issues=entries)
    assert _ids(found) == ["grpo-start", "dpo-a", "sft-a", "grpo-later", "dpo-b", "sft-b", "grpo-c"]


def test_what_ends_a_plain_training_comes_before_what_ends_a_special_one() -> None:
    import_fails, special = _known("trl-import", "crash"), _known("dpo-evaluated-raw", "crash")
    default = dataclasses.replace(_known("dpo-warnings", "crash"), strategies=("single-default",))
    special = dataclasses.replace(special, strategies=("single-evaluation_given",))
    hidden = dataclasses.replace(_known("dpo-a", by="dpo-evaluated-raw"), strategies=("single",))
    found = ask("trl==1.16.0", issues=[_known("dpo-b"), special, hidden, default, import_fails])
    assert _ids(found) == ["trl-import", "dpo-warnings", "dpo-evaluated-raw", "dpo-b", "dpo-a"]


def test_an_issue_that_ends_nothing_stands_by_its_severity_whatever_it_stops() -> None:
    entries = [_known("grpo-slow", "cost"), _known("grpo-a"), _known("grpo-c", by="grpo-slow")]
    assert _ids(ask("trl==1.16.0", issues=entries)) == ["grpo-a", "grpo-slow", "grpo-c"]


def test_more_than_a_screen_is_shown_in_brief_with_its_counts() -> None:
    entries = [
        *(_known(f"{trainer}-same") for trainer in ("dpo", "grpo", "sft")),
        *(_known(f"grpo-{number:02}", "cost") for number in range(40)),
        *(_known("grpo-first", "crash"), _known("grpo-hidden", by="grpo-first")),
        dataclasses.replace(_known("grpo-unknown"), predictions=(predict("broken", trl="<1"),)),
    ]
    lines = _shown(ask("trl==1.16.0", issues=entries))
    assert len(lines) <= 40
    first = lines.index("44 known issues affect this stack; 1 more cannot be judged.")
    assert lines[first + 1 : first + 5] == [
        "The catalogue makes no prediction for this stack about grpo-unknown.",
        "",
        "crash    grpo-first: title",
        "weights  dpo-same, grpo-same, sft-same: title",
    ]
    (counting,) = [line for line in lines if "are shown" in line]
    numbers = re.match(
        r"(\d+) of 44 are shown, (\d+) are not; 1 more cannot be judged; of 1 nothing is predicted", counting
    )
    assert numbers is not None
    listed = [
        name for line in lines if re.match("crash|weights|cost", line) for name in line[9:].split(": ")[0].split(", ")
    ]
    assert len(listed) == int(numbers[1]) > 20
    assert int(numbers[1]) + int(numbers[2]) == 44


def test_what_fits_on_a_screen_is_shown_in_full() -> None:
    found = ask("trl==1.16.0", issues=[_known("grpo-a")])
    in_full = io.StringIO()
    show(found, in_full)
    assert _shown(found) == in_full.getvalue().splitlines()


def test_the_newest_stack_on_a_screen_and_everything_by_an_option(doctor: Run) -> None:
    lines = doctor(*NEWEST)[1].splitlines()
    assert len(lines) <= 40
    severities = [line.split()[0] for line in lines if line.startswith(SEVERITIES)]
    assert severities[0] == "crash"
    after = severities[severities.index("weights") :]
    assert after == sorted(after, key=SEVERITIES.index)
    everything = doctor(*NEWEST, "--all")[1]
    issues = json.loads(doctor(*NEWEST, "--json")[1])["issues"]
    judged = [each for each in issues if not all(effect.get("blocked_by") for effect in each["when"])]
    flat = " ".join(everything.split())
    assert all(f"{each['id']} ({each['severity']}): " in flat for each in judged)


def test_the_counts_are_of_what_is_listed(doctor: Run) -> None:
    document = json.loads(doctor(*NEWEST, "--json")[1])
    counts = document["counts"]
    blocked = [each for each in document["issues"] if all(effect.get("blocked_by") for effect in each["when"])]
    assert counts["cannot_be_judged"] == len(blocked) > 0
    assert counts["affect"] + counts["cannot_be_judged"] == len(document["issues"])
    assert counts["not_predicted"] == len(document["unpredicted"])
    assert counts["not_predicted"] + counts["do_not_affect"] == len(document["clear"])
    assert not any(each["id"].startswith("conformance-") for each in document["issues"])


@pytest.mark.parametrize(
    ("severity", "by", "statuses"),
    [
        ("weights", "", [1, 1, 1, 1, 1]),
        ("numbers", "", [0, 0, 1, 1, 1]),
        ("message", "", [0, 0, 0, 0, 1]),
        ("weights", "grpo-first", [0, 1, 1, 1, 1]),  # nobody can judge it: grpo-first, a crash, counts alone
    ],
)
def test_the_status_by_severity(severity: str, by: str, statuses: list[int]) -> None:
    entries = [_known("grpo-a", severity, by=by), *([_known("grpo-first", "crash")] if by else [])]
    found = ask("trl==1.16.0", issues=entries)
    assert [int(found.reaches(name)) for name in SEVERITIES] == statuses


def test_the_programs_status_by_severity(doctor: Run, small: KnownIssue) -> None:
    assert doctor("trl==0.15.2", "--fail-on", "weights")[0] == 1
    assert doctor("trl==0.18.2", "--fail-on", "weights")[0] == 0
    assert doctor("trl==0.15.2", "--strategy", "single", "--fail-on", "message")[0] == 0


def test_the_page_of_an_issue_says_its_severity(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["issue", "sft-logits"]) == 0
    assert f"- Severity: weights: {SEVERITY_TEXTS['weights']}\n" in capsys.readouterr().out
