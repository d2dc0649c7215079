"""The doctor's answers: what bites, under which conditions, how sure, and which pins are ok."""

from __future__ import annotations

import dataclasses
import io

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.bites import StrategyError
from pytest_trlcompat.doctor.diagnosis import Diagnosis, Finding
from pytest_trlcompat.doctor.text import show

from .made_up import BROKEN_BEFORE_018, ask, cell, issue, predict


def told(diagnosis: Diagnosis) -> list[tuple[tuple[str, ...], str, str]]:
    return [
        (bite.strategies, bite.verdict.value, bite.condition)
        for finding in diagnosis.findings
        for bite in finding.bites
    ]


def only(diagnosis: Diagnosis) -> Finding:
    (finding,) = diagnosis.findings
    return finding


# What bites


@pytest.mark.parametrize("verdict", ["broken", "silent", "wasteful", "error", "hang"])
def test_what_is_not_right_bites(verdict: str) -> None:
    assert told(ask("trl==0.15.2", issues=[issue(predict(verdict))])) == [(("single", "zero3"), verdict, "")]


@pytest.mark.parametrize("verdict", ["ok", "absent", "untestable"])
def test_what_is_right_or_not_there_does_not(verdict: str) -> None:
    found = ask("trl==0.15.2", issues=[issue(predict(verdict))])
    assert found.findings == ()
    assert found.clear == ("one",)
    assert found.untold == ()


def test_an_unknown_package_makes_a_condition_never_a_silent_no() -> None:
    entry = issue(predict("broken", trl="<0.18", accelerate=">=1.0,<1.9"), predict("ok"))
    assert told(ask("trl==0.15.2", issues=[entry])) == [(("single", "zero3"), "broken", "accelerate >=1.0,<1.9")]
    assert told(ask("trl==0.15.2", "accelerate==1.3.0", issues=[entry])) == [(("single", "zero3"), "broken", "")]
    assert told(ask("trl==0.15.2", "accelerate==1.9.0", issues=[entry])) == []
    assert told(ask("trl==0.15.2", "accelerate>=1.8", issues=[entry])) == [
        (("single", "zero3"), "broken", "accelerate <1.9")
    ]


def test_a_pre_release_bites_if_it_may() -> None:
    assert told(ask("trl==0.18.0.dev0")) == [(("single", "zero3"), "broken", "trl <0.18")]


def test_what_the_catalogue_does_not_cover_is_said() -> None:
    found = ask("trl==0.9.6", issues=[issue(predict("broken", trl=">=0.14,<0.18"), predict("ok", trl=">=0.18"))])
    assert (found.findings, found.clear, found.untold) == ((), ("one",), ("one",))


def test_an_issue_that_needs_a_package_shows_only_with_it() -> None:
    entry = issue(predict("broken"), needs=("peft",))
    assert told(ask("trl==0.15.2", issues=[entry], complete=True)) == []
    assert told(ask("trl==0.15.2", "peft==0.14.0", issues=[entry], complete=True)) != []
    assert told(ask("trl==0.15.2", issues=[entry])) != []


def test_the_worst_finding_comes_first() -> None:
    verdicts = ["wasteful", "broken", "silent"]
    entries = [issue(predict(verdict), name=verdict) for verdict in verdicts]
    found = ask("trl==1", issues=entries)
    assert [finding.issue.id for finding in found.findings] == ["silent", "broken", "wasteful"]


# Strategies


def test_without_deepspeed_its_strategies_are_left_out() -> None:
    found = ask("trl==0.15.2", complete=True)
    assert told(found) == [(("single",), "broken", "")]
    assert found.left_out == "zero1, zero2, zero3: deepspeed is not installed"
    assert ask("trl==0.15.2", "deepspeed==0.16.4", complete=True).left_out == ""


def test_a_strategy_narrows_and_takes_its_variants_along() -> None:
    entry = issue(
        predict("silent", ("zero3-swap",)),
        predict("broken", ("zero3*",)),
        predict("wasteful"),
        strategies=("single", "zero3", "zero3-swap"),
    )
    assert told(ask("trl==1", issues=[entry], strategies=["zero3"])) == [
        (("zero3",), "broken", ""),
        (("zero3-swap",), "silent", ""),
    ]
    assert told(ask("trl==1", issues=[entry], strategies=["zero3-swap"])) == [
        (("zero3-swap",), "silent", ""),
    ]
    assert told(ask("trl==1", issues=[entry], strategies=["fsdp1"])) == []


def test_a_variant_that_an_issue_does_not_know_is_judged_as_its_strategy() -> None:
    assert told(ask("trl==0.15.2", strategies=["zero3-mine"])) == [(("zero3",), "broken", "")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero4", "unknown strategy 'zero4'; known are single, ddp, "),
        ("zero3", "strategy zero3 needs deepspeed, which"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(name: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        ask("trl==0.15.2", strategies=[name], complete=True)


# How sure


@pytest.mark.parametrize(
    ("pins", "cells", "text"),
    [
        (["trl==0.15.2"], [cell("0.15.2", single="broken", zero3="broken")], "measured on trl0.15.2-tf4.49.0"),
        (
            ["trl==0.16.0"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken"), cell("0.17.0", single="broken")],
            "between trl0.15.2-tf4.49.0 and trl0.17.0-tf4.49.0, which gave it under single",
        ),
        (
            ["trl==0.16.0"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken"), cell("0.17.0", single="ok")],
            "beyond what was measured; the nearest that gave it under single is trl0.15.2-tf4.49.0",
        ),
        (
            ["trl==0.12.2"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken")],
            "beyond what was measured; the nearest that gave it under single is trl0.14.0-tf4.49.0",
        ),
        (["trl==0.16.0"], [cell("0.18.0", single="ok")], "not measured in the published sweep; the catalogue says so"),
        (["trl<0.18"], [cell("0.15.2", single="broken", zero3="broken")], "measured on trl0.15.2-tf4.49.0"),
        (
            ["trl>=0.16,<0.18"],
            [cell("0.15.2", single="broken", zero3="broken")],
            "beyond what was measured; the nearest that gave it is trl0.15.2-tf4.49.0",
        ),
    ],
)
def test_how_sure(pins: list[str], cells: list[MeasuredCell], text: str) -> None:
    (bite,) = only(ask(*pins, cells=cells)).bites
    assert bite.sure.describe() == text


def test_between_means_in_every_package_that_decides() -> None:
    entry = issue(predict("broken", trl="<0.18", transformers=">=4.40"), predict("ok"), strategies=("single",))
    cells = [cell("0.15.2", "4.48.3", single="broken"), cell("0.17.0", "4.50.3", single="broken")]
    inside = ask("trl==0.16.0", "transformers==4.49.0", issues=[entry], cells=cells)
    outside = ask("trl==0.16.0", "transformers==4.52.4", issues=[entry], cells=cells)
    crossed = [cell("0.15.2", "4.50.3", single="broken"), cell("0.17.0", "4.48.3", single="broken")]
    levels = [only(found).bites[0].sure.level.value for found in (inside, outside)]
    assert levels == ["between", "beyond"]
    across = only(ask("trl==0.16.0", "transformers==4.49.0", issues=[entry], cells=crossed)).bites[0].sure
    assert across.cells == ("trl0.15.2-tf4.50.3", "trl0.17.0-tf4.48.3")


def test_strategies_that_were_not_measured_borrow_from_one_that_was() -> None:
    (bite,) = only(ask("trl==0.15.2", cells=[cell("0.15.2", zero3="broken")])).bites
    assert bite.strategies == ("single", "zero3")
    assert bite.sure.describe() == "measured under zero3 on trl0.15.2-tf4.49.0"


def test_what_was_measured_to_bite_bites_though_the_catalogue_says_no() -> None:
    found = ask("trl==0.18.0", cells=[cell("0.18.0", single="error", zero3="ok")])
    assert told(found) == [(("single",), "error", "")]
    (bite,) = only(found).bites
    assert bite.why == "measured so, though the catalogue predicts otherwise"
    assert told(ask("trl==0.18.1", cells=[cell("0.18.0", single="error", zero3="ok")])) == []


def test_a_cell_surprises_only_a_stack_of_which_all_that_decides_is_known() -> None:
    entry = issue(predict("ok", trl=">=0.18", transformers=">=4.40"), strategies=("single",))
    cells = [cell("0.18.0", "4.49.0", single="error")]
    assert told(ask("trl==0.18.0", "transformers==4.49.0", issues=[entry], cells=cells)) == [(("single",), "error", "")]
    assert told(ask("trl==0.18.0", issues=[entry], cells=cells)) == []


def test_a_measured_variant_tells_of_its_strategy_where_the_catalogue_does_not_tell_them_apart() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("ok"), strategies=())
    (bite,) = only(ask("trl==0.15.2", issues=[entry], cells=[cell("0.15.2", **{"zero3-swap": "broken"})])).bites
    assert bite.sure.describe() == "measured under zero3-swap on trl0.15.2-tf4.49.0"


def test_a_measured_variant_that_the_entry_does_not_list_is_told_with_its_reason() -> None:
    entry = issue(predict("broken", ("zero3-*",)), predict("ok"), strategies=())
    cells = [cell("0.15.2", **{"zero3": "ok", "zero3-swap": "broken"})]
    (bite,) = only(ask("trl==0.15.2", issues=[entry], cells=cells)).bites
    assert (bite.strategies, bite.why) == (("zero3-swap",), "broken because")
    assert bite.sure.describe() == "measured on trl0.15.2-tf4.49.0"


def test_a_cell_where_a_condition_does_not_hold_does_not_measure_it() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("broken", trl="<0.29"), predict("ok"), strategies=("single",))
    found = ask("transformers==4.49.0", issues=[entry], cells=[cell("0.18.2", single="broken")])
    assert [(bite.condition, bite.sure.level.value) for bite in only(found).bites] == [
        ("trl <0.18", "beyond"),
        ("trl >=0.18,<0.29", "measured"),
    ]


# Torch


def sure(*pins: str, cells: list[MeasuredCell]) -> tuple[str, str]:
    (bite,) = only(ask(*pins, cells=cells)).bites
    return bite.sure.level.value, bite.sure.describe()


NEW_TORCH = cell("0.15.2", torch="2.13.0", single="broken", zero3="broken")
OLD_TORCH = cell("0.15.2", torch="2.6.0", single="broken", zero3="broken")


@pytest.mark.parametrize(
    "torch", ["torch==2.13.0", "torch==2.13.0+cu130", "torch==2.13.1", "torch>=2.6", "trl==0.15.2"]
)
def test_a_cell_with_the_stacks_torch_measures_it(torch: str) -> None:
    told = ("measured", "measured on trl0.15.2-tf4.49.0-torch2.13.0")
    assert sure("trl==0.15.2", torch, cells=[NEW_TORCH]) == told


@pytest.mark.parametrize("torch", ["torch==2.6.0", "torch==2.12.1", "torch==2.14.0", "torch<2.13", "torch==2.130.0"])
def test_a_cell_with_another_torch_does_not_and_says_so(torch: str) -> None:
    assert sure("trl==0.15.2", torch, cells=[NEW_TORCH]) == (
        "other torch",
        "measured on trl0.15.2-tf4.49.0-torch2.13.0, with torch 2.13.0",
    )


def test_the_cell_with_the_stacks_torch_is_taken_where_there_is_one() -> None:
    cells = [NEW_TORCH, OLD_TORCH]
    for torch in ("2.6.0", "2.13.0"):
        told = ("measured", f"measured on trl0.15.2-tf4.49.0-torch{torch}")
        assert sure("trl==0.15.2", f"torch=={torch}", cells=cells) == told


def test_a_prediction_may_have_a_range_of_torch() -> None:
    entry = issue(predict("broken", trl="<0.18", torch=">=2.6"), predict("ok"), strategies=("single",))
    assert told(ask("trl==0.15.2", "torch==2.5.1", issues=[entry])) == []
    assert told(ask("trl==0.15.2", "torch==2.6.0", issues=[entry])) == [(("single",), "broken", "")]
    assert told(ask("trl==0.15.2", issues=[entry])) == [(("single",), "broken", "torch >=2.6")]
    cells = [cell("0.15.2", torch="2.6.0", single="broken"), cell("0.15.2", torch="2.13.0", single="broken")]
    (bite,) = only(ask("trl==0.15.2", "torch==2.9.1", issues=[entry], cells=cells)).bites
    assert (
        bite.sure.describe()
        == "between trl0.15.2-tf4.49.0-torch2.6.0 and trl0.15.2-tf4.49.0-torch2.13.0, which gave it"
    )
    below = cell("0.15.2", torch="2.5.1", single="ok")
    (bite,) = only(ask("trl==0.15.2", "torch==2.6.0", issues=[entry], cells=[below, *cells])).bites
    assert (bite.sure.level.value, bite.sure.cells) == ("measured", ("trl0.15.2-tf4.49.0-torch2.6.0",))


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        (["trl==0.15.2", "torch==2.6.0+cu124"], "measured with torch 2.12.1 and 2.13.0, yours is 2.6.0+cu124"),
        (["trl==0.15.2", "torch<2.7"], "measured with torch 2.12.1 and 2.13.0, yours is <2.7"),
        (["trl==0.15.2", "torch==2.12.0"], ""),
        (
            ["trl==0.15.2", "torch==2.14.0", "transformers==4.49.0"],
            "measured with torch 2.12.1 and 2.13.0, yours is 2.14.0",
        ),
        (
            ["trl==0.15.2", "torch==2.12.1", "transformers==4.49.0"],
            "trl 0.15.2 with transformers 4.49.0: measured with torch 2.13.0, yours is 2.12.1",
        ),
        (["trl==0.15.2", "torch==2.12.1"], ""),  # of which transformers is not known
        (["trl==1.0.0", "torch==2.12.1", "transformers==4.49.0"], ""),
        (["trl==0.15.2", "transformers==4.49.0"], ""),
    ],
)
def test_a_torch_that_was_not_measured_is_said(pins: list[str], text: str) -> None:
    found = ask(*pins, cells=[NEW_TORCH, cell("1.0.0", torch="2.12.1", single="ok"), cell("1.1.0", torch="2.12.1")])
    assert found.torch == found.to_dict()["torch"] == text
    file = io.StringIO()
    show(found, file)
    assert (f"\ntorch: {text}\n" in file.getvalue()) is bool(text)
    assert ("torch:" in file.getvalue()) is bool(text)


def test_json_names_the_torch_that_was_measured() -> None:
    found = ask("trl==0.15.2", "torch==2.6.0", cells=[NEW_TORCH])
    (when,) = found.to_dict()["bites"][0]["when"]
    assert (when["sure"], when["measured_with_torch"]) == ("other torch", "2.13.0")


# Pins


def pins(diagnosis: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.cell.id, each.strategies) for each in diagnosis.pins]


def test_pins_keep_trl_where_they_can_and_are_the_nearest() -> None:
    entry = issue(predict("broken", transformers="<4.49"), predict("ok"))
    cells = [
        cell("0.17.0", "4.48.4", single="ok", zero3="ok"),
        cell("0.15.2", "4.55.0", single="ok", zero3="ok"),
        cell("0.15.2", "4.50.0", single="ok", zero3="ok"),
        cell("0.15.2", "4.47.0", single="broken", zero3="broken"),
    ]
    found = ask("trl==0.15.2", "transformers==4.48.3", issues=[entry], cells=cells, strategies=["single"])
    assert pins(found) == [("trl0.15.2-tf4.50.0", ("single",))]


def test_pins_that_need_another_trl_come_after_those_that_keep_it_for_some_strategies() -> None:
    entry = issue(predict("broken", ("zero3",), trl="<0.18"), predict("ok"))
    cells = [
        cell("0.15.2", single="ok", zero3="broken"),
        cell("0.18.2", single="ok", zero3="ok"),
        cell("1.0.0", single="ok", zero3="ok"),
    ]
    assert pins(ask("trl==0.15.2", issues=[entry], cells=cells)) == [
        ("trl0.15.2-tf4.49.0", tuple(name for name in known_issues.STRATEGIES if name != "zero3")),
        ("trl0.18.2-tf4.49.0", known_issues.STRATEGIES),
    ]


def test_there_may_be_no_pins() -> None:
    found = ask("trl==0.15.2", cells=[cell("0.15.2", single="broken", zero3="broken")], strategies=["single"])
    assert pins(found) == []
    file = io.StringIO()
    show(found, file)
    assert " ".join(file.getvalue().split()).endswith(
        "No cell of the sweep of 2026-11-21 is ok for all issues under single; --strategy and --trainer leave out what "
        "you do not use."
    )


def test_pins_for_most_strategies_stand_in_for_pins_for_all() -> None:
    entry = issue(predict("broken", ("zero3",)), predict("ok"))
    cells = [cell("0.17.0", single="ok", zero3="broken"), cell("0.16.1", single="ok", zero3="broken")]
    most = tuple(name for name in known_issues.STRATEGIES if name != "zero3")
    assert pins(ask("trl==0.16.0", issues=[entry], cells=cells)) == [("trl0.16.1-tf4.49.0", most)]


def test_a_cell_that_has_no_such_strategy_is_not_ok_under_it() -> None:
    entry = issue(predict("absent", ("fsdp2",), trl="<0.18"), predict("ok"), strategies=())
    other = issue(predict("broken", trl="==0.16.0"), predict("ok"), name="two", strategies=())
    cells = [cell("0.17.0", single="ok", fsdp2="absent"), cell("1.0.0", single="ok", fsdp2="ok")]
    found = ask("trl==0.16.0", issues=[entry, other], cells=cells, strategies=["fsdp2"])
    assert pins(found) == [("trl1.0.0-tf4.49.0", ("fsdp2",))]


def test_verdicts_on_issues_that_are_left_out_do_not_count() -> None:
    other = issue(predict("broken", trl="<0.18"), predict("ok"), name="two")
    fine = dataclasses.replace(cell("1.0.0"), verdicts={("two", "upstream", "single"): Verdict.OK})
    found = ask("trl==0.16.0", issues=[other], cells=[fine], strategies=["single"])
    assert pins(found) == [("trl1.0.0-tf4.49.0", ("single",))]
    noisy = dataclasses.replace(fine, verdicts={**fine.verdicts, ("three", "upstream", "single"): Verdict.HANG})
    assert pins(ask("trl==0.16.0", issues=[other], cells=[noisy], strategies=["single"])) == pins(found)


def test_a_cell_is_ok_only_if_what_it_was_not_asked_is_predicted_so() -> None:
    other = issue(predict("silent", trl="<1"), predict("ok"), name="two")
    cells = [cell("0.18.2", single="ok", zero3="ok"), cell("1.0.0", single="ok", zero3="ok")]
    assert pins(ask("trl==0.15.2", issues=[BROKEN_BEFORE_018, other], cells=cells, strategies=["single"])) == [
        ("trl1.0.0-tf4.49.0", ("single",))
    ]


def test_a_cell_where_something_could_not_be_tested_is_not_recommended() -> None:
    entries = [issue(predict("broken", trl="<0.18"), predict("ok"), name=name) for name in ("one", "two")]
    verdicts = {("one", "upstream", "zero3"): Verdict.OK, ("two", "upstream", "zero3"): Verdict.UNTESTABLE}
    nearest = dataclasses.replace(cell("0.18.2"), verdicts=verdicts)
    known = dataclasses.replace(cell("1.0.0"), verdicts=dict.fromkeys(verdicts, Verdict.OK))
    found = ask("trl==0.16.0", issues=entries, cells=[nearest, known], strategies=["zero3"])
    assert pins(found) == [("trl1.0.0-tf4.49.0", ("zero3",))]


def test_a_corrected_trainer_that_does_not_help_here_is_said() -> None:
    entry = issue(predict("error", ("zero3",), subject="corrected", trl="<0.15"), predict("broken"), cure="a.b")
    assert only(ask("trl==0.14.0", issues=[entry])).uncured == "error under zero3: error because"
    assert only(ask("trl==0.15.0", issues=[entry])).uncured == ""
