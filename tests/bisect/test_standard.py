"""The standard that both ends set, and what other observations are when they are held against it."""

from __future__ import annotations

import pytest

from pytest_trlcompat.bisect.observation import Fingerprint, Observation
from pytest_trlcompat.bisect.search import Answer, Refusal
from pytest_trlcompat.bisect.standard import NoStandard, Standard, judge, set_standard

BROKEN, ERROR = Fingerprint("broken"), Fingerprint("ValueError", "another thing that happened")


def seen(**checks: object) -> Observation:
    """``fsdp1="ok"``, or a failure, or ``None`` for what cannot tell."""
    return Observation(
        passed={check: str(what) for check, what in checks.items() if isinstance(what, str)},
        failed={check: what for check, what in checks.items() if isinstance(what, Fingerprint)},
        untold={check: "absent: no such trainer" for check, what in checks.items() if what is None},
        evidence={check: {"verdict": "broken" if what == BROKEN else "error"} for check, what in checks.items()},
    )


def test_checks_that_turned_are_watched() -> None:
    good, bad = seen(a="ok", b="ok", c=BROKEN, d=None), seen(a=BROKEN, b="ok", c=BROKEN, d=BROKEN)
    assert set_standard(good, bad) == Standard({"a": BROKEN})


def test_a_known_symptom_counts_before_other_failures() -> None:
    assert set_standard(seen(a="ok", b="ok"), seen(a=ERROR, b=BROKEN)) == Standard({"b": BROKEN})
    assert set_standard(seen(a="ok", b="ok"), seen(a=ERROR, b="ok")) == Standard({"a": ERROR})


@pytest.mark.parametrize(
    "good, bad, why",
    [
        (seen(a=BROKEN), seen(a="ok"), Refusal.SWAPPED),
        (seen(a=BROKEN), seen(a=BROKEN), Refusal.BOTH_BAD),
        (seen(a="ok"), seen(a="ok"), Refusal.BOTH_GOOD),
        (seen(a=None), seen(a=BROKEN), Refusal.UNKNOWN_END),
    ],
)
def test_ends_that_set_no_standard(good: Observation, bad: Observation, why: Refusal) -> None:
    with pytest.raises(NoStandard) as raised:
        set_standard(good, bad)
    assert raised.value.why is why


TWO = Standard({"a": BROKEN, "b": BROKEN})


@pytest.mark.parametrize(
    "observation, answer, why",
    [
        (seen(a="ok", b="ok", c=ERROR), Answer.GOOD, "a ok; b ok"),
        (seen(a="ok", b=BROKEN), Answer.BAD, "b broken"),
        (seen(a=ERROR, b=BROKEN), Answer.BAD, "b broken"),
        (seen(a="ok", b=ERROR), Answer.UNKNOWN, "b another failure: ValueError: another thing that happened"),
        (seen(a="ok", b=None), Answer.UNKNOWN, "b absent: no such trainer"),
        (seen(a="ok"), Answer.UNKNOWN, "b not measured"),
        (Observation(reason="untestable: no\nsolution"), Answer.UNKNOWN, "untestable: no solution"),
        (Observation(), Answer.UNKNOWN, "nothing was measured"),
    ],
)
def test_observations_are_held_against_the_standard(observation: Observation, answer: Answer, why: str) -> None:
    judgement = judge(observation, TWO)
    assert (judgement.answer, judgement.why) == (answer, why)


def test_with_one_check_its_name_is_left_out() -> None:
    assert judge(seen(a=BROKEN), Standard({"a": BROKEN})).why == "broken"
    assert judge(seen(a=ERROR), None).why == "ValueError: another thing that happened"
    assert judge(seen(a="ok", b="ok"), None).answer is Answer.GOOD


def test_observations_survive_json() -> None:
    observation = Observation({"a": "ok"}, {"b": ERROR}, {"c": "x"}, "", {"a": {"n": 1}}, 0.1, 2.0, 3.0, True)
    assert Observation.from_json(observation.to_json()) == observation
