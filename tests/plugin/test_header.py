"""What the header of a pytest run says of the installed stack, in one line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.plugin import header

from ..doctor.made_up import ask, issue, predict


def test_the_header_names_the_issues_that_affect_the_stack_in_one_line(small: KnownIssue) -> None:
    installed = {"trl": "0.15.2", "transformers": "4.48.3", "deepspeed": "0.16.4"}
    assert header.line(installed) == "1 known issue affects this stack: one (broken under zero3); see: trlcompat doctor"
    assert header.line({**installed, "trl": "0.18.0"}) is None
    del installed["deepspeed"]
    assert header.line(installed) is None


def test_the_header_says_when_the_torch_was_not_measured(small: KnownIssue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "published_torches", lambda: ("2.13.0",))
    installed = {"trl": "0.15.2", "deepspeed": "0.16.4", "torch": "2.6.0+cu124"}
    differs = "measured with torch 2.13.0, yours is 2.6.0+cu124; see: trlcompat doctor"
    assert header.line(installed) == f"1 known issue affects this stack: one (broken under zero3); {differs}"
    assert header.line({**installed, "trl": "0.18.0"}) == f"no known issue affects this stack; {differs}"
    assert header.line({**installed, "trl": "0.18.0", "torch": "2.13.1"}) is None
    monkeypatch.setattr(evidence, "published_torches", tuple)
    assert header.line({**installed, "trl": "0.18.0"}) is None


@pytest.mark.parametrize("installed", [{}, {"transformers": "4.48.3"}, {"trl": "main"}])
def test_the_header_says_nothing_of_what_cannot_be_judged(installed: dict[str, str]) -> None:
    assert header.line(installed) is None


class Kept(dict[str, object]):
    """As pytest's cache."""

    def get(self, key: str, default: object, /) -> object:  # type: ignore[override]
        return dict.get(self, key, default)

    def set(self, key: str, value: object, /) -> None:
        self[key] = json.loads(json.dumps(value))


def test_the_headers_answer_is_kept_until_stack_or_catalogue_change(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []

    def line(installed: dict[str, str]) -> str:
        evaluated.append(installed["trl"])
        return f"of {installed['trl']}"

    monkeypatch.setattr(header, "line", line)
    cache = Kept()
    assert [header.line_once({"trl": version}, cache) for version in ("1", "1", "2", "2")] == ["of 1"] * 2 + [
        "of 2"
    ] * 2
    assert evaluated == ["1", "2"]
    monkeypatch.setattr(known_issues, "fingerprint", lambda: (1, 2))
    assert header.line_once({"trl": "2"}, cache) == "of 2"
    assert evaluated == ["1", "2", "2"]
    assert header.line_once({"trl": "2"}, None) == "of 2"
    assert evaluated == ["1", "2", "2", "2"]
    monkeypatch.setattr(evidence, "fingerprint", lambda: (3, 4))
    header.line_once({"trl": "2"}, cache)
    assert evaluated == ["1", "2", "2", "2", "2"]


def test_that_no_issue_applies_is_cached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(header, "line", lambda _: calls.append(1))
    cache = Kept()
    assert [header.line_once({"trl": "1"}, cache) for _ in range(2)] == [None, None]
    assert calls == [1]


def test_the_header_names_the_worst_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = ["wasteful", "broken", "ok", "silent", "hang", "broken", "error"]
    entries = [issue(predict(verdict), name=f"{number}-{verdict}") for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(known_issues, "load", lambda: {entry.id: entry for entry in entries})
    assert header.line({"trl": "1.0.0", "deepspeed": "0.19"}) == (
        "6 known issues affect this stack: 3-silent (silent under single zero3), 1-broken (broken under single zero3), "
        "5-broken (broken under single zero3), 6-error (error under single zero3), and 2 more; see: trlcompat doctor"
    )


def test_the_header_does_not_count_what_cannot_be_judged_as_affecting(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = issue(dataclasses.replace(predict("blocked"), by="one"), name="two")
    entries = [issue(predict("broken")), stopped]
    monkeypatch.setattr(known_issues, "load", lambda: {entry.id: entry for entry in entries})
    installed = {"trl": "1.0.0", "deepspeed": "0.19"}
    assert header.line(installed) == (
        "1 known issue affects this stack: one (broken under single zero3); 1 more cannot be judged; "
        "see: trlcompat doctor"
    )
    entries.pop(0)
    assert header.line(installed) == (
        "no known issue is predicted to affect this stack, but 1 cannot be judged; see: trlcompat doctor"
    )


def test_the_header_counts_what_the_doctor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [issue(predict("broken"), name=name) for name in ("conformance-grpo", "one")]
    monkeypatch.setattr(known_issues, "load", lambda: Catalog({entry.id: entry for entry in entries}))
    assert header.line({"trl": "1.0.0", "deepspeed": "0.19"}) == (
        "1 known issue affects this stack: one (broken under single zero3); see: trlcompat doctor"
    )
    assert len(ask("trl==1.0.0", issues=entries).issues) == 1
