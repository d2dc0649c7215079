"""Which measured cells the doctor recommends: the nearest that are ok, or those with the fewest known issues."""

from __future__ import annotations

import dataclasses
import io

from pytest_trlcompat.catalog.issue import STRATEGIES
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.diagnosis import Diagnosis
from pytest_trlcompat.doctor.text import show

from .made_up import BROKEN_BEFORE_018, ask, cell, issue, predict


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
        cell("0.15.2", "4.52.4", single="ok", zero3="broken"),
        cell("0.18.2", "4.52.4", single="ok", zero3="ok"),
        cell("1.0.0", "4.52.4", single="ok", zero3="ok"),
    ]
    assert pins(ask("trl==0.15.2", issues=[entry], cells=cells)) == [
        ("trl0.15.2-tf4.52.4", tuple(name for name in STRATEGIES if name != "zero3")),
        ("trl0.18.2-tf4.52.4", STRATEGIES),
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
        "Measured pins with the fewest known issues (c), measured with GRPOTrainer alone: trl==1.0.0 "
        "transformers==4.49.0"
    )
    assert ask("trl==1.3.0", issues=entries, cells=cells, strategies=["single"]).fewest is None, "not fewer"


def test_pins_for_most_strategies_are_named_if_there_are_none_for_all() -> None:
    entry = issue(predict("broken", ("zero3",)), predict("ok"))
    cells = [cell(trl, "4.52.4", single="ok", zero3="broken") for trl in ("0.17.0", "0.16.1")]
    most = tuple(name for name in STRATEGIES if name != "zero3")
    assert pins(ask("trl==0.16.0", issues=[entry], cells=cells)) == [("trl0.16.1-tf4.52.4", most)]


def test_a_cell_without_a_strategy_is_not_recommended_for_it_although_nothing_was_measured_there() -> None:
    entry = issue(predict("ok"), strategies=())
    cells = [cell("0.16.1", "4.50.3", single="ok"), cell("0.18.2", "4.52.4", single="ok")]
    problem = issue(predict("broken", trl="==0.16.0"), predict("ok"), name="two", strategies=())
    found = ask("trl==0.16.0", issues=[entry, problem], cells=cells, strategies=["fsdp2"])
    assert pins(found) == [("trl0.18.2-tf4.52.4", ("fsdp2",))]


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
