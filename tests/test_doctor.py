"""The doctor's answers: what bites, under which conditions, how sure, and which pins are ok."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pytest_trlcompat import catalog, cli, evidence
from pytest_trlcompat.catalog import Catalog, KnownIssue, Prediction, Symptom
from pytest_trlcompat.doctor import header
from pytest_trlcompat.doctor.bites import StrategyError
from pytest_trlcompat.doctor.diagnosis import Diagnosis, Finding, diagnose
from pytest_trlcompat.doctor.given import of_mentions
from pytest_trlcompat.doctor.requirements import of_pins
from pytest_trlcompat.doctor.text import show
from pytest_trlcompat.evidence import Evidence, MeasuredCell
from pytest_trlcompat.verdict import Verdict

ROOT = Path(__file__).resolve().parents[1]
LINK = "https://github.com/huggingface/trl/issues/1"


def predict(verdict: str, strategies: tuple[str, ...] = (), subject: str = "upstream", **when: str) -> Prediction:
    return Prediction(Verdict(verdict), subject, when, strategies, f"{verdict} because")


def issue(
    *predictions: Prediction,
    name: str = "one",
    strategies: tuple[str, ...] = ("single", "zero3"),
    needs: tuple[str, ...] = (),
    cure: str = "",
) -> KnownIssue:
    symptoms = (Symptom("RuntimeError", re.compile("on the same device")),)
    return KnownIssue(
        name, "title", "wrong", "remedy", (LINK,), "s", cure, "", symptoms, predictions, strategies, needs
    )


def cell(trl: str, transformers: str = "4.49.0", *, corrected: str = "ok", **verdicts: str) -> MeasuredCell:
    """``single="ok"``: the verdict of issue ``one`` under ``single``."""
    found = {("one", "upstream", strategy): Verdict(verdict) for strategy, verdict in verdicts.items()}
    found |= {("one", "corrected", strategy): Verdict(corrected) for strategy in verdicts}
    return MeasuredCell(f"trl{trl}-tf{transformers}", {"trl": trl, "transformers": transformers}, found)


BROKEN_BEFORE_018 = issue(predict("broken", trl="<0.18"), predict("ok"))


def ask(
    *pins: str,
    issues: Sequence[KnownIssue] = (BROKEN_BEFORE_018,),
    cells: Sequence[MeasuredCell] = (),
    strategies: Sequence[str] = (),
    complete: bool = False,
) -> Diagnosis:
    given = of_mentions(of_pins(pins), "the command line", complete=complete)
    known = Catalog({each.id: each for each in issues})
    return diagnose(given, known, Evidence("2026-11-21", tuple(cells)), strategies)


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
        ("trl0.15.2-tf4.49.0", tuple(name for name in catalog.STRATEGIES if name != "zero3")),
        ("trl0.18.2-tf4.49.0", catalog.STRATEGIES),
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
    most = tuple(name for name in catalog.STRATEGIES if name != "zero3")
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


def test_a_corrected_trainer_that_does_not_help_here_is_said() -> None:
    entry = issue(predict("error", ("zero3",), subject="corrected", trl="<0.15"), predict("broken"), cure="a.b")
    assert only(ask("trl==0.14.0", issues=[entry])).uncured == "error under zero3: error because"
    assert only(ask("trl==0.15.0", issues=[entry])).uncured == ""


# The program

FULL = [
    "trl==0.15.2",
    "transformers==4.48.3",
    "torch==2.13.0",
    "accelerate==1.4.0",
    "deepspeed==0.16.4",
    "peft==0.14.0",
]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``trlcompat doctor`` in this process, with the published evidence: status, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["doctor", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


Run = Callable[..., tuple[int, str, str]]


def test_status_1_when_something_bites_with_all_that_is_to_be_said(doctor: Run) -> None:
    status, out, err = doctor(*FULL)
    assert (status, err) == (1, "")
    entry = catalog.load()["grpo-logits-to-keep"]
    flat = " ".join(out.split())
    for text in (
        "trl 0.15.2, transformers 4.48.3, torch 2.13.0, ",
        "not given: datasets",
        f"{entry.id}: {entry.title}",
        "wasteful under every strategy: logits_to_keep is swallowed; TRL trims afterwards",
        f"symptom {entry.wrong}",
        f"cure {entry.remedy}",
        f"upstream {entry.upstream[0]}",
        "[measured under single on trl0.15.2-tf4.48.3]",
    ):
        assert text in flat, text
    assert "\x1b" not in out  # no terminal
    assert max(map(len, out.splitlines())) <= 120


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> KnownIssue:
    """A catalogue of one issue, and evidence of two cells, in place of the real ones."""
    entry = issue(predict("broken", ("zero3",), trl="<0.18"), predict("ok"))
    cells = (cell("0.15.2", single="ok", zero3="broken"), cell("0.18.2", single="ok", zero3="ok"))
    monkeypatch.setattr(catalog, "load", lambda: Catalog({entry.id: entry}))
    monkeypatch.setattr(evidence, "published", lambda: Evidence("2026-11-21", cells))
    return entry


def test_status_0_when_nothing_bites(doctor: Run, small: KnownIssue) -> None:
    status, out, err = doctor("trl==0.19.0")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "No known issue bites; the nearest measured cell is trl0.18.2-tf4.49.0."
    assert doctor("trl==0.15.2", "--strategy", "single")[0] == 0
    assert doctor("trl==0.15.2")[0] == 1


def test_the_text_in_full(doctor: Run, small: KnownIssue) -> None:
    assert doctor("trl==0.15.2", "peft==0.14.0")[1] == (
        "trl 0.15.2, peft 0.14.0 (the command line); not given: transformers, torch, accelerate, deepspeed, datasets\n"
        "\n"
        "1 known issue bites.\n"
        "\n"
        "one: title\n"
        "  broken     under zero3: broken because [measured on trl0.15.2-tf4.49.0]\n"
        "  symptom    wrong\n"
        "  cure       remedy\n"
        f"  upstream   {LINK}\n"
        "\n"
        "Nearest measured pins, ok for all issues under single, ddp, zero1, zero2, fsdp1, fsdp2: trl==0.15.2 "
        "transformers==4.49.0\n"
        "Nearest measured pins, ok for all issues under every strategy: trl==0.18.2 transformers==4.49.0\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trk==1.0"], "trlcompat doctor: unknown package 'trk'"),
        (["-r", "/nowhere/at/all.txt"], "trlcompat doctor: cannot read /nowhere/at/all.txt: No such file"),
        (["trl==0.15.2", "--strategy", "zero9"], "trlcompat doctor: unknown strategy 'zero9'; known are single, "),
    ],
)
def test_status_2_with_one_line_for_a_question_that_makes_no_sense(
    doctor: Run, arguments: list[str], message: str
) -> None:
    status, out, err = doctor(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_damaged_evidence_is_named_with_status_2(doctor: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evidence, "published", lambda: evidence.load(tmp_path / "gone.json"))
    assert doctor("trl==0.15.2")[0] == 2


@pytest.mark.parametrize("arguments", [[], ["surgeon"], ["doctor", "--frobnicate"], ["doctor", "--strategy"]])
def test_wrong_usage_has_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: trlcompat" in capsys.readouterr().err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "doctor  which known issues bite a stack, and what cures them" in capsys.readouterr().out


def test_options_may_stand_anywhere(doctor: Run) -> None:
    status, out, _ = doctor("--json", "trl==0.15.2", "--strategy", "single", "transformers==4.48.3")
    document = json.loads(out)
    assert status == 1
    assert document["stack"] == {"trl": "0.15.2", "transformers": "4.48.3"}
    assert document["strategies"] == ["single"]


def test_json_says_all_that_the_text_says(doctor: Run, small: KnownIssue) -> None:
    assert json.loads(doctor("--json", "trl==0.15.2", "peft==0.14.0", "--strategy=zero3")[1]) == {
        "schema": 1,
        "source": "the command line",
        "stack": {"trl": "0.15.2", "peft": "0.14.0"},
        "unknown": ["transformers", "torch", "accelerate", "deepspeed", "datasets"],
        "absent": [],
        "notes": [],
        "strategies": ["zero3"],
        "left_out": "",
        "measured": "2026-11-21",
        "bites": [
            {
                "id": "one",
                "title": "title",
                "wrong": "wrong",
                "symptoms": [{"type": "RuntimeError", "text": "on the same device"}],
                "remedy": "remedy",
                "cure": "",
                "cured_in": "",
                "uncured": "",
                "upstream": [LINK],
                "suite": "s",
                "when": [
                    {
                        "strategies": ["zero3"],
                        "verdict": "broken",
                        "condition": "",
                        "why": "broken because",
                        "sure": "measured",
                        "cells": ["trl0.15.2-tf4.49.0"],
                        "measured_under": "",
                    }
                ],
            }
        ],
        "clear": [],
        "untold": [],
        "nearest": "trl0.15.2-tf4.49.0",
        "ok_pins": [
            {
                "cell": "trl0.18.2-tf4.49.0",
                "versions": {"trl": "0.18.2", "transformers": "4.49.0"},
                "strategies": ["zero3"],
            }
        ],
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_colours_where_rich_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown: list[str] = []
    for installed in (True, False):
        if not installed:
            monkeypatch.setitem(sys.modules, "rich.console", None)  # as where it is not installed
        terminal = Terminal()
        show(ask("trl==0.15.2"), terminal)
        shown.append(terminal.getvalue())
    coloured, plain = shown
    assert "\x1b[1;31mone: title\x1b[0m\n" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert max(map(len, plain.splitlines())) <= 60


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, check=False, env=environment
    )


def test_the_module_runs_as_a_program_and_reads_standard_input() -> None:
    done = run("-m", "pytest_trlcompat", "doctor", "-", stdin="trl==0.15.2\ntransformers==4.48.3\n")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("trl 0.15.2, transformers 4.48.3 (standard input); not given: ")
    assert run("-m", "pytest_trlcompat", "--version").stdout.startswith("trlcompat 0")


def test_a_closed_standard_input_is_an_empty_one(doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert doctor("trl==0.15.2")[0] == 1
    status, _, err = doctor("-")
    assert (status, err.split(";")[0]) == (2, "trlcompat doctor: standard input: empty")


def test_a_closed_pipe_ends_it_quietly() -> None:
    code = (
        "import os, subprocess, sys; read, write = os.pipe(); os.close(read); "
        "sys.exit(subprocess.run([sys.executable, '-m', 'pytest_trlcompat', 'doctor', 'trl==0.15.2'], stdout=write)"
        ".returncode)"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (1, "")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from pytest_trlcompat import cli; status = cli.main(['doctor', 'trl==0.15.2']); "
        "from pytest_trlcompat.stack import PACKAGES; heavy = {*PACKAGES, 'numpy', 'pytest', 'rich', 'jinja2'}; "
        "print(sorted(heavy & set(sys.modules)), status)"
    )
    assert run("-c", code).stdout.splitlines()[-1] == "[] 1"


def test_an_answer_takes_a_few_times_as_long_as_python_itself() -> None:
    """Processor time, in turns, because other work on the machine must not decide."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("-c", "pass"), seconds("-m", "pytest_trlcompat", "doctor", *FULL, "--json")) for _ in range(5)]
    # About 12 times where this was written; importing torch alone makes it over 100.
    assert min(ours / python for python, ours in pairs) < 30


# The header of a pytest run


def test_the_header_says_in_one_line_what_bites(small: KnownIssue) -> None:
    installed = {"trl": "0.15.2", "transformers": "4.48.3", "deepspeed": "0.16.4"}
    assert header.line(installed) == "1 known issue bites this stack: one (broken under zero3); see: trlcompat doctor"
    assert header.line({**installed, "trl": "0.18.0"}) is None
    del installed["deepspeed"]
    assert header.line(installed) is None


@pytest.mark.parametrize("installed", [{}, {"transformers": "4.48.3"}, {"trl": "main"}])
def test_the_header_says_nothing_of_what_cannot_be_judged(installed: dict[str, str]) -> None:
    assert header.line(installed) is None


class Kept(dict[str, object]):
    """As pytest's cache."""

    def get(self, key: str, default: object, /) -> object:  # type: ignore[override]
        return dict.get(self, key, default)

    def set(self, key: str, value: object, /) -> None:
        self[key] = json.loads(json.dumps(value))


def test_the_headers_answer_is_kept_until_stack_or_catalogue_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def line(installed: dict[str, str]) -> str:
        asked.append(installed["trl"])
        return f"of {installed['trl']}"

    monkeypatch.setattr(header, "line", line)
    cache = Kept()
    assert [header.line_once({"trl": version}, cache) for version in ("1", "1", "2", "2")] == ["of 1"] * 2 + [
        "of 2"
    ] * 2
    assert asked == ["1", "2"]
    monkeypatch.setattr(catalog, "fingerprint", lambda: (1, 2))
    assert header.line_once({"trl": "2"}, cache) == "of 2"
    assert asked == ["1", "2", "2"]
    assert header.line_once({"trl": "2"}, None) == "of 2"
    assert asked == ["1", "2", "2", "2"]


def test_that_nothing_bites_is_kept_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(header, "line", lambda _: calls.append(1))
    cache = Kept()
    assert [header.line_once({"trl": "1"}, cache) for _ in range(2)] == [None, None]
    assert calls == [1]


def test_the_header_names_the_worst_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = ["wasteful", "broken", "ok", "silent", "hang", "broken", "error"]
    entries = [issue(predict(verdict), name=f"{number}-{verdict}") for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(catalog, "load", lambda: {entry.id: entry for entry in entries})
    assert header.line({"trl": "1.0.0", "deepspeed": "0.19"}) == (
        "6 known issues bite this stack: 3-silent (silent under single zero3), 1-broken (broken under single zero3), "
        "5-broken (broken under single zero3), 6-error (error under single zero3), and 2 more; see: trlcompat doctor"
    )


def test_the_worst_finding_comes_first() -> None:
    verdicts = ["wasteful", "broken", "silent"]
    entries = [issue(predict(verdict), name=verdict) for verdict in verdicts]
    found = ask("trl==1", issues=entries)
    assert [finding.issue.id for finding in found.findings] == ["silent", "broken", "wasteful"]


def test_issues_of_a_trainer_that_one_does_not_use_can_be_left_out(
    doctor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [issue(predict("broken"), name=name) for name in ("grpo-a", "ppo-a", "trl-import")]
    monkeypatch.setattr(catalog, "load", lambda: Catalog({entry.id: entry for entry in entries}))
    found = {}
    for arguments in ((), ("--trainer", "ppo"), ("--trainer", "grpo")):
        document = json.loads(doctor("trl==1.0.0", "--json", *arguments)[1])
        found[arguments] = [each["id"] for each in document["bites"]]
    assert list(found.values()) == [
        ["grpo-a", "ppo-a", "trl-import"],
        ["ppo-a", "trl-import"],
        ["grpo-a", "trl-import"],
    ]
