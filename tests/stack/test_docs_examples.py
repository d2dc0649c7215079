"""What README and the tutorials show of a test with the stack is what happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.examples import PAGES, Example, compare, examples, files, run

EXAMPLES = [example for page in PAGES for example in examples(page) if example.kind == "stack"]
PLAIN_ARGUMENTS = pytest.mark.versions(
    transformers=">=5", reason="before, some releases fail here by themselves: trl-training-arguments"
)
"""For a page that makes other configs than GRPO's, in a server that has imported GRPO's."""


def marks_of(example: Example) -> list[pytest.MarkDecorator]:
    return [PLAIN_ARGUMENTS] if example.page.stem == "each-trainer" else []


@pytest.fixture(scope="module")
def outputs() -> dict[object, list[str]]:
    """What was printed, by commands and the files that they name: two pages show the same test."""
    return {}


@pytest.mark.versions(trl=">=0.14", reason="GRPOTrainer")
@pytest.mark.parametrize("example", [pytest.param(each, id=each.id, marks=marks_of(each)) for each in EXAMPLES])
def test_a_command_prints_what_the_page_shows(
    example: Example, outputs: dict[object, list[str]], tmp_path: Path
) -> None:
    lines = tuple(command.line for command in example.commands)
    named = {name: text for name, text in files(example.page).items() if name in " ".join(lines)}
    key = lines, tuple(sorted(named.items()))
    if key not in outputs:
        outputs[key] = run(example, tmp_path)
    for command, printed in zip(example.commands, outputs[key], strict=True):
        difference = compare(command, printed)
        assert difference is None, f"{difference}\nto write what it prints now: nox -s examples -- --update"
