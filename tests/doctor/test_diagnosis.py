"""The doctor's answers: which issues affect a stack, when, with what confidence, and which pins are ok."""

from __future__ import annotations

import dataclasses
import io

import pytest

from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.issue import STRATEGIES
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.applicable import StrategyError
from pytest_trlcompat.doctor.diagnosis import ApplicableIssue, Diagnosis
from pytest_trlcompat.doctor.text import show

from .made_up import BROKEN_BEFORE_018, ask, cell, issue, predict


def effects(diagnosis: Diagnosis) -> list[tuple[tuple[str, ...], str, str]]:
    return [
        (effect.strategies, effect.verdict.value, effect.condition)
        for applicable in diagnosis.issues
        for effect in applicable.effects
    ]


def only(diagnosis: Diagnosis) -> ApplicableIssue:
    (applicable,) = diagnosis.issues
    return applicable


# Which issues apply


@pytest.mark.parametrize("verdict", ["broken", "silent", "wasteful", "error", "hang"])
def test_a_problem_affects_the_stack(verdict: str) -> None:
    assert effects(ask("trl==0.15.2", issues=[issue(predict(verdict))])) == [(("single", "zero3"), verdict, "")]


@pytest.mark.parametrize("verdict", ["ok", "absent", "untestable"])
def test_a_right_or_missing_result_does_not(verdict: str) -> None:
    found = ask("trl==0.15.2", issues=[issue(predict(verdict))])
    assert found.issues == ()
    assert found.clear == ("one",)
    assert found.unpredicted == ()


def test_an_unknown_package_makes_the_answer_conditional() -> None:
    entry = issue(predict("broken", trl="<0.18", accelerate=">=1.0,<1.9"), predict("ok"))
    assert effects(ask("trl==0.15.2", issues=[entry])) == [(("single", "zero3"), "broken", "accelerate >=1.0,<1.9")]
    assert effects(ask("trl==0.15.2", "accelerate==1.3.0", issues=[entry])) == [(("single", "zero3"), "broken", "")]
    assert effects(ask("trl==0.15.2", "accelerate==1.9.0", issues=[entry])) == []
    assert effects(ask("trl==0.15.2", "accelerate>=1.8", issues=[entry])) == [
        (("single", "zero3"), "broken", "accelerate <1.9")
    ]


def test_an_issue_affects_a_pre_release_if_it_may() -> None:
    assert effects(ask("trl==0.18.0.dev0")) == [(("single", "zero3"), "broken", "trl <0.18")]


def test_issues_without_a_prediction_are_listed() -> None:
    found = ask("trl==0.9.6", issues=[issue(predict("broken", trl=">=0.14,<0.18"), predict("ok", trl=">=0.18"))])
    assert (found.issues, found.clear, found.unpredicted) == ((), ("one",), ("one",))


def test_an_issue_that_needs_a_package_shows_only_with_it() -> None:
    entry = issue(predict("broken"), needs=("peft",))
    assert effects(ask("trl==0.15.2", issues=[entry], complete=True)) == []
    assert effects(ask("trl==0.15.2", "peft==0.14.0", issues=[entry], complete=True)) != []
    assert effects(ask("trl==0.15.2", issues=[entry])) != []


def test_the_worst_issue_comes_first() -> None:
    verdicts = ["wasteful", "broken", "silent"]
    entries = [issue(predict(verdict), name=verdict) for verdict in verdicts]
    found = ask("trl==1", issues=entries)
    assert [applicable.issue.id for applicable in found.issues] == ["silent", "broken", "wasteful"]


# Strategies


def test_without_deepspeed_its_strategies_are_left_out() -> None:
    found = ask("trl==0.15.2", complete=True)
    assert effects(found) == [(("single",), "broken", "")]
    assert found.left_out == "zero1, zero2, zero3: deepspeed is not installed"
    assert ask("trl==0.15.2", "deepspeed==0.16.4", complete=True).left_out == ""


def test_a_strategy_selects_its_variants_too() -> None:
    entry = issue(
        predict("silent", ("zero3-swap",)),
        predict("broken", ("zero3*",)),
        predict("wasteful"),
        strategies=("single", "zero3", "zero3-swap"),
    )
    assert effects(ask("trl==1", issues=[entry], strategies=["zero3"])) == [
        (("zero3",), "broken", ""),
        (("zero3-swap",), "silent", ""),
    ]
    assert effects(ask("trl==1", issues=[entry], strategies=["zero3-swap"])) == [
        (("zero3-swap",), "silent", ""),
    ]
    assert effects(ask("trl==1", issues=[entry], strategies=["fsdp1"])) == []


def test_a_variant_that_an_issue_does_not_know_is_judged_as_its_strategy() -> None:
    assert effects(ask("trl==0.15.2", strategies=["zero3-mine"])) == [(("zero3",), "broken", "")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero4", "unknown strategy 'zero4'; known are single, ddp, "),
        ("zero3", "strategy zero3 needs deepspeed, which"),
    ],
)
def test_an_impossible_strategy_is_refused(name: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        ask("trl==0.15.2", strategies=[name], complete=True)


# Confidence


@pytest.mark.parametrize(
    ("pins", "cells", "text"),
    [
        (["trl==0.15.2"], [cell("0.15.2", single="broken", zero3="broken")], "measured on trl0.15.2-tf4.49.0"),
        (
            ["trl==0.16.0"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken"), cell("0.17.0", single="broken")],
            "between trl0.15.2-tf4.49.0 and trl0.17.0-tf4.49.0, which both gave this verdict under single",
        ),
        (
            ["trl==0.16.0"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken"), cell("0.17.0", single="ok")],
            "outside the measured range; the nearest cell with this verdict under single is trl0.15.2-tf4.49.0",
        ),
        (
            ["trl==0.12.2"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken")],
            "outside the measured range; the nearest cell with this verdict under single is trl0.14.0-tf4.49.0",
        ),
        (
            ["trl==0.16.0"],
            [cell("0.18.0", single="ok")],
            "not measured in the published sweep; predicted by the catalogue",
        ),
        (["trl<0.18"], [cell("0.15.2", single="broken", zero3="broken")], "measured on trl0.15.2-tf4.49.0"),
        (
            ["trl>=0.16,<0.18"],
            [cell("0.15.2", single="broken", zero3="broken")],
            "outside the measured range; the nearest cell with this verdict is trl0.15.2-tf4.49.0",
        ),
    ],
)
def test_confidence(pins: list[str], cells: list[MeasuredCell], text: str) -> None:
    (effect,) = only(ask(*pins, cells=cells)).effects
    assert effect.confidence.describe() == text


def test_between_means_in_every_package_that_decides() -> None:
    entry = issue(predict("broken", trl="<0.18", transformers=">=4.40"), predict("ok"), strategies=("single",))
    cells = [cell("0.15.2", "4.48.3", single="broken"), cell("0.17.0", "4.50.3", single="broken")]
    inside = ask("trl==0.16.0", "transformers==4.49.0", issues=[entry], cells=cells)
    outside = ask("trl==0.16.0", "transformers==4.52.4", issues=[entry], cells=cells)
    crossed = [cell("0.15.2", "4.50.3", single="broken"), cell("0.17.0", "4.48.3", single="broken")]
    levels = [only(found).effects[0].confidence.level.value for found in (inside, outside)]
    assert levels == ["between", "beyond"]
    across = only(ask("trl==0.16.0", "transformers==4.49.0", issues=[entry], cells=crossed)).effects[0].confidence
    assert across.cells == ("trl0.15.2-tf4.50.3", "trl0.17.0-tf4.48.3")


def test_a_strategy_that_was_not_measured_rests_on_one_that_was() -> None:
    (effect,) = only(ask("trl==0.15.2", cells=[cell("0.15.2", zero3="broken")])).effects
    assert effect.strategies == ("single", "zero3")
    assert effect.confidence.describe() == "measured on trl0.15.2-tf4.49.0 under zero3"


def test_a_measured_problem_counts_though_the_catalogue_predicts_none() -> None:
    found = ask("trl==0.18.0", cells=[cell("0.18.0", single="error", zero3="ok")])
    assert effects(found) == [(("single",), "error", "")]
    (effect,) = only(found).effects
    assert effect.why == "measured, though the catalogue predicts another verdict"
    assert effects(ask("trl==0.18.1", cells=[cell("0.18.0", single="error", zero3="ok")])) == []


def test_an_unpredicted_verdict_counts_only_if_all_deciding_versions_are_known() -> None:
    entry = issue(predict("ok", trl=">=0.18", transformers=">=4.40"), strategies=("single",))
    cells = [cell("0.18.0", "4.49.0", single="error")]
    assert effects(ask("trl==0.18.0", "transformers==4.49.0", issues=[entry], cells=cells)) == [
        (("single",), "error", "")
    ]
    assert effects(ask("trl==0.18.0", issues=[entry], cells=cells)) == []


def test_a_measured_variant_supports_its_strategy_if_the_catalogue_does_not_distinguish_them() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("ok"), strategies=())
    (effect,) = only(ask("trl==0.15.2", issues=[entry], cells=[cell("0.15.2", **{"zero3-swap": "broken"})])).effects
    assert effect.confidence.describe() == "measured on trl0.15.2-tf4.49.0 under zero3-swap"


def test_a_measured_variant_that_the_entry_does_not_list_is_named_with_its_reason() -> None:
    entry = issue(predict("broken", ("zero3-*",)), predict("ok"), strategies=())
    cells = [cell("0.15.2", **{"zero3": "ok", "zero3-swap": "broken"})]
    (effect,) = only(ask("trl==0.15.2", issues=[entry], cells=cells)).effects
    assert (effect.strategies, effect.why) == (("zero3-swap",), "broken because")
    assert effect.confidence.describe() == "measured on trl0.15.2-tf4.49.0"


def test_a_cell_outside_a_condition_does_not_support_it() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("broken", trl="<0.29"), predict("ok"), strategies=("single",))
    found = ask("transformers==4.49.0", issues=[entry], cells=[cell("0.18.2", single="broken")])
    assert [(effect.condition, effect.confidence.level.value) for effect in only(found).effects] == [
        ("trl <0.18", "beyond"),
        ("trl >=0.18,<0.29", "measured"),
    ]


# Torch


def confidence(*pins: str, cells: list[MeasuredCell]) -> tuple[str, str]:
    (effect,) = only(ask(*pins, cells=cells)).effects
    return effect.confidence.level.value, effect.confidence.describe()


NEW_TORCH = cell("0.15.2", torch="2.13.0", single="broken", zero3="broken")
OLD_TORCH = cell("0.15.2", torch="2.6.0", single="broken", zero3="broken")


@pytest.mark.parametrize(
    "torch", ["torch==2.13.0", "torch==2.13.0+cu130", "torch==2.13.1", "torch>=2.6", "trl==0.15.2"]
)
def test_a_cell_with_the_stacks_torch_measures_it(torch: str) -> None:
    expected = ("measured", "measured on trl0.15.2-tf4.49.0-torch2.13.0")
    assert confidence("trl==0.15.2", torch, cells=[NEW_TORCH]) == expected


@pytest.mark.parametrize("torch", ["torch==2.6.0", "torch==2.12.1", "torch==2.14.0", "torch<2.13", "torch==2.130.0"])
def test_a_cell_with_another_torch_does_not_and_says_so(torch: str) -> None:
    assert confidence("trl==0.15.2", torch, cells=[NEW_TORCH]) == (
        "other torch",
        "measured on trl0.15.2-tf4.49.0-torch2.13.0, with torch 2.13.0",
    )


def test_the_cell_with_the_stacks_torch_is_taken_where_there_is_one() -> None:
    cells = [NEW_TORCH, OLD_TORCH]
    for torch in ("2.6.0", "2.13.0"):
        expected = ("measured", f"measured on trl0.15.2-tf4.49.0-torch{torch}")
        assert confidence("trl==0.15.2", f"torch=={torch}", cells=cells) == expected


def test_a_prediction_may_have_a_range_of_torch() -> None:
    entry = issue(predict("broken", trl="<0.18", torch=">=2.6"), predict("ok"), strategies=("single",))
    assert effects(ask("trl==0.15.2", "torch==2.5.1", issues=[entry])) == []
    assert effects(ask("trl==0.15.2", "torch==2.6.0", issues=[entry])) == [(("single",), "broken", "")]
    assert effects(ask("trl==0.15.2", issues=[entry])) == [(("single",), "broken", "torch >=2.6")]
    cells = [cell("0.15.2", torch="2.6.0", single="broken"), cell("0.15.2", torch="2.13.0", single="broken")]
    (effect,) = only(ask("trl==0.15.2", "torch==2.9.1", issues=[entry], cells=cells)).effects
    assert (
        effect.confidence.describe()
        == "between trl0.15.2-tf4.49.0-torch2.6.0 and trl0.15.2-tf4.49.0-torch2.13.0, which both gave this verdict"
    )
    below = cell("0.15.2", torch="2.5.1", single="ok")
    (effect,) = only(ask("trl==0.15.2", "torch==2.6.0", issues=[entry], cells=[below, *cells])).effects
    assert (effect.confidence.level.value, effect.confidence.cells) == ("measured", ("trl0.15.2-tf4.49.0-torch2.6.0",))


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
def test_a_torch_that_was_not_measured_is_named(pins: list[str], text: str) -> None:
    found = ask(*pins, cells=[NEW_TORCH, cell("1.0.0", torch="2.12.1", single="ok"), cell("1.1.0", torch="2.12.1")])
    assert found.torch == found.to_dict()["torch"] == text
    file = io.StringIO()
    show(found, file)
    assert (f"\ntorch: {text}\n" in file.getvalue()) is bool(text)
    assert ("torch:" in file.getvalue()) is bool(text)


def test_json_names_the_torch_that_was_measured() -> None:
    found = ask("trl==0.15.2", "torch==2.6.0", cells=[NEW_TORCH])
    (when,) = found.to_dict()["issues"][0]["when"]
    assert (when["confidence"], when["measured_with_torch"]) == ("other torch", "2.13.0")


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
        ("trl0.15.2-tf4.49.0", tuple(name for name in STRATEGIES if name != "zero3")),
        ("trl0.18.2-tf4.49.0", STRATEGIES),
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


def test_pins_with_the_fewest_issues_are_named_if_none_are_without() -> None:
    entries = [issue(predict("broken", trl="<0.18"), predict("ok"), name=name) for name in "ab"]
    entries.append(issue(predict("silent"), name="c"))
    verdicts = {"0.15.2": "broken broken", "1.2.0": "ok hang", "1.0.0": "ok ok", "1.3.0": "ok ok"}
    cells = [
        dataclasses.replace(
            cell(trl),
            verdicts={
                (name, "upstream", "single"): Verdict(each) for name, each in zip("ab", text.split(), strict=True)
            },
        )
        for trl, text in verdicts.items()
    ]
    found = ask("trl==0.15.2", issues=entries, cells=cells, strategies=["single"])
    assert found.pins == ()
    assert found.fewest is not None
    assert (found.fewest.cell.id, found.fewest.issues) == ("trl1.0.0-tf4.49.0", ("c",))
    assert found.to_dict()["fewest_issues"]["issues"] == ["c"]
    file = io.StringIO()
    show(found, file)
    assert " ".join(file.getvalue().split()).endswith(
        "No cell of the sweep of 2026-11-21 is ok for all issues under single. "
        "Measured pins with the fewest known issues (c): trl==1.0.0 transformers==4.49.0"
    )
    assert ask("trl==1.3.0", issues=entries, cells=cells, strategies=["single"]).fewest is None, "not fewer"


def test_pins_for_most_strategies_are_named_if_there_are_none_for_all() -> None:
    entry = issue(predict("broken", ("zero3",)), predict("ok"))
    cells = [cell("0.17.0", single="ok", zero3="broken"), cell("0.16.1", single="ok", zero3="broken")]
    most = tuple(name for name in STRATEGIES if name != "zero3")
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


def test_a_cell_is_ok_only_if_what_it_did_not_measure_is_predicted_so() -> None:
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


def test_it_says_so_if_the_corrected_trainer_does_not_help() -> None:
    entry = issue(predict("error", ("zero3",), subject="corrected", trl="<0.15"), predict("broken"), cure="a.b")
    assert only(ask("trl==0.14.0", issues=[entry])).uncured == "error under zero3: error because"
    assert only(ask("trl==0.15.0", issues=[entry])).uncured == ""
