"""The page of what conformance found."""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.findings_page import page, releases_in

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LISTED = tomllib.loads((ROOT / "fixtures" / "releases.toml").read_text(encoding="utf-8"))["trl"]
RELEASES = {version: entry["requires"] for version, entry in LISTED.items()}
ISSUES = known_issues.load()


def test_releases_are_those_of_which_a_problem_is_predicted() -> None:
    assert releases_in(ISSUES["grpo-completions-table"], RELEASES) == ["0.16.0", "0.16.1"]
    found = releases_in(ISSUES["grpo-assistant-prefix"], RELEASES)
    assert (found[0], found[1], found[-1]) == ("0.14.0", "0.25.0", "1.16.0")


def test_a_release_that_requires_what_is_right_has_no_part_in_it() -> None:
    norms = ISSUES["transformers-decayed-norms"]  # with transformers <4.53
    required = {"0.14.0": ["transformers>=4.46"], "0.20.0": ["transformers>=4.53.2"], "0.19.0": []}
    assert releases_in(norms, required) == ["0.14.0", "0.19.0"]


def test_a_line_has_the_releases_the_setting_and_what_upstream_knows() -> None:
    lines = page(ISSUES.values(), RELEASES).splitlines()
    of = {line.split("]")[0].removeprefix("| ["): line for line in lines if line.startswith("| [")}
    assert set(of) == {each.id for each in ISSUES.values() if each.suite == "conformance/test_findings.py"}
    cells = of["grpo-assistant-prefix"].split(" | ")
    assert cells[1:6] == ["silent", "0.14.0, 0.25.0 to 1.16.0", "", "`data='assistant_last'`", "no"]
    cells = of["grpo-completions-table"].split(" | ")
    assert cells[2] == "0.16.0 to 0.16.1"
    assert cells[5].startswith("[trl 3217](https://github.com/huggingface/trl/pull/3217)")


def test_a_release_without_the_trainer_has_no_part_in_it() -> None:
    found = releases_in(ISSUES["ppo-max-grad-norm"], RELEASES)
    assert (found[0], found[-1]) == ("0.9.6", "1.12.0")
