"""``trlcompat doctor`` as a program: its status, its text, its JSON, and what it costs."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import cli
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.issue import TRAINERS as MEASURED
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.doctor.text import show
from pytest_trlcompat.trainers.curing.kinds import TRAINERS

from .made_up import LINK, Run, ask, issue, predict

ROOT = Path(__file__).resolve().parents[2]
FULL = [
    "trl==0.15.2",
    "transformers==4.48.3",
    "torch==2.13.0",
    "accelerate==1.4.0",
    "deepspeed==0.16.4",
    "peft==0.14.0",
]


def test_status_1_and_the_whole_text_when_a_known_issue_affects_the_stack(doctor: Run) -> None:
    status, out, err = doctor(*FULL, "--all")
    assert (status, err) == (1, "")
    entry = known_issues.load()["grpo-logits-to-keep"]
    flat = " ".join(out.split())
    for text in (
        "trl 0.15.2, transformers 4.48.3, torch 2.13.0, ",
        "not specified: datasets",
        f"{entry.id} ({entry.severity}): {entry.title}",
        "wasteful under single, ddp, zero1, zero2, zero3, fsdp1: logits_to_keep is swallowed; TRL trims afterwards",
        "not considered: fsdp2: Accelerate knows FSDP2 from 1.6.0 on, and takes FSDP1 before without a word",
        f"symptom {entry.wrong}",
        "cure train with pytest_trlcompat.trainers.GRPOTrainer (LogitsToKeepMixin), or take trl >=0.15 with "
        "transformers >=4.49, or transformers >=4.49,<4.52, or trl >=0.14,<0.15 with transformers <4.49; "
        "under single-neither take trl >=0.20",
        f"upstream {entry.upstream[0]}",
        "A trainer of your own gets the cures of its kind by `pytest_trlcompat.trainers.cured(MyTrainer)`",
        "[measured on trl0.15.2-tf4.48.3 under single]",
    ):
        assert text in flat, text
    assert "\x1b" not in out  # no terminal
    assert max(map(len, out.splitlines())) <= 120


def test_status_0_when_no_known_issue_affects_the_stack(doctor: Run, small: KnownIssue) -> None:
    status, out, err = doctor("trl==0.18.2")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "No known issue affects this stack; the nearest measured cell is trl0.18.2-tf4.49.0."
    assert doctor("trl==0.15.2", "--strategy", "single")[0] == 0
    assert doctor("trl==0.15.2")[0] == 1


def test_the_text_in_full(doctor: Run, small: KnownIssue) -> None:
    assert doctor("trl==0.15.2", "peft==0.14.0")[1] == (
        "trl 0.15.2, peft 0.14.0 (the command line); "
        "not specified: transformers, torch, accelerate, deepspeed, datasets\n"
        "\n"
        "1 known issue affects this stack.\n"
        "\n"
        "one (weights): title\n"
        "  broken     under zero3: broken because [measured on trl0.15.2-tf4.49.0]\n"
        "  symptom    wrong\n"
        "  cure       take trl >=0.18, or workaround\n"
        f"  upstream   {LINK}\n"
        "\n"
        "Nearest measured pins, ok for all issues under single, ddp, zero1, zero2, fsdp1, measured with GRPOTrainer "
        "alone:\n  trl==0.15.2 transformers==4.49.0\n"
        "No cell of the sweep of 2026-11-21 is ok for all issues under every strategy.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trk==1.0"], "trlcompat doctor: unknown package 'trk'"),
        (["-r", "/nowhere/at/all.txt"], "trlcompat doctor: cannot read /nowhere/at/all.txt: No such file"),
        (["trl==0.15.2", "--strategy", "zero9"], "trlcompat doctor: unknown strategy 'zero9'; known are single, "),
    ],
)
def test_status_2_and_one_line_for_an_invalid_request(doctor: Run, arguments: list[str], message: str) -> None:
    status, out, err = doctor(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_damaged_evidence_is_named_with_status_2(doctor: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(tmp_path / "cache"))
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
    assert "doctor   which known issues affect a stack, and what cures them" in capsys.readouterr().out


def test_options_may_come_in_any_order(doctor: Run) -> None:
    status, out, _ = doctor("--json", "trl==0.15.2", "--strategy", "single", "transformers==4.48.3")
    document = json.loads(out)
    assert status == 1
    assert document["stack"] == {"trl": "0.15.2", "transformers": "4.48.3"}
    assert document["strategies"] == ["single"]


def test_releases_are_those_for_the_strategies_in_use(doctor: Run) -> None:
    pins = ("trl==0.15.2", "transformers==4.48.3")
    for strategy, end in (("ddp", "with transformers <4.49"), ("single-neither", "or take trl >=0.20")):
        status, out, _ = doctor(*pins, "--json", "--strategy", strategy)
        remedies = {found["id"]: found["remedy"] for found in json.loads(out)["issues"]}
        assert status == 1
        assert remedies["grpo-logits-to-keep"].endswith(end)
        line = "".join(doctor(*pins, "--strategy", strategy, "--all")[1].split())
        assert "".join(f"cure{remedies['grpo-logits-to-keep']}upstream".split()) in line


def test_json_contains_everything_that_the_text_does(doctor: Run, small: KnownIssue) -> None:
    assert json.loads(doctor("--json", "trl==0.15.2", "peft==0.14.0", "--strategy=zero3")[1]) == {
        "schema": 3,
        "source": "the command line",
        "stack": {"trl": "0.15.2", "peft": "0.14.0"},
        "forks": [],
        "unknown": ["transformers", "torch", "accelerate", "deepspeed", "datasets"],
        "absent": [],
        "trainer": "",
        "notes": [],
        "strategies": ["zero3"],
        "left_out": "",
        "measured": "2026-11-21",
        "torch": "",
        "python": "",
        "unmeasured": {},
        "counts": {"affect": 1, "cannot_be_judged": 0, "not_predicted": 0, "do_not_affect": 0},
        "issues": [
            {
                "id": "one",
                "title": "title",
                "severity": "weights",
                "wrong": "wrong",
                "symptoms": [{"type": "RuntimeError", "text": "on the same device"}],
                "remedy": "take trl >=0.18, or workaround",
                "cure": "",
                "mixins": [],
                "cured_in": "trl 0.18",
                "uncured": "",
                "measured_with": "grpo",
                "upstream": [LINK],
                "suite": "s",
                "when": [
                    {
                        "strategies": ["zero3"],
                        "verdict": "broken",
                        "condition": "",
                        "why": "broken because",
                        "confidence": "measured",
                        "cells": ["trl0.15.2-tf4.49.0"],
                        "measured_under": "",
                        "measured_with_torch": "",
                    }
                ],
            }
        ],
        "clear": [],
        "unpredicted": [],
        "nearest": "trl0.15.2-tf4.49.0",
        "ok_pins": [
            {
                "cell": "trl0.18.2-tf4.49.0",
                "versions": {"trl": "0.18.2", "transformers": "4.49.0"},
                "strategies": ["zero3"],
                "trainers": ["grpo"],
            }
        ],
        "nobody_measured": [],
        "fewest_issues": None,
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
    assert "\x1b[1;31mone (weights): title\x1b[0m\n" in coloured
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
    assert done.stdout.startswith("trl 0.15.2, transformers 4.48.3 (standard input); not specified: ")
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
    """Processor time, measured alternately, so that other work on the machine does not matter."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("-c", "pass"), seconds("-m", "pytest_trlcompat", "doctor", *FULL, "--json")) for _ in range(5)]
    # It grows in proportion to the known issues: 65 times with 278 of them. Importing torch alone adds over 100.
    assert min(ours / python for python, ours in pairs) < 0.36 * len(known_issues.load())


def test_issues_of_other_trainers_can_be_left_out(doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [issue(predict("broken"), name=name) for name in ("grpo-a", "ppo-a", "trl-import")]
    monkeypatch.setattr(known_issues, "load", lambda: Catalog({entry.id: entry for entry in entries}))
    found = {}
    for arguments in ((), ("--trainer", "ppo"), ("--trainer", "grpo")):
        document = json.loads(doctor("trl==1.0.0", "--json", *arguments)[1])
        found[arguments] = [each["id"] for each in document["issues"]]
    assert list(found.values()) == [
        ["grpo-a", "ppo-a", "trl-import"],
        ["ppo-a", "trl-import"],
        ["grpo-a", "trl-import"],
    ]


UNMEASURED = next(trainer for trainer in TRAINERS if trainer not in MEASURED)
CLASS = TRAINERS[UNMEASURED]
NOTE = (f"no sweep trains with {CLASS}: what is said here was measured with GRPO alone, and an issue that only "
       f"{CLASS} has is not known here")  # fmt: skip


def test_any_trainer_can_be_asked_about_and_none_that_was_not_measured_is_called_safe(doctor: Run) -> None:
    newest = ("trl==1.16.0", "transformers==5.23.0", "--strategy", "fsdp2", "--trainer")
    status, out, _ = doctor(*newest, UNMEASURED, "--all")
    flat = " ".join(out.split())
    assert status == 1
    for text in (
        f"note: {NOTE}",
        f"but measured with GRPO alone, not with {CLASS} symptom",
        f"cure train with pytest_trlcompat.trainers.cured({CLASS}) (FSDPSaveMixin), or call ",
        f"No measured pins are recommended, since no sweep trains with {CLASS}.",
    ):
        assert text in flat, text
    assert "grpo-" not in out
    document = json.loads(doctor(*newest, UNMEASURED, "--json")[1])
    assert (document["trainer"], document["notes"][-1], document["ok_pins"]) == (UNMEASURED, NOTE, [])
    assert document["fewest_issues"] is None
    assert {each["measured_with"] for each in document["issues"]} == {"grpo"}
    assert "cured(YourTrainer)" in doctor(*newest, "trainer", "--all")[1]
    grpo = doctor(*newest, "grpo", "--all")[1]
    assert "trainers.GRPOTrainer (FSDPSaveMixin)" in grpo
    assert "measured with GRPO alone" not in grpo


def test_no_finding_for_a_trainer_that_was_not_measured_is_not_an_all_clear(doctor: Run) -> None:
    arguments = ("trl==1.16.0", "transformers==4.56.2", "torch==2.13.0", "peft==0.21.2", "--strategy", "ddp")
    status, out, _ = doctor(*arguments, "--trainer", UNMEASURED)
    assert status == 1
    assert f"No known issue that was measured with GRPO and may meet {CLASS} affects this stack" in " ".join(
        out.split()
    )
    assert "No known issue affects this stack" not in out


def test_an_unknown_trainer_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--trainer", "dpoo"])
    assert caught.value.code == 2
    assert "invalid choice: 'dpoo' (choose from 'grpo', 'ppo', 'sft', 'dpo'," in capsys.readouterr().err


def test_help_names_the_command_that_lists_cures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "cures    what each cure of a trainer does on the installed stack" in capsys.readouterr().out
