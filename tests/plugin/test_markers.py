"""The marker ``versions``: which markers are refused, and what a skip says."""

from __future__ import annotations

import pytest

from pytest_trlcompat.plugin import markers

INSTALLED = {"trl": "0.15.2", "transformers": "4.48.3", "torch": "2.13.0+cpu"}


def reason(*marks: pytest.MarkDecorator) -> str | None:
    return markers.skip_reason([mark.mark for mark in marks], INSTALLED)


@pytest.mark.parametrize(
    "ranges",
    [
        {"trl": ">=0.15"},
        {"trl": ">=0.15,<0.16", "transformers": "<4.50"},
        {"transformers": "==4.48.*"},
        {"torch": "==2.13.0"},  # a local build is the release
        {"trl": ""},  # any version, as long as it is installed
    ],
)
def test_satisfied_ranges_do_not_skip(ranges: dict[str, str]) -> None:
    assert reason(pytest.mark.versions(**ranges)) is None


@pytest.mark.parametrize(
    "ranges, text",
    [
        ({"trl": ">=0.18"}, "needs trl>=0.18; found trl 0.15.2"),
        # As strings, "4.48.3" is not below "4.5"; as versions neither, and "4.100" is above both.
        ({"transformers": "<4.5"}, "needs transformers<4.5; found transformers 4.48.3"),
        ({"transformers": ">=4.100"}, "needs transformers>=4.100; found transformers 4.48.3"),
        ({"trl": ">=0.15", "deepspeed": ">=0.16"}, "needs deepspeed>=0.16; found no deepspeed"),
        (
            {"trl": "<0.15", "transformers": "<4", "peft": ">=1"},
            "needs trl<0.15, transformers<4, peft>=1; found trl 0.15.2, transformers 4.48.3, no peft",
        ),
    ],
)
def test_the_skip_says_what_is_needed_and_what_was_found(ranges: dict[str, str], text: str) -> None:
    assert reason(pytest.mark.versions(**ranges)) == text


def test_reason_and_issue_are_shown() -> None:
    mark = pytest.mark.versions(trl=">=0.18", reason="prepare_fsdp arrived there", issue="trl#3348")
    assert reason(mark) == "needs trl>=0.18; found trl 0.15.2: prepare_fsdp arrived there [trl#3348]"


def test_all_markers_of_a_test_must_hold() -> None:
    closest, outer = pytest.mark.versions(trl=">=0.15"), pytest.mark.versions(transformers=">=5")
    assert reason(closest, outer) == "needs transformers>=5; found transformers 4.48.3"
    assert reason(closest, closest) is None


@pytest.mark.parametrize(
    "mark, text",
    [
        (
            pytest.mark.versions(">=0.15"),
            "takes ranges by package, like versions(trl='>=0.15'), not positional arguments ('>=0.15',)",
        ),
        (pytest.mark.versions(), "has no range; write at least one, like versions(trl='>=0.15')"),
        (pytest.mark.versions(reason="later"), "has no range; write at least one, like versions(trl='>=0.15')"),
        (
            pytest.mark.versions(tlr=">=0.15"),
            "unknown package 'tlr' in a version range; known are "
            "torch, transformers, trl, accelerate, deepspeed, peft, datasets, vllm, liger-kernel, pillow, torchvision",
        ),
        (
            pytest.mark.versions(trl="0.15"),
            "malformed version range '0.15' for trl; write it like '>=0.15,<0.18' or '==4.48.*'",
        ),
        (
            pytest.mark.versions(trl=0.15),
            "the version range of trl must be a string like '>=0.15,<0.18', not 0.15",
        ),
        (pytest.mark.versions(trl=">=0.15", reason=3), "reason must be a string, not 3"),
        (pytest.mark.versions(trl=">=0.15", issue=["a"]), "issue must be a string, not ['a']"),
    ],
)
def test_invalid_markers_are_refused(mark: pytest.MarkDecorator, text: str) -> None:
    with pytest.raises(markers.MarkerError) as caught:
        markers.parse_mark(mark.mark)
    assert str(caught.value) == text


def test_a_later_marker_is_checked_even_when_the_first_one_skips() -> None:
    with pytest.raises(markers.MarkerError, match="unknown package 'tlr'"):
        reason(pytest.mark.versions(trl=">=99"), pytest.mark.versions(tlr=">=0"))
