"""The failure signature that both ends define, and how other observations are judged by it."""

from __future__ import annotations

import pytest

from pytest_trlcompat.bisect.failure_signature import FailureSignature, NoSignature, judge, signature_of
from pytest_trlcompat.bisect.observation import Fingerprint, Observation
from pytest_trlcompat.bisect.search import Answer, RangeProblem

BROKEN, ERROR = Fingerprint("broken"), Fingerprint("ValueError", "another thing that happened")


def seen(**checks: object) -> Observation:
    """``fsdp1="ok"``, or a failure, or ``None`` for an inconclusive check."""
    return Observation(
        passed={check: str(what) for check, what in checks.items() if isinstance(what, str)},
        failed={check: what for check, what in checks.items() if isinstance(what, Fingerprint)},
        inconclusive={check: "absent: no such trainer" for check, what in checks.items() if what is None},
        evidence={check: {"verdict": "broken" if what == BROKEN else "error"} for check, what in checks.items()},
    )


def test_the_signature_has_the_checks_that_passed_and_then_failed() -> None:
    good, bad = seen(a="ok", b="ok", c=BROKEN, d=None), seen(a=BROKEN, b="ok", c=BROKEN, d=BROKEN)
    assert signature_of(good, bad) == FailureSignature({"a": BROKEN})


def test_a_known_symptom_comes_before_other_failures() -> None:
    assert signature_of(seen(a="ok", b="ok"), seen(a=ERROR, b=BROKEN)) == FailureSignature({"b": BROKEN})
    assert signature_of(seen(a="ok", b="ok"), seen(a=ERROR, b="ok")) == FailureSignature({"a": ERROR})


@pytest.mark.parametrize(
    "good, bad, problem",
    [
        (seen(a=BROKEN), seen(a="ok"), RangeProblem.SWAPPED),
        (seen(a=BROKEN), seen(a=BROKEN), RangeProblem.BOTH_BAD),
        (seen(a="ok"), seen(a="ok"), RangeProblem.BOTH_GOOD),
        (seen(a=None), seen(a=BROKEN), RangeProblem.INCONCLUSIVE_END),
    ],
)
def test_ends_that_do_not_differ_have_no_signature(good: Observation, bad: Observation, problem: RangeProblem) -> None:
    with pytest.raises(NoSignature) as raised:
        signature_of(good, bad)
    assert raised.value.problem is problem


TWO = FailureSignature({"a": BROKEN, "b": BROKEN})


@pytest.mark.parametrize(
    "observation, answer, why",
    [
        (seen(a="ok", b="ok", c=ERROR), Answer.GOOD, "a: ok; b: ok"),
        (seen(a="ok", b=BROKEN), Answer.BAD, "b: broken"),
        (seen(a=ERROR, b=BROKEN), Answer.BAD, "b: broken"),
        (seen(a="ok", b=ERROR), Answer.INCONCLUSIVE, "b: another failure: ValueError: another thing that happened"),
        (seen(a="ok", b=None), Answer.INCONCLUSIVE, "b: absent: no such trainer"),
        (seen(a="ok"), Answer.INCONCLUSIVE, "b: not measured"),
        (Observation(reason="untestable: no\nsolution"), Answer.INCONCLUSIVE, "untestable: no solution"),
        (Observation(), Answer.INCONCLUSIVE, "nothing was measured"),
    ],
)
def test_observations_are_judged_by_the_signature(observation: Observation, answer: Answer, why: str) -> None:
    judgement = judge(observation, TWO)
    assert (judgement.answer, judgement.why) == (answer, why)


def test_the_name_of_a_single_check_is_left_out() -> None:
    assert judge(seen(a=BROKEN), FailureSignature({"a": BROKEN})).why == "broken"
    assert judge(seen(a=ERROR), None).why == "ValueError: another thing that happened"
    assert judge(seen(b="another text", a="ok"), FailureSignature({"a": BROKEN})).why == "ok"
    assert judge(seen(a="ok", b="ok"), None).answer is Answer.GOOD


def test_observations_survive_json() -> None:
    observation = Observation({"a": "ok"}, {"b": ERROR}, {"c": "x"}, "", {"a": {"n": 1}}, 0.1, 2.0, 3.0, True)
    assert Observation.from_json(observation.to_json()) == observation
