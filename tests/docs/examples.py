"""The commands that README and the tutorials show, with what they print: read, run, compared, written anew.

    nox -s examples                 runs all of them, each where it belongs
    nox -s "examples(checkout)"     those that the tests do not run
    nox -s examples -- --update     writes what they print now into the pages

A block of the language ``console`` stands below a comment that says where it is run:

``<!-- run: unit -->``           in a new folder, by the unit tests
``<!-- run: stack -->``          in a new folder where the stack is installed, by the tests with the stack
``<!-- run: checkout -->``       in the checkout, by ``nox -s "examples(checkout)"`` alone: it may take minutes
``<!-- run: ci -->``             not here; it is a line of ``.ci/run``
``<!-- run: never, because -->`` not at all, with the reason

In the output ``...`` stands for any text. A Python block that begins with ``# NAME.py`` is a file in the new folder.

Imports nothing but a reader of Markdown, which every environment has by way of ``rich``.
"""

from __future__ import annotations

import argparse
import doctest
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pytest_trlcompat._due import Account

__all__ = ["KINDS", "PAGES", "ROOT", "Command", "Example", "compare", "examples", "files", "main", "renewed", "run"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
KINDS = ("unit", "stack", "checkout", "ci", "never")

_WHERE = re.compile(r"<!-- run: (?P<where>.*) -->\s*")
_FILE = re.compile(r"# (?P<name>\w+\.py)\n")
_PROMPT = "$ "
_OMISSION = "..."
_TIMEOUT = 1800.0
"""Seconds; the longest command builds an environment and sweeps a cell."""

_VARYING = (
    (re.compile(r"\b\d+(?:\.\d+)?( ?s| seconds)\b(?: \(\d+:\d+:\d+\))?"), r"...\1"),
    (re.compile(re.escape(str(ROOT))), "..."),
)
"""What differs from run to run: times, and where the checkout is."""
_CLOCK = re.compile(r"(\b\d+(?:\.\d+)?s) \(\d+:\d+:\d+\)")
"""What pytest writes behind the seconds of a run that took more than a minute."""


@dataclass(frozen=True)
class Command:
    """One command of a block, and the output that the page shows below it."""

    line: str
    output: str


@dataclass(frozen=True)
class Example:
    """A block of commands.

    Attributes:
        kind: one of :data:`KINDS`, or ``""`` where the page does not say.
        lines: those of the page that hold the block's text, from the first one to behind the last one, counted from 0.
    """

    page: Path
    kind: str
    reason: str
    commands: tuple[Command, ...]
    lines: tuple[int, int] = field(compare=False, default=(0, 0))

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.commands[0].line}"


def examples(page: Path) -> list[Example]:
    """The blocks of a page, from top to bottom."""
    found = []
    where = None
    for token in _tokens(page):
        if token.type == "fence" and token.info == "console":
            kind, _, reason = (where["where"] if where else "").partition(", ")
            first, behind = token.map or (0, 0)
            found.append(Example(page, kind, reason, tuple(_commands(token.content)), (first + 1, behind - 1)))
        where = _WHERE.fullmatch(token.content) if token.type == "html_block" else None
    return found


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().parse(page.read_text(encoding="utf-8"))


def _commands(text: str) -> Iterator[Command]:
    for part in re.split(rf"^{re.escape(_PROMPT)}", text, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
        yield Command("\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :]).rstrip())


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    blocks = (token.content for token in _tokens(page) if token.type == "fence" and token.info == "python")
    return {named["name"]: block for block in blocks if (named := _FILE.match(block))}


def run(example: Example, folder: Path) -> list[str]:
    """What each command prints, in order, standard output and error together.

    Args:
        folder: where commands run that do not belong to the checkout.
    """
    here = ROOT if example.kind == "checkout" else folder
    if example.kind != "checkout":
        for name, text in files(example.page).items():
            (folder / name).write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NOX_"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    return [_printed(command, here, environment) for command in example.commands]


def _printed(command: Command, folder: Path, environment: dict[str, str]) -> str:
    # The page names the environment that its reader has made; here the running one stands for it.
    line = re.sub(r"(?<!\S)\.venv/bin/", f"{Path(sys.executable).parent}/", command.line)
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def compare(command: Command, printed: str) -> str | None:
    """What differs between the page and a run, or ``None``."""
    printed = _CLOCK.sub(r"\1", printed)
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.REPORT_NDIFF
    if checker.check_output(f"{command.output}\n", f"{printed}\n", flags):
        return None
    difference = checker.output_difference(doctest.Example("", f"{command.output}\n"), f"{printed}\n", flags)
    return f"$ {command.line}\n{difference}"


def renewed(command: Command, printed: str) -> str:
    """The output to show: that of the page where it still holds, else what was printed, with ``...`` for what varies.

    A line ``...`` of the page, for lines that are left out, keeps as many lines before and after it as there were.
    """
    if compare(command, printed) is None:
        return command.output
    shown, lines = command.output.splitlines(), printed.splitlines()
    if _OMISSION in shown:
        before, after = shown.index(_OMISSION), len(shown) - 1 - shown.index(_OMISSION)
        if before + after < len(lines):
            lines = [*lines[:before], _OMISSION, *lines[len(lines) - after :]]
    return "\n".join(_general(line) for line in lines)


def _general(line: str) -> str:
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the blocks of one kind; returns 1 where one differs and is not written anew."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.examples", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=KINDS[:3])
    parser.add_argument("--update", action="store_true", help="write what the commands print now into the pages")
    parsed = parser.parse_args(arguments)
    differ = 0
    account = Account(
        "examples", (example.id for page in PAGES for example in examples(page) if example.kind == parsed.kind)
    )
    for page in PAGES:
        chosen = [example for example in examples(page) if example.kind == parsed.kind]
        done = []
        for example in chosen:
            print(example.id, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                done.append(run(example, Path(folder)))
            account.meet(example.id)
        if parsed.update:
            # From the last to the first, so that the lines of those before stay where they were.
            for example, printed in reversed(list(zip(chosen, done, strict=True))):
                _write(example, printed)
            continue
        for example, printed in zip(chosen, done, strict=True):
            for difference in filter(None, map(compare, example.commands, printed)):
                print(difference)
                differ = 1
    if not account.is_complete:
        print(account.shortfall())
        return 1
    return differ


def _write(example: Example, printed: Sequence[str]) -> None:
    lines, (first, behind) = example.page.read_text(encoding="utf-8").splitlines(), example.lines
    block: list[str] = []
    for command, output in zip(example.commands, printed, strict=True):
        block += [f"{_PROMPT}{command.line}", *renewed(command, output).splitlines()]
    lines[first:behind] = "\n".join(block).splitlines()
    example.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
