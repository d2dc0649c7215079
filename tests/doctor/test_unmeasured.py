"""No release that nobody measured is judged without saying so."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest

from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.doctor.beyond import describe, other_python, other_torch
from pytest_trlcompat.doctor.stack_spec import Mention, of_mentions
from pytest_trlcompat.doctor.text import show

from .made_up import Run, ask, cell, issue, only, predict

BOTH = issue(predict("broken", trl="<0.14", transformers=">=4.40"), predict("ok"))
CELLS = [cell("0.15.2", "4.48.3", single="ok"), cell("0.18.2", "4.49.0", single="ok")]


def unmeasured(*pins: str) -> str:
    found = ask(*pins, issues=[BOTH], cells=CELLS)
    return describe(found.unmeasured, found.spec.texts)


def test_a_release_that_no_cell_has_is_named_with_the_measured_ones_around_it() -> None:
    assert unmeasured("trl==0.16.0", "transformers==4.48.3") == "trl 0.16.0 (nearest: 0.15.2, 0.18.2)"
    assert unmeasured("trl==0.14.0", "transformers==4.50.3") == (
        "trl 0.14.0 (nearest: 0.15.2), transformers 4.50.3 (nearest: 4.49.0)"
    )


def test_measured_releases_are_not_named() -> None:
    assert unmeasured("trl==0.15.2", "transformers==4.48.3") == ""
    assert unmeasured("trl==0.15.2") == ""
    assert unmeasured("transformers==4.49.0") == ""


def test_two_releases_that_no_cell_has_together_are_named() -> None:
    assert unmeasured("trl==0.15.2", "transformers==4.49.0") == "trl 0.15.2 with transformers 4.49.0"


def test_a_range_is_measured_if_one_of_it_is() -> None:
    assert unmeasured("trl>=0.15,<0.16") == ""
    assert unmeasured("trl>=0.16,<0.18") == "trl >=0.16,<0.18"


def test_packages_on_which_no_prediction_depends_are_not_named() -> None:
    assert unmeasured("trl==0.15.2", "transformers==4.48.3", "datasets==3.0.0", "torch==2.1.0") == ""


def test_that_no_issue_affects_an_unmeasured_release_is_a_prediction(doctor: Run, small: KnownIssue) -> None:
    status, out, _ = doctor("trl==0.19.0")
    assert status == 0
    assert " ".join(out.split()).partition("deepspeed, peft, datasets ")[2] == (
        "not measured: trl 0.19.0 (nearest: 0.18.2); what follows is predicted from other releases, also that an issue "
        "does not affect this stack No known issue is predicted to affect this stack; the nearest measured cell is "
        "trl0.18.2-tf4.49.0."
    )
    assert "not measured" not in doctor("trl==0.18.2")[1]
    assert json.loads(doctor("trl==0.19.0", "--json")[1])["unmeasured"] == {"trl": ["0.18.2"]}


def test_of_the_published_sweep_the_doctor_names_just_those_releases_of_trl_that_no_cell_has(doctor: Run) -> None:
    """The release that a person uses between two measured ones is where a prediction misleads."""
    measured = {each.versions["trl"] for each in evidence.published().cells}
    for release in ("0.22.1", "0.22.2", "1.16.0"):
        out = " ".join(doctor(f"trl=={release}", "--trainer", "grpo", "--strategy", "single")[1].split())
        named = re.search(rf"not measured: trl {re.escape(release)} \(nearest: ([^)]+)\)", out)
        assert (named is None) == (release in measured), release


def test_a_torch_that_was_not_measured_makes_the_all_clear_a_prediction(doctor: Run, small: KnownIssue) -> None:
    cells = tuple(cell(trl, torch="2.13.0", single="ok", zero3="ok") for trl in ("0.15.2", "0.18.2"))
    for torch, said in (("2.13.1", "No known issue affects"), ("2.99.0", "No known issue is predicted to affect")):
        found = ask("trl==0.18.2", f"torch=={torch}", issues=[small], cells=cells)
        file = io.StringIO()
        show(found, file)
        assert f"\n{said} this stack; the nearest measured cell is trl0.18.2" in file.getvalue()


def test_the_torch_of_the_nearest_cells_is_named_where_it_is_not_the_stacks() -> None:
    cells = [cell(trl, torch="2.13.0", single="broken", zero3="broken") for trl in ("0.15.2", "0.17.0")]
    texts = [
        only(ask(trl, "torch==2.99.0", cells=cells)).effects[0].confidence.describe()
        for trl in ("trl==0.16.0", "trl==0.12.0")
    ]
    assert texts == [
        "between trl0.15.2-tf4.49.0-torch2.13.0 and trl0.17.0-tf4.49.0-torch2.13.0, which both gave this verdict, with "
        "torch 2.13.0",
        "outside the measured range; the nearest cell with this verdict is trl0.15.2-tf4.49.0-torch2.13.0, with torch "
        "2.13.0",
    ]
    assert "with torch" not in only(ask("trl==0.16.0", "torch==2.13.1", cells=cells)).effects[0].confidence.describe()


def test_of_several_torches_those_that_were_not_measured_are_named() -> None:
    spec = of_mentions([Mention.of_version("torch", "2.13.0", "here")], "here", complete=False)
    for versions, text in (
        (parse("==2.13.0") | parse("==2.99.0"), "measured with torch 2.13.0, not with 2.99.0"),
        (parse("==2.13.0") | parse("==2.13.1"), ""),
        (parse(">=2.6"), ""),
    ):
        asked = dataclasses.replace(spec, versions={**spec.versions, "torch": versions})
        assert other_torch(asked, ["2.13.0"]) == text


@pytest.mark.parametrize(
    ("python", "text"),
    [
        ("", ""),
        ("3.9", "measured with Python 3.11 to 3.13, yours is 3.9"),
        ("3.11", ""),
        ("3.12", ""),
        ("3.14", "measured with Python 3.11 to 3.13, yours is 3.14"),
    ],
)
def test_a_python_beyond_what_was_measured_is_named(doctor: Run, small: KnownIssue, python: str, text: str) -> None:
    spec = of_mentions([Mention.of_version("trl", "0.18.2", "here")], "here", complete=False)
    cells = ["trl0.18.2-tf4.49.0", "trl0.17.0-tf4.49.0-py3.13"]
    assert other_python(dataclasses.replace(spec, python=python), cells) == text


def test_a_python_that_was_not_measured_makes_the_all_clear_a_prediction(doctor: Run, small: KnownIssue) -> None:
    _, out, _ = doctor("trl==0.18.2", "--python", "3.99")
    assert "\npython: measured with Python 3.11, yours is 3.99\n" in out
    assert "\nNo known issue is predicted to affect this stack; " in out
    assert json.loads(doctor("trl==0.18.2", "--python", "3.99", "--json")[1])["python"].endswith("yours is 3.99")
    assert "python: " not in doctor("trl==0.18.2", "--python", "3.11")[1]
