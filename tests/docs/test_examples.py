"""README and the tutorials: what they show is what happens. The long commands are run by ``nox -s examples``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.examples import KINDS, PAGES, ROOT, Command, Example, compare, examples, files, renewed, run

EXAMPLES = [example for page in PAGES for example in examples(page)]


def of_kind(kind: str) -> list[object]:
    return [pytest.param(example, id=example.id) for example in EXAMPLES if example.kind == kind]


@pytest.mark.parametrize("example", of_kind("unit"))
def test_a_command_prints_what_the_page_shows(example: Example, tmp_path: Path) -> None:
    for command, printed in zip(example.commands, run(example, tmp_path), strict=True):
        difference = compare(command, printed)
        assert difference is None, f"{difference}\nto write what it prints now: nox -s examples -- --update"


def test_each_block_says_where_it_is_run() -> None:
    assert [example.id for example in EXAMPLES if example.kind not in KINDS] == []
    assert [example.id for example in EXAMPLES if example.kind == "never" and not example.reason] == []
    assert {example.kind for example in EXAMPLES} == set(KINDS)


def test_each_command_that_is_run_shows_what_it_prints() -> None:
    run_here = [example for example in EXAMPLES if example.kind in ("unit", "stack", "checkout")]
    assert [command.line for example in run_here for command in example.commands if not command.output] == []


@pytest.mark.parametrize("example", of_kind("ci"))
def test_continuous_integration_runs_what_the_page_tells_a_newcomer_to_run(example: Example) -> None:
    script = (ROOT / ".ci" / "run").read_text().replace('"${PYTHON:-python3.11}"', "python3").replace(" --quiet", "")
    for command in example.commands:
        assert command.line in re.split(r"\n\s*|part \"[^\"]+\" ", script)


def test_continuous_integration_runs_the_examples_that_no_test_runs() -> None:
    assert ' "examples(checkout)" ' in (ROOT / ".ci" / "run").read_text()


def test_a_file_that_two_pages_show_is_the_same() -> None:
    shown: dict[str, set[str]] = {}
    for page in PAGES:
        for name, text in files(page).items():
            shown.setdefault(name, set()).add(text)
    assert {name: len(texts) for name, texts in shown.items()} == dict.fromkeys(shown, 1)
    assert set(shown) == {"test_training.py", "test_each_trainer.py", "test_ranks.py", "test_failure.py"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_an_output_may_leave_text_out() -> None:
    command = Command("it", "1 passed in ...s\n...\nlast")
    assert compare(command, "1 passed in 0.12s\na\nb\nlast") is None
    assert compare(command, "1 passed in 63.90s (0:01:03)\na\nb\nlast") is None  # a run of more than a minute
    difference = compare(command, "2 passed in 0.12s\na\nb\nlast")
    assert difference is not None
    assert difference.startswith("$ it\n")


def test_an_output_that_still_holds_is_left_as_it_stands() -> None:
    assert renewed(Command("it", "1 passed ...\n..."), "1 passed in 3 s\nmore") == "1 passed ...\n..."


def test_a_new_output_leaves_out_as_much_as_the_old_one_did() -> None:
    command = Command("it", "first\n...\nlast")
    assert renewed(command, "one\ntwo\nthree\nfour in 12.5 s") == "one\n...\nfour in ... s"
    assert renewed(command, "one\ntwo") == "one\ntwo"
    assert renewed(Command("it", "old"), f"at {ROOT}/build\nnew") == "at .../build\nnew"


def test_a_page_is_read_into_commands_and_their_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run: unit -->\n```console\n$ a \\\n    b\nout\n\nput\n$ c\n```\n\n```console\n$ d\n```\n")
    first, second = examples(page)
    assert first.kind == "unit"
    assert first.commands == (Command("a \\\n    b", "out\n\nput"), Command("c", ""))
    assert (second.kind, second.commands) == ("", (Command("d", ""),))
