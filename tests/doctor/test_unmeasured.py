"""No release that nobody measured is judged without saying so."""

from __future__ import annotations

import json
import re

from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.doctor.unmeasured import describe

from .made_up import Run, ask, cell, issue, predict

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
