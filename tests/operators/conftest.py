"""The operators of PyTorch's database, each tried once for all tests: see __main__.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .listing import Outcome, table

ROOT = Path(__file__).resolve().parents[2]
TABLE = pytest.StashKey[list[str]]()


@dataclass(frozen=True)
class Trial:
    """What came of all operators."""

    torch: str
    outcomes: list[Outcome]


@pytest.fixture(scope="session")
def trial(request: pytest.FixtureRequest) -> Trial:
    """Every operator that the CPU has, in every dtype, with this environment's torch; takes two minutes or so."""
    command = [sys.executable, "-m", "tests.operators"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    first, *others = map(json.loads, done.stdout.splitlines())
    found = Trial(first["torch"], [Outcome(**outcome) for outcome in others])
    request.config.stash[TABLE] = table(found.outcomes, found.torch)
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if TABLE in config.stash:
        terminalreporter.section("PyTorch's operators on the software accelerator")
        for line in config.stash[TABLE]:
            terminalreporter.line(line)
