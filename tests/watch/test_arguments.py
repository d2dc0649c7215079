"""The command line."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.stack import REQUIRED
from pytest_trlcompat.watch.arguments import parse

from ..conftest import GitHistory
from .clones import make_clone

TODAY = datetime.date(2026, 11, 24)


def test_by_default_everything_as_of_today() -> None:
    found = parse([], TODAY)
    assert (found.packages, found.day, found.since) == (REQUIRED, TODAY, None)
    assert (found.minutes, found.gigabytes, found.narrow, found.prereleases) == (None, None, True, False)
    assert found.scope.name == "compat"


def test_a_past_is_held_against_the_day_before_it_unless_another_is_named() -> None:
    assert parse(["--as-of", "2026-06-02"], TODAY).since == datetime.date(2026, 6, 1)
    assert parse(["--as-of", "2026-06-12", "--since", "2026-06-01"], TODAY).since == datetime.date(2026, 6, 1)


def test_results_of_another_scope_have_another_folder() -> None:
    names = [
        parse(words, TODAY).scope.name
        for words in ([], ["--no-conformance"], ["--every-pair"], ["--issue", "grpo-token-normalizer"])
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--as-of", "2027-01-01"], "is in the future; today is 2026-11-24"),
        (["--as-of", "yesterday"], "write a day"),
        (["--since", "2026-06-01"], "--since belongs to --as-of"),
        (["--as-of", "2026-06-01", "--since", "2026-06-01"], "must be before"),
        (["--minutes", "0"], "must be more than nothing"),
        (["--gigabytes", "-1"], "must be more than nothing"),
        (["--minutes", "nan"], "must be more than nothing"),
        (["--issue", "no-such-issue"], "unknown issue"),
        (["--package", "numpy"], "invalid choice"),
        (["--commit", "trl"], "write PACKAGE=FOLDER"),
        (["--unheard-of"], "unrecognized arguments"),
    ],
)
def test_what_makes_no_sense_is_one_message(words: list[str], message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        parse(words, TODAY)


def test_a_package_has_one_commit(git_history: GitHistory, tmp_path: Path) -> None:
    make_clone(git_history, tmp_path / "trl", "trl", ("1.0.0",))
    with pytest.raises(MatrixError, match="--commit names trl more than once"):
        parse([f"--commit=trl={tmp_path / 'trl'}"] * 2, TODAY)
