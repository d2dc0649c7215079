"""What the tests of all projects share: data, and a command run twice, whose end is held against what is known of it.

What a project breaks by itself is expected, strictly: that it no longer does fails the test, too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import LaunchError, LaunchResult
from pytest_trlcompat.strategies import DISTINCT

STRATEGIES = DISTINCT
ROWS: pytest.StashKey[list[tuple[str, ...]]] = pytest.StashKey()


@dataclass(frozen=True)
class Known:
    """What is known of a command.

    Attributes:
        broken: strategy to what the project's own failure says, a pattern, and why, with where to read of it.
        untestable: strategy to the same, where it says nothing about the project: nobody runs it on such a device.
    """

    broken: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    untestable: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@pytest.fixture
def trained(request: pytest.FixtureRequest, strategy_launcher: Any) -> Callable[..., list[float]]:
    """Runs a command under the test's strategy, twice, and returns the losses of the second run."""

    def run(words: Sequence[str], known: Known, losses: Callable[[LaunchResult], list[float]], **options: Any) -> Any:
        rows, strategy = request.config.stash[ROWS], strategy_launcher.strategy
        for what, table in (("broken", known.broken), ("untestable", known.untestable)):
            if strategy in table:
                pattern, why = table[strategy]
                with pytest.raises(LaunchError, match=re.compile(pattern, re.DOTALL)) as caught:
                    strategy_launcher.command(words, **options)
                assert caught.value.artefact is None, caught.value.artefact
                rows.append((request.node.name, what, why))
                end = pytest.xfail if what == "broken" else pytest.skip
                end(f"{what}: {why}")
        seconds = []
        for _ in range(2):
            started = time.monotonic()
            result = strategy_launcher.command(words, **options)
            seconds.append(time.monotonic() - started)
        rows.append((request.node.name, "ok", *(f"{each:.1f}" for each in seconds)))
        return losses(result)

    return run


@pytest.fixture
def pairs(tmp_path: Path) -> Callable[[Callable[[int], dict[str, Any]]], Path]:
    """Writes 16 rows, each made from its number, as JSON lines."""

    def write(row: Callable[[int], dict[str, Any]]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row(number)) for number in range(16)), encoding="utf-8")
        return path

    return write


def printed_losses(result: LaunchResult) -> list[float]:
    """Those that Transformers' logging callback prints, on whichever rank and stream."""
    texts = (stream for rank in result.ranks for stream in (rank.stdout, rank.stderr))
    found = ([float(loss) for loss in re.findall(r"'loss': '?([\d.e+-]+)", text)] for text in texts)
    return next((losses for losses in found if losses), [])


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.section("seconds of a launch, first and later")
        for row in rows:
            terminalreporter.line(f"{row[0]:<34}  {'  '.join(row[1:])}")
